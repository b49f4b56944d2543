"""Records of one benchmark on disk, a line for each sample as it ends, so that an evaluation can be killed at any time.

    HOME/<benchmark>/  settings.json  records.jsonl  summary.json

An evaluation goes on only with the settings that it began with. When all samples are there, the records are put into
the order of the prompts: two evaluations with the same settings leave the same bytes.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from trace_megatron.errors import UserError
from trace_megatron.types import RolloutStatus


@dataclass(frozen=True, slots=True)
class Record:
    """One sample of one prompt."""

    prompt_id: str
    sample: int
    """From 0 to k - 1."""
    reward: float
    status: RolloutStatus
    turns: int
    action_tokens: int
    observation_tokens: int
    answer: str | None
    """What the environment took for the final answer, where it says so."""
    text: str
    """Actions and observations after the prompt."""
    info: Mapping[str, Any]
    """The environment's own; of a failure its ``error``."""


class RecordFile:
    """The samples that are there, and those that come."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Open what an earlier evaluation left, or start. Raises UserError where it had other settings."""
        self._folder = folder
        self._path = folder / "records.jsonl"
        settings = json.loads(json.dumps(settings))
        _check(folder / "settings.json", settings)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"expected to write records at '{folder}', found: {error}: choose another eval.output"
            ) from error
        self._lock = _locked(folder / ".lock")
        _write(folder / "settings.json", json.dumps(settings, indent=1, ensure_ascii=False))
        self._records: dict[tuple[str, int], Record] = {}
        lines = self._path.read_text(encoding="utf-8").split("\n")[:-1] if self._path.is_file() else []
        for line in lines:  # behind the last line break stands what a killed process had begun to write
            values = json.loads(line)
            record = Record(**{**values, "status": RolloutStatus(values["status"])})
            if not record.status.failed:  # what failed is tried again
                self._records[record.prompt_id, record.sample] = record
        self._rewrite(list(self._records.values()))
        self._file = self._path.open("a", encoding="utf-8")

    def __contains__(self, place: tuple[str, int]) -> bool:
        """Whether (prompt id, sample) is there."""
        return place in self._records

    def add(self, record: Record) -> None:
        """Write a record at once."""
        self._records[record.prompt_id, record.sample] = record
        self._file.write(_line(record))
        self._file.flush()

    def finish(self, order: Sequence[tuple[str, int]], summary: Mapping[str, Any]) -> None:
        """All of ``order`` are there: sort them, and write the summary."""
        self._file.close()
        self._rewrite([self._records[place] for place in order])
        _write(self._folder / "summary.json", json.dumps(summary, indent=1))

    def records(self, order: Sequence[tuple[str, int]]) -> list[Record]:
        return [self._records[place] for place in order]

    def close(self) -> None:
        self._file.close()
        self._lock.close()

    def _rewrite(self, records: Sequence[Record]) -> None:
        _write(self._path, "".join(map(_line, records)))


def _line(record: Record) -> str:
    return json.dumps(asdict(record), ensure_ascii=False) + "\n"


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)


def _locked(path: Path) -> TextIO:
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(f"expected no other evaluation in '{path.parent}', found one at work: wait for it") from None
    return file


def _check(path: Path, settings: Mapping[str, Any]) -> None:
    if not path.is_file():
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    for name, value in settings.items():
        if found.get(name) != value:
            raise UserError(
                f"expected the evaluation in '{path.parent}' to go on with {name} {_short(found.get(name))} as it "
                f"began, found {_short(value)}: restore it, set eval.output to another folder, or remove this one"
            )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
