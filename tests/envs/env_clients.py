"""Clients of environment servers that run in the tests' own event loop or in processes."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

from trace_megatron.config import EnvConfig
from trace_megatron.envs.remote import RemoteEnvironment

CONFIG = EnvConfig("calculator", {"max_operations": 3, "size": 500})


@asynccontextmanager
async def client(*urls, config=CONFIG, token=""):
    environment = RemoteEnvironment(replace(config, urls=urls), token)
    try:
        yield environment
    finally:
        await environment.close()


async def tasks_of(environment, split="train"):
    """Asked for in a thread, as a run does: the servers' loop is this one."""
    return await asyncio.to_thread(environment.tasks, split)
