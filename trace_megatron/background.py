"""Work beside the caller's own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(call: Callable[[], T]) -> Future[T]:
    """Run ``call`` in a thread of its own; ``result()`` waits for it, and raises what it raised.

    A process that ends does not wait for it.
    """
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # whoever asks for the result meets it
            future.set_exception(error)

    threading.Thread(target=work, name="background", daemon=True).start()
    return future
