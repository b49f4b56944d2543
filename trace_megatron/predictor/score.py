"""Scores of many histories from few forwards: shared beginnings are computed once, packs keep to a token budget."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch

from trace_megatron.predictor.key_values import KeyValuePages
from trace_megatron.predictor.model import ValueModel
from trace_megatron.predictor.pack import Request, pack_histories


def score_histories(
    model: ValueModel,
    requests: Sequence[Request],
    tokens_per_forward: int,
    pages: KeyValuePages | None = None,
    keep: bool = False,
) -> np.ndarray:
    """Float64 scores, computed in float32, of every requested anchor, in the requested order.

    Prompts whose ``pages`` are known are not computed again; with ``keep``, new ones become known.
    """
    scores = np.zeros(sum(len(anchors) for _, anchors in requests))
    with torch.no_grad():
        for batch in pack_histories(requests, tokens_per_forward):
            with pages.open(batch, keep) if pages is not None else nullcontext() as key_values:
                scores[batch.rows.numpy()] = model(batch, key_values).double().cpu().numpy()
    return scores
