import asyncio
import os
import signal
import threading
import time

import pytest

from trace_megatron.event_loop import EventLoop


@pytest.fixture
def heeds_interrupts():
    """Python's own way, also where the tests were started in the background of a shell, which ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_what_was_started_goes_on_while_the_caller_works():
    with EventLoop() as loop:
        steps: list[str] = []

        async def work():
            for _ in range(3):
                await asyncio.sleep(0.001)
                steps.append(threading.current_thread().name)
            raise ValueError("at the end")

        started = loop.start(work())
        while len(steps) < 3:  # nobody awaits it
            time.sleep(0.001)
        with pytest.raises(ValueError, match="at the end"):
            started.result()
        assert set(steps) == {"event-loop"}
        assert loop.run(asyncio.sleep(0, "value")) == "value"


def test_an_interrupted_wait_cancels_and_the_loop_goes_on(heeds_interrupts):
    ended = threading.Event()

    async def wait():
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    with EventLoop() as loop:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            loop.run(wait())
        assert ended.wait(5)
        assert loop.run(asyncio.sleep(0, "still here")) == "still here"


def test_the_end_cancels_what_runs():
    cleaned_up = []

    async def wait():
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            cleaned_up.append(True)

    with EventLoop() as loop:
        started = loop.start(wait())
        loop.run(asyncio.sleep(0))
    assert cleaned_up and started.cancelled()


def test_the_loop_does_not_wait_for_itself():
    async def run_again(loop):
        with pytest.raises(RuntimeError, match="wait for itself"):
            loop.run(asyncio.sleep(0))
        return "refused"

    with EventLoop() as loop:
        assert loop.run(run_again(loop)) == "refused"
