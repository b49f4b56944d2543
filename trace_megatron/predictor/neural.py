"""The predictor of the paper: a value network that scores, learns and remembers, on one rank or on many.

The driver's methods send what is to be done to the other ranks, which ``repeat`` it; each computes its share. Weights
and Adam's moments stay equal on all ranks, because all take the same steps with the same summed gradients.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trace_megatron.algorithm.scores import Scores, as_scores
from trace_megatron.algorithm.tree import prefix_anchors
from trace_megatron.config import PredictorConfig
from trace_megatron.predictor.checkpoint import copy_training_state, load_training_state, save_training_state
from trace_megatron.predictor.key_values import KeyValuePages
from trace_megatron.predictor.pack import HistoryPath, Request, history_paths
from trace_megatron.predictor.protocol import PredictorStats
from trace_megatron.predictor.replicas import OneReplica, Replicas, Shares, as_paths, as_tensors
from trace_megatron.predictor.score import score_paths
from trace_megatron.predictor.update import accumulate_gradients, as_requests, draw_samples, mini_batches
from trace_megatron.types import ROOT, Prompt, RolloutTree

if TYPE_CHECKING:  # whose transformers this needs not
    from trace_megatron.predictor.model import ValueModel

_ONE_RANK = OneReplica()


class NeuralPredictor:
    """Protocol ``Predictor``. One lock: a score never meets half-updated weights.

    What an update draws depends on the seed and on the number of updates before it alone.
    """

    def __init__(self, model: ValueModel, config: PredictorConfig, seed: int, replicas: Replicas = _ONE_RANK):
        """On every rank with the same arguments; ``replicas`` says which it is."""
        self._model = model
        self._config = config
        self._seed = seed
        self._num_updates = 0
        self._replicas = replicas
        self._shares = Shares(replicas.size)
        self._optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, fused=True)
        self._pages = KeyValuePages(
            model.backbone.config, model.product_dtype, model.device, int(config.kv_cache_gib * 2**30)
        )
        self._lock = threading.Lock()

    # What the driver calls.

    def score_roots(self, prompts: Sequence[Prompt]) -> Scores:
        return self._score([(RolloutTree(prompt, ()), (ROOT,)) for prompt in prompts], keep=True)

    def score_prefixes(self, tree: RolloutTree) -> Scores:
        return self._score([(tree, prefix_anchors(tree))])

    def score_prefixes_many(self, trees: Sequence[RolloutTree]) -> list[Scores]:
        requests = [(tree, prefix_anchors(tree)) for tree in trees]
        bounds = np.cumsum([0, *(len(anchors) for _, anchors in requests)])
        scores = self._score(requests)
        return [scores[first:last] for first, last in pairwise(bounds)]

    def update(self, trees: Sequence[RolloutTree], target_mode: str) -> PredictorStats:
        start_s = time.perf_counter()
        with self._lock:
            rng = np.random.default_rng([self._seed, self._num_updates])
            samples = draw_samples(trees, target_mode, self._config.prefix_share, rng)
            epochs = [mini_batches(samples, self._config.batch_size, rng) for _ in range(self._config.epochs)]
            paths = history_paths(as_requests(trees, samples))
            targets = np.array([sample.target for sample in samples])
            self._send({"call": "update", "epochs": epochs}, paths, targets)
            loss_before, loss_after, num_tokens = self._update(paths, targets, epochs)
        num_roots = sum(sample.anchor == ROOT for sample in samples)
        return PredictorStats(
            loss_before=loss_before,
            loss_after=loss_after,
            num_roots=num_roots,
            num_prefixes=len(samples) - num_roots,
            num_tokens=num_tokens,
            seconds=time.perf_counter() - start_s,
        )

    def snapshot(self) -> Callable[[Path], None]:
        with self._lock:
            tensors = copy_training_state(self._model, self._optimizer)
            state = {"num_updates": self._num_updates}
        return lambda folder: save_training_state(folder, tensors, state)

    def load(self, folder: Path) -> None:
        with self._lock:
            self._load(folder)  # first here: what is refused, is refused before the other ranks hear of it
            self._send({"call": "load", "folder": str(folder)})

    # What the other ranks do.

    def repeat(self, arguments: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        """What the driver sent through ``Replicas.send``."""
        if arguments["call"] == "load":
            self._load(Path(arguments["folder"]))
            return
        *packed, targets = tensors
        paths = as_paths(packed)
        if arguments["call"] == "score":
            self._score_share(paths, arguments["keep"])
        else:
            self._update(paths, targets.numpy(), arguments["epochs"])

    # What every rank does.

    def _send(
        self, arguments: Mapping[str, Any], paths: Sequence[HistoryPath] = (), targets: np.ndarray | None = None
    ) -> None:
        if self._replicas.size == 1:
            return
        values = np.zeros(0) if targets is None else targets
        self._replicas.send(arguments, [*as_tensors(paths), torch.from_numpy(values)])

    def _score(self, requests: Sequence[Request], keep: bool = False) -> Scores:
        paths = history_paths(requests)
        with self._lock:
            self._send({"call": "score", "keep": keep}, paths)
            return as_scores(self._score_share(paths, keep))

    def _score_share(self, paths: Sequence[HistoryPath], keep: bool) -> torch.Tensor:
        """Scores of all paths' rows, on the model's device; this rank computes its share."""
        scores = torch.zeros(sum(len(path.rows) for path in paths), dtype=torch.float64, device=self._model.device)
        mine = self._shares.mine(paths, self._replicas.rank)
        score_paths(self._model, mine, self._config.tokens_per_forward, scores, self._pages, keep)
        if self._replicas.size > 1:
            self._replicas.add(scores)
        return scores

    def _update(
        self, paths: Sequence[HistoryPath], targets: np.ndarray, epochs: Sequence[Sequence[Sequence[int]]]
    ) -> tuple[float | None, float | None, int]:
        """Train; (mean squared error of the first epoch as it went, of all after the last, tokens of one epoch)."""
        self._pages.clear()  # they belong to the weights that change now
        self._shares.forget()
        self._num_updates += 1
        if not paths:
            return None, None, 0
        sums = self._summed(np.array([self._train_epoch(paths, targets, batches) for batches in epochs]))
        scores = self._score_share(paths, keep=False).cpu().numpy()
        self._shares.forget()
        return sums[0, 0] / len(paths), float(np.mean((scores - targets) ** 2)), int(sums[0, 1])

    def _train_epoch(
        self, paths: Sequence[HistoryPath], targets: np.ndarray, batches: Sequence[Sequence[int]]
    ) -> tuple[float, int]:
        """One Adam step per mini-batch; returns this rank's (squared error, packed tokens)."""
        squared_error, num_tokens = 0.0, 0
        for batch in batches:
            mine = self._shares.mine([paths[index] for index in batch], self._replicas.rank)
            error, tokens = accumulate_gradients(
                self._model, mine, targets, len(batch), self._config.tokens_per_forward
            )
            self._add_gradients()
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)  # between updates no memory is held
            squared_error += error
            num_tokens += tokens
        return squared_error, num_tokens

    def _add_gradients(self) -> None:
        if self._replicas.size == 1:
            return
        for parameter in self._model.parameters():
            if parameter.grad is None:  # this rank had no share
                parameter.grad = torch.zeros_like(parameter)
            self._replicas.add(parameter.grad)

    def _summed(self, values: np.ndarray) -> np.ndarray:
        if self._replicas.size == 1:
            return values
        total = torch.from_numpy(values).to(self._model.device)
        self._replicas.add(total)
        return total.cpu().numpy()

    def _load(self, folder: Path) -> None:
        self._pages.clear()
        self._shares.forget()
        self._num_updates = load_training_state(folder, self._model, self._optimizer)["num_updates"]
