"""Scores of many histories from few forwards: shared beginnings are computed once, packs keep to a token budget."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch

from trace_megatron.predictor.key_values import KeyValuePages
from trace_megatron.predictor.pack import HistoryPath, Request, history_paths, pack_paths

if TYPE_CHECKING:  # whose transformers this needs not
    from trace_megatron.predictor.model import ValueModel


def score_histories(model: ValueModel, requests: Sequence[Request], tokens_per_forward: int) -> np.ndarray:
    """Float64 scores, computed in float32, of every requested anchor, in the requested order."""
    scores = torch.zeros(sum(len(anchors) for _, anchors in requests), dtype=torch.float64, device=model.device)
    score_paths(model, history_paths(requests), tokens_per_forward, scores)
    return scores.cpu().numpy()


def score_paths(
    model: ValueModel,
    paths: Sequence[HistoryPath],
    tokens_per_forward: int,
    scores: torch.Tensor,
    pages: KeyValuePages | None = None,
    keep: bool = False,
) -> None:
    """Write the paths' rows of ``scores``, float64 on the model's device; nothing is read back.

    Prompts whose ``pages`` are known are not computed again; with ``keep``, new ones become known.
    """
    with torch.no_grad():
        for batch in pack_paths(paths, tokens_per_forward):
            with pages.open(batch, keep) if pages is not None else nullcontext() as key_values:
                scores[batch.rows.to(scores.device)] = model(batch, key_values).double()
