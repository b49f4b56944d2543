"""The event loop of engines and environments, in a thread of its own: rollouts go on while the caller trains."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoop:
    """Runs coroutines for threads that have no loop; under ``with``. What still runs at the end is cancelled."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="event-loop", daemon=True)

    def __enter__(self) -> EventLoop:
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.run(_end_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Let it run, and go on; ``result()`` of what is returned waits for it, and raises what it raised."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for its result. Where the waiting is interrupted (Ctrl-C, SIGTERM), it is cancelled."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("expected a call from another thread than the event loop's, which would wait for itself")
        running = self.start(coroutine)
        try:
            return running.result()
        finally:
            running.cancel()  # does nothing once it has ended


async def _end_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()
