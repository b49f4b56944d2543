"""An index folder: passages, what finds them, and a description. It appears complete or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trace_megatron.errors import UserError
from trace_megatron.retrieval.passages import Passage, PassageStore, read_corpus, write_passages

KINDS = ("bm25", "dense")
FORMAT_VERSION = 1

_DESCRIPTION, _PLAN = "index.json", "plan.json"

Progress = Callable[[str, int, int], None]
"""Called with (what is done, passages done, passages in all or 0 while that is unknown)."""


class Searcher(Protocol):
    """Finds passages by number."""

    def search(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]: ...


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage that was found, with its score: higher is better, comparable within one index only."""

    passage: Passage
    score: float


class Index:
    """An opened index folder."""

    def __init__(self, folder: str | Path) -> None:
        """Raises UserError if the folder is not a complete index of this version."""
        description = read_description(folder)
        self.kind: str = description["kind"]
        self._passages = PassageStore(folder)
        self._searcher = _open_searcher(self.kind, Path(folder), description["settings"])

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The best ``k`` passages of each query, fewer if fewer match."""
        found = self._searcher.search(queries, k)
        return [[Hit(self._passages[number], score) for number, score in hits] for hits in found]


def read_description(folder: str | Path) -> dict[str, Any]:
    """What kind of index ``folder`` holds; raises UserError if it holds none."""
    path = Path(folder) / _DESCRIPTION
    if not path.is_file():
        raise UserError(f"expected an index folder, found none at '{folder}': make one with tools/build_index.py")
    description = json.loads(path.read_text())
    if description.get("version") != FORMAT_VERSION:
        raise UserError(
            f"expected an index of version {FORMAT_VERSION} at '{folder}', found {description.get('version')}: "
            "build it again with tools/build_index.py"
        )
    return description


def build_index(
    corpus: Sequence[str | Path],
    folder: str | Path,
    kind: str,
    settings: Mapping[str, Any] | None = None,
    progress: Progress = lambda what, done, total: None,
) -> None:
    """Index the passages of ``corpus`` into the new folder ``folder``.

    The work is done in a folder beside it that is renamed at the end; the same call after an interruption goes on with
    the passages and embeddings that are there. Raises UserError on bad input.
    """
    folder, settings = Path(folder), dict(settings or {})
    if kind not in KINDS:
        raise UserError(f"expected an index of kind {' or '.join(KINDS)}, found '{kind}'")
    if folder.exists():
        raise UserError(f"expected a new folder for the index, found '{folder}': remove it or choose another")
    partial = folder.with_name(f".{folder.name}.partial")
    plan = {"corpus": [_fingerprint(path) for path in corpus], "kind": kind, "settings": settings}
    _open_partial(partial, plan)
    store = _store_passages(corpus, partial, progress)

    def report(done: int) -> None:
        progress("indexed" if kind == "bm25" else "embedded", done, len(store))

    if kind == "bm25":
        from trace_megatron.retrieval.bm25 import build_bm25  # each kind has packages of its own

        found = build_bm25(store, partial, report)
    else:
        from trace_megatron.retrieval.dense import build_dense

        found = build_dense(store, partial, report, **settings)
    description = {"version": FORMAT_VERSION, "kind": kind, "num_passages": len(store), "settings": found}
    (partial / _DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n")
    (partial / _PLAN).unlink()
    partial.rename(folder)


def _open_searcher(kind: str, folder: Path, settings: dict[str, Any]) -> Searcher:
    if kind == "bm25":
        from trace_megatron.retrieval.bm25 import BM25Index  # each kind has packages of its own

        return BM25Index(folder, settings)
    from trace_megatron.retrieval.dense import DenseIndex

    return DenseIndex(folder, settings)


def _fingerprint(path: str | Path) -> list[Any]:
    if not Path(path).is_file():
        raise UserError(f"expected a corpus as JSONL, found nothing at '{path}'")
    stat = Path(path).stat()
    return [str(Path(path).resolve()), stat.st_size, stat.st_mtime_ns]


def _open_partial(partial: Path, plan: Mapping[str, Any]) -> None:
    """Keep the folder of an interrupted build of the same plan; anything else in its place is removed."""
    path = partial / _PLAN
    if path.is_file() and json.loads(path.read_text()) == plan:
        return
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    path.write_text(json.dumps(plan))


def _store_passages(corpus: Sequence[str | Path], partial: Path, progress: Progress) -> PassageStore:
    done = partial / "passages.done"
    if not done.exists():
        write_passages(read_corpus(corpus), partial, lambda number: progress("read", number, 0))
        done.touch()
        os.sync()
    return PassageStore(partial)
