"""What a person reads while a run works: lines and progress on stderr. Metrics have their own files (metrics.py)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

console = Console(stderr=True, highlight=False, soft_wrap=True)

PLAIN_PERIOD_S = 15.0
"""Seconds between progress lines where no terminal is attached (a Slurm log, CI)."""


def say(text: str) -> None:
    """Print one line."""
    console.print(text, markup=False)


class ProgressReport:
    """Counts finished pieces of work: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, description: str, bar: Progress | None):
        self._description = description
        self._bar = bar
        self._task = bar.add_task(description, total=None) if bar is not None else None
        self._last_s = time.monotonic()

    def update(self, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
        elif time.monotonic() - self._last_s > PLAIN_PERIOD_S:
            self._last_s = time.monotonic()
            say(f"  {self._description}: {done}/{total}")


@contextmanager
def progress(description: str) -> Iterator[ProgressReport]:
    """A ProgressReport that vanishes when its work is done."""
    if not console.is_terminal:
        yield ProgressReport(description, None)
        return
    columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        yield ProgressReport(description, bar)
