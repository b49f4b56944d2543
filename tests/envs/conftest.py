"""A sandbox that the tests of a file share: its workers start once."""

from __future__ import annotations

import pytest

from trace_megatron.envs.sandbox.pool import Limits, Sandbox
from trace_megatron.event_loop import EventLoop


@pytest.fixture(scope="module")
def loop():
    with EventLoop() as runner:
        yield runner


@pytest.fixture(scope="module")
def sandbox(bubblewrap, loop):
    sandbox = Sandbox(Limits(cpu_s=1.0, output_bytes=500), num_workers=2)
    yield sandbox
    loop.run(sandbox.close())
