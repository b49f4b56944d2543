"""Dense retrieval: embeddings of a sentence-transformers model in a FAISS index, by inner product of unit vectors."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trace_megatron.errors import UserError
from trace_megatron.retrieval.passages import PassageStore

try:
    import faiss
    from sentence_transformers import SentenceTransformer
except ImportError as error:
    raise UserError(
        "expected the packages faiss-cpu and sentence-transformers for a dense index, found none: "
        "pip install 'trace-megatron[retrieval]'"
    ) from error

_INDEX_FILE, _VECTORS_FILE = "index.faiss", "vectors.f32"
_PASSAGES_PER_STEP = 256  # embedded, written and reported together; what a restart may have to do again
_TRAINING_VECTORS = 500_000  # of an inverted file's centroids and codes: 100 per list are plenty up to 5,000 lists


def default_prefixes(model: str) -> tuple[str, str]:
    """What a model wants before a query and before a passage; E5 was trained with them, others with nothing."""
    return ("query: ", "passage: ") if "e5" in Path(model).name.lower().split("-") else ("", "")


def build_dense(
    store: PassageStore,
    folder: Path,
    progress: Callable[[int], None],
    *,
    model: str,
    factory: str = "Flat",
    dtype: str = "float32",
    batch_size: int = 64,
    query_prefix: str | None = None,
    passage_prefix: str | None = None,
) -> dict[str, Any]:
    """Write the index of all passages into ``folder``; returns what its search must know.

    ``factory``: FAISS's description of the index, e.g. "Flat" or "IVF4096,SQ8". ``dtype``: of the model; vectors are
    float32. Embeddings that an interrupted build left in ``folder`` are kept. Raises UserError for a model or a
    description that cannot be used.
    """
    encoder = _load_encoder(model, dtype)
    query, passage = default_prefixes(model)
    query = query if query_prefix is None else query_prefix
    passage = passage if passage_prefix is None else passage_prefix
    dim = encoder.get_embedding_dimension()
    _embed_passages(store, folder / _VECTORS_FILE, progress, encoder, passage, dim, batch_size)
    vectors = np.memmap(folder / _VECTORS_FILE, np.float32, "r", shape=(len(store), dim))
    faiss.write_index(_build_faiss(vectors, factory), str(folder / _INDEX_FILE))
    (folder / _VECTORS_FILE).unlink()
    return {
        "model": str(Path(model).resolve()) if Path(model).is_dir() else model,
        "dtype": dtype,
        "query_prefix": query,
        "passage_prefix": passage,
        "factory": factory,
    }


class DenseIndex:
    """Searches a folder that ``build_dense`` wrote. Vectors stay on disk until a search touches them."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._encoder = _load_encoder(settings["model"], settings["dtype"])
        self._prefix = settings["query_prefix"]
        # FAISS maps an inverted file's lists by one flag, a flat index's vectors by another, and not by both.
        flag = faiss.IO_FLAG_MMAP if "IVF" in settings["factory"] else faiss.IO_FLAG_MMAP_IFC
        self._index = faiss.read_index(str(folder / _INDEX_FILE), flag)
        if hasattr(self._index, "nlist"):
            self._index.nprobe = num_probes(self._index.nlist)

    def search(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        """Per query, (passage, inner product) pairs, best first."""
        vectors = _encode(self._encoder, [self._prefix + query for query in queries], len(queries))
        scores, passages = self._index.search(vectors, min(k, self._index.ntotal))
        return [
            [(passage, score) for passage, score in zip(row, row_scores, strict=True) if passage >= 0]
            for row, row_scores in zip(passages.tolist(), scores.tolist(), strict=True)
        ]


def num_probes(num_lists: int) -> int:
    """Inverted lists that a search reads: one in 16, from 32 to 128."""
    return min(num_lists, max(32, min(128, num_lists // 16)))


def _load_encoder(model: str, dtype: str) -> SentenceTransformer:
    try:
        return SentenceTransformer(model, model_kwargs={"dtype": getattr(torch, dtype)})
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"expected a sentence-transformers model at '{model}', found none: give the path of a downloaded model "
            f"({reason})"
        ) from error


def _encode(encoder: SentenceTransformer, texts: Sequence[str], batch_size: int) -> np.ndarray:
    return encoder.encode(
        list(texts), batch_size=batch_size, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False
    ).astype(np.float32, copy=False)


def _embed_passages(
    store: PassageStore,
    path: Path,
    progress: Callable[[int], None],
    encoder: SentenceTransformer,
    prefix: str,
    dim: int,
    batch_size: int,
) -> None:
    """Append the vectors that are missing in ``path``; a torn row at its end is written again."""
    row_bytes = dim * np.dtype(np.float32).itemsize
    with path.open("ab") as file:
        done = min(path.stat().st_size // row_bytes, len(store))
        os.ftruncate(file.fileno(), done * row_bytes)
        while done < len(store):
            end = min(done + _PASSAGES_PER_STEP, len(store))
            texts = [prefix + store[number].indexed_text for number in range(done, end)]
            file.write(_encode(encoder, texts, batch_size).tobytes())
            file.flush()
            done = end
            progress(done)


def _build_faiss(vectors: np.ndarray, factory: str) -> faiss.Index:
    try:
        index = faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise UserError(
            f"expected a FAISS index description such as Flat or IVF4096,SQ8 for --factory, found '{factory}'"
        ) from error
    if not index.is_trained:
        sample = np.random.default_rng(0).permutation(len(vectors))[:_TRAINING_VECTORS]
        index.train(np.ascontiguousarray(vectors[np.sort(sample)]))
    for start in range(0, len(vectors), 1 << 16):
        index.add(np.ascontiguousarray(vectors[start : start + (1 << 16)]))
    return index
