"""The predictor of the paper: a value network that scores, learns and remembers."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from trace_megatron.algorithm.tree import prefix_anchors
from trace_megatron.config import PredictorConfig
from trace_megatron.predictor.checkpoint import load_training_state, save_training_state
from trace_megatron.predictor.key_values import KeyValuePages
from trace_megatron.predictor.model import ValueModel
from trace_megatron.predictor.pack import Request
from trace_megatron.predictor.protocol import PredictorStats
from trace_megatron.predictor.score import score_histories
from trace_megatron.predictor.update import Sample, accumulate_gradients, as_requests, draw_samples, mini_batches
from trace_megatron.types import ROOT, Prompt, RolloutTree


class NeuralPredictor:
    """Protocol ``Predictor``. One lock: a score never meets half-updated weights.

    What an update draws depends on the seed and on the number of updates before it alone.
    """

    def __init__(self, model: ValueModel, config: PredictorConfig, seed: int):
        self._model = model
        self._config = config
        self._seed = seed
        self._num_updates = 0
        self._optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, fused=True)
        self._pages = KeyValuePages(
            model.backbone.config, model.product_dtype, model.device, int(config.kv_cache_gib * 2**30)
        )
        self._lock = threading.Lock()

    def score_roots(self, prompts: Sequence[Prompt]) -> np.ndarray:
        return self._score([(RolloutTree(prompt, ()), (ROOT,)) for prompt in prompts], keep=True)

    def score_prefixes(self, tree: RolloutTree) -> np.ndarray:
        return self._score([(tree, prefix_anchors(tree))])

    def score_prefixes_many(self, trees: Sequence[RolloutTree]) -> list[np.ndarray]:
        requests = [(tree, prefix_anchors(tree)) for tree in trees]
        bounds = np.cumsum([0, *(len(anchors) for _, anchors in requests)])
        scores = self._score(requests)
        return [scores[first:last] for first, last in pairwise(bounds)]

    def update(self, trees: Sequence[RolloutTree], target_mode: str) -> PredictorStats:
        start_s = time.perf_counter()
        with self._lock:
            self._pages.clear()  # they belong to the weights that change now
            rng = np.random.default_rng([self._seed, self._num_updates])
            self._num_updates += 1
            samples = draw_samples(trees, target_mode, self._config.prefix_share, rng)
            epochs = [self._train_epoch(trees, samples, rng) for _ in range(self._config.epochs)] if samples else []
            loss_after = self._loss(trees, samples) if samples else None
        loss_before, num_tokens = epochs[0] if epochs else (None, 0)
        num_roots = sum(sample.anchor == ROOT for sample in samples)
        return PredictorStats(
            loss_before=loss_before,
            loss_after=loss_after,
            num_roots=num_roots,
            num_prefixes=len(samples) - num_roots,
            num_tokens=num_tokens,
            seconds=time.perf_counter() - start_s,
        )

    def save(self, folder: Path) -> None:
        with self._lock:
            save_training_state(folder, self._model, self._optimizer, {"num_updates": self._num_updates})

    def load(self, folder: Path) -> None:
        with self._lock:
            self._pages.clear()
            self._num_updates = load_training_state(folder, self._model, self._optimizer)["num_updates"]

    def _score(self, requests: Sequence[Request], keep: bool = False) -> np.ndarray:
        with self._lock:
            return score_histories(self._model, requests, self._config.tokens_per_forward, self._pages, keep)

    def _train_epoch(
        self, trees: Sequence[RolloutTree], samples: Sequence[Sample], rng: np.random.Generator
    ) -> tuple[float, int]:
        """One Adam step per mini-batch; returns (mean squared error met, packed tokens)."""
        squared_error, num_tokens = 0.0, 0
        for batch in mini_batches(samples, self._config.batch_size, rng):
            error, tokens = accumulate_gradients(self._model, trees, batch, self._config.tokens_per_forward)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)  # between updates no memory is held
            squared_error += error
            num_tokens += tokens
        return squared_error / len(samples), num_tokens

    def _loss(self, trees: Sequence[RolloutTree], samples: Sequence[Sample]) -> float:
        scores = score_histories(self._model, as_requests(trees, samples), self._config.tokens_per_forward)
        targets = np.array([sample.target for sample in samples])
        return float(np.mean((scores - targets) ** 2))
