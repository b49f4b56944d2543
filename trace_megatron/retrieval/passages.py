"""A corpus of passages: read from JSONL, stored as one file that is memory-mapped, found by number.

A line of a corpus is {"id", "title", "text"}; id and title may be missing. Also read: {"id", "contents"}, where the
first line of contents is the title in quotation marks, the form of the 21-million-passage Wikipedia of many QA papers.
"""

from __future__ import annotations

import gzip
import json
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trace_megatron.errors import UserError

_TEXT_FILE, _OFFSETS_FILE = "passages.jsonl", "passages.offsets.npy"


@dataclass(frozen=True, slots=True)
class Passage:
    """What a search returns."""

    id: str
    title: str
    text: str

    @property
    def indexed_text(self) -> str:
        """Titles are searched too: questions name things by them."""
        return f"{self.title}\n{self.text}" if self.title else self.text


def read_corpus(paths: Sequence[str | Path]) -> Iterator[Passage]:
    """The passages of JSONL files, ``.gz`` ones included, in order; raises UserError on the first wrong line."""
    number = 0
    for path in map(Path, paths):
        if not path.is_file():
            raise UserError(f"expected a corpus as JSONL, found nothing at '{path}'")
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for line_number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse(line, number, f"{path}, line {line_number}")
                    number += 1


def _parse(line: str, number: int, where: str) -> Passage:
    try:
        record: Any = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("text", record.get("contents")), str):
        raise UserError(f'expected {{"id", "title", "text"}} or {{"id", "contents"}} in {where}, found {line[:80]!r}')
    title, text = record.get("title") or "", record.get("text")
    if text is None:
        first, _, rest = record["contents"].partition("\n")
        title, text = (first.strip('" '), rest) if rest else ("", first)
    return Passage(str(record.get("id", number)), str(title), text)


def write_passages(
    passages: Iterable[Passage], folder: Path, progress: Callable[[int], None] = lambda done: None
) -> int:
    """Store passages in ``folder`` and return how many; raises UserError if there are none."""
    offsets = [0]
    with (folder / _TEXT_FILE).open("wb") as file:
        for passage in passages:
            line = json.dumps(asdict(passage), ensure_ascii=False).encode() + b"\n"
            file.write(line)
            offsets.append(offsets[-1] + len(line))
            progress(len(offsets) - 1)
    if len(offsets) == 1:
        raise UserError("expected passages in the corpus, found none: check its files")
    np.save(folder / _OFFSETS_FILE, np.array(offsets, np.int64), allow_pickle=False)
    return len(offsets) - 1


class PassageStore(Sequence[Passage]):
    """The stored passages; only those that are asked for are read from disk."""

    def __init__(self, folder: str | Path) -> None:
        self._offsets = np.load(Path(folder) / _OFFSETS_FILE, mmap_mode="r", allow_pickle=False)
        with (Path(folder) / _TEXT_FILE).open("rb") as file:
            self._text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> Passage:
        if not 0 <= number < len(self):
            raise IndexError(number)
        return Passage(**json.loads(self._text[self._offsets[number] : self._offsets[number + 1]]))
