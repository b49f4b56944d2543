"""Concurrency limit and time limit of an environment, whatever it does inside."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from trace_megatron.rollout.env import Environment, Transition
from trace_megatron.types import Task

T = TypeVar("T")


class LimitedEnvironment:
    """An environment of which at most ``max_concurrency`` calls run at once, each for at most ``timeout_s``.

    A call that waits for its turn is not on the clock. One that takes too long is cancelled and raises TimeoutError,
    which the rollout records as ENV_ERROR.
    """

    def __init__(self, environment: Environment, max_concurrency: int, timeout_s: float) -> None:
        """``max_concurrency``: 0 for no limit."""
        self.unlimited = environment
        self._timeout_s = timeout_s
        self.max_concurrency = max_concurrency
        self._turns: asyncio.Semaphore | None = None

    def tasks(self, split: str) -> Sequence[Task]:
        return self.unlimited.tasks(split)

    async def reset(self, task: Task) -> Any:
        return await self._limited(self.unlimited.reset, task)

    async def step(self, state: Any, action: str) -> Transition:
        return await self._limited(self.unlimited.step, state, action)

    async def close(self) -> None:
        await self.unlimited.close()

    async def _limited(self, call: Any, *arguments: Any) -> Any:
        async with AsyncExitStack() as stack:
            if self.max_concurrency:
                self._turns = self._turns or asyncio.Semaphore(self.max_concurrency)
                await stack.enter_async_context(self._turns)
            return await _within(call(*arguments), self._timeout_s)


async def _within(call: Awaitable[T], timeout_s: float) -> T:
    try:
        async with asyncio.timeout(timeout_s) as clock:
            return await call
    except TimeoutError:
        if not clock.expired():  # the environment's own
            raise
        raise TimeoutError(f"no answer within env.timeout_s={timeout_s:g} s") from None
