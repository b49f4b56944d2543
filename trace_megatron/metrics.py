"""Where a run's numbers go: ``metrics.jsonl`` (one flat object a step) and TensorBoard."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class Stopwatch:
    """Seconds by phase; phases may be entered more than once."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start_s


@dataclasses.dataclass(frozen=True, slots=True)
class StepMetrics:
    """One step's numbers, grouped; written flat as ``group/field``."""

    step: int
    """Counted from 1."""
    groups: Mapping[str, Any]
    """Group name to a record (or mapping) of numbers and lists of numbers; None fields are left out."""
    seconds: Mapping[str, float]
    """Seconds by phase."""

    def flat(self) -> dict[str, Any]:
        values: dict[str, Any] = {"step": self.step}
        for group, record in {**self.groups, "seconds": self.seconds}.items():
            fields = dataclasses.asdict(record) if dataclasses.is_dataclass(record) else record
            values |= {f"{group}/{key}": value for key, value in fields.items() if value is not None}
        return values


class MetricsWriter:
    """Appends to ``metrics.jsonl`` and TensorBoard; on resume drops what later steps of the lost run had written."""

    def __init__(self, folder: Path, first_step: int):
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"
        kept = [line for line in read_lines(self._path) if json.loads(line)["step"] < first_step]
        self._path.write_text("".join(line + "\n" for line in kept))
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def write(self, metrics: StepMetrics) -> None:
        values = metrics.flat()
        with self._path.open("a") as file:
            file.write(json.dumps({key: _jsonable(value) for key, value in values.items()}) + "\n")
        for key, value in values.items():
            if key != "step" and isinstance(value, int | float):
                self._board.add_scalar(key, value, metrics.step)
        self._board.flush()

    def close(self) -> None:
        self._board.close()


def read_lines(path: Path) -> list[str]:
    """Complete lines of a JSONL file; a line that an interruption cut is left out."""
    if not path.exists():
        return []
    return [line for line in path.read_text().split("\n")[:-1] if line]


def _jsonable(value: Any) -> Any:
    """JSON has no NaN or infinity: write them as null rather than as text that parsers refuse."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
