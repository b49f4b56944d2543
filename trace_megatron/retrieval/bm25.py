"""BM25 over bm25s: no model, no GPU, memory-mapped scores."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trace_megatron.errors import UserError
from trace_megatron.retrieval.passages import PassageStore

try:
    import bm25s
    import Stemmer
except ImportError as error:
    raise UserError(
        "expected the packages bm25s and PyStemmer for a BM25 index, found none: "
        "pip install 'trace-megatron[retrieval]'"
    ) from error

_K1, _B = 1.5, 0.75  # bm25s's own; 0.9 and 0.4 found all supporting passages of 4 % fewer HotpotQA questions
_LANGUAGE = "english"  # of stop words and of the stemmer
_COMPILE_FROM = 1_000_000  # passages: numba takes 7 s to compile, and then 60 instead of 900 microseconds for 15,678


def build_bm25(store: PassageStore, folder: Path, progress: Callable[[int], None]) -> dict[str, Any]:
    """Write the index of all passages into ``folder``; returns what its search must know."""
    index = bm25s.BM25(k1=_K1, b=_B)
    index.index(_tokenize(_Reported(store, progress), return_ids=True), show_progress=False)
    index.save(folder, show_progress=False)
    return {}


class BM25Index:
    """Searches a folder that ``build_bm25`` wrote."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._index = bm25s.BM25.load(folder, mmap=True, show_progress=False)
        if self._index.scores["num_docs"] >= _COMPILE_FROM and importlib.util.find_spec("numba"):
            self._index.backend = "numba"

    def search(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        """Per query, (passage, score) pairs, best first; passages that share no word with it are left out."""
        tokens = _tokenize(queries, return_ids=False)
        asked = [number for number, words in enumerate(tokens) if words]
        hits: list[list[tuple[int, float]]] = [[] for _ in queries]
        if asked:
            k = min(k, self._index.scores["num_docs"])
            found = self._index.retrieve([tokens[number] for number in asked], k=k, show_progress=False)
            for number, passages, scores in zip(asked, found.documents.tolist(), found.scores.tolist(), strict=True):
                hits[number] = [(passage, score) for passage, score in zip(passages, scores, strict=True) if score > 0]
        return hits


def _tokenize(texts: Sequence[str], return_ids: bool) -> Any:
    # A stemmer caches words and is not thread-safe: one for each call.
    return bm25s.tokenize(
        texts, stopwords=_LANGUAGE, stemmer=Stemmer.Stemmer(_LANGUAGE), return_ids=return_ids, show_progress=False
    )


class _Reported(Sequence[str]):
    """The passages' texts, read one by one; each reading is reported."""

    def __init__(self, store: PassageStore, progress: Callable[[int], None]) -> None:
        self._store, self._progress = store, progress

    def __len__(self) -> int:
        return len(self._store)

    def __getitem__(self, number: int) -> str:
        self._progress(number + 1)
        return self._store[number].indexed_text
