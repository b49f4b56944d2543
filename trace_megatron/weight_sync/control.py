"""One call to several engines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from trace_megatron.rollout.engine import Engine


async def control_all(engines: Sequence[Engine], method: str, *args: Any, **kwargs: Any) -> None:
    """Await the same method of all of them; raise the first error when all have ended."""
    await control_each([(engine, args) for engine in engines], method, **kwargs)


async def control_each(calls: Sequence[tuple[Engine, tuple[Any, ...]]], method: str, **kwargs: Any) -> None:
    """As ``control_all``, each engine with arguments of its own."""
    controls = (engine.control(method, *args, **kwargs) for engine, args in calls)
    for result in await asyncio.gather(*controls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
