"""From the configuration's section to a predictor."""

from __future__ import annotations

import torch

from trace_megatron.config import PredictorConfig
from trace_megatron.errors import UserError
from trace_megatron.predictor.controls import ConstantPredictor, OraclePredictor
from trace_megatron.predictor.neural import NeuralPredictor
from trace_megatron.predictor.protocol import Predictor
from trace_megatron.predictor.replicas import OneReplica, Replicas


def build_predictor(
    config: PredictorConfig,
    seed: int,
    device: torch.device | str | None = None,
    replicas: Replicas | None = None,
) -> Predictor | None:
    """The predictor that ``config.kind`` names, None for ``none``; ``device`` None: a CUDA device where there is one.

    With ``replicas`` on every rank, of which the driver alone calls a predictor's methods.

    Raises UserError on numbers out of range and on a model that is missing or not a plain causal decoder.
    """
    _check(config)
    if config.kind == "none":
        return None
    if config.kind == "constant":
        return ConstantPredictor()
    if config.kind == "oracle":
        return OraclePredictor()
    if not config.model:
        raise UserError(
            "expected the backbone's HF folder in predictor.model, found none: predictor.kind=model needs it"
        )
    # Here, because only this kind needs transformers' models, which take seconds to import.
    from trace_megatron.predictor.model import load_value_model

    model = load_value_model(config.model, num_layers=config.num_layers, dtype=config.dtype, seed=seed)
    model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return NeuralPredictor(model, config, seed, replicas or OneReplica())


def _check(config: PredictorConfig) -> None:
    if not config.learning_rate > 0.0:
        raise UserError(f"expected a positive predictor.learning_rate, found {config.learning_rate}")
    if not 0.0 <= config.prefix_share < 1.0:
        raise UserError(f"expected predictor.prefix_share from 0 to below 1, found {config.prefix_share}")
    if not config.kv_cache_gib >= 0.0:
        raise UserError(f"expected predictor.kv_cache_gib of at least 0, found {config.kv_cache_gib}")
    for name in ("epochs", "batch_size", "tokens_per_forward"):
        if getattr(config, name) < 1:
            raise UserError(f"expected predictor.{name} of at least 1, found {getattr(config, name)}")
