"""The predictor's scorer and TRACE's allocator, as the step function uses them, on the device against the CPU.

The scorer's packing, pages and attention are the product's own; the backbone is a small transformer written here, since
this part needs torch alone. Legend: Q computed tokens, A histories.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from trace_megatron.algorithm.allocate import allocate_prefixes
from trace_megatron.algorithm.scores import to_host
from trace_megatron.algorithm.selectors import prefix_view, root_view
from trace_megatron.algorithm.selectors.trace import TraceSelector
from trace_megatron.algorithm.tree import prefix_anchors
from trace_megatron.types import ROOT, Prompt, Rollout, RolloutStatus, RolloutTree, Task, Turn

from .results import Check, Outcome, SkippedError


def _import_parts():
    """The scorer's files without the package's ``__init__``, which imports transformers."""
    name = "trace_megatron.predictor"
    if name not in sys.modules:
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(Path(__file__).parents[2] / "trace_megatron/predictor")]
        sys.modules[name] = importlib.util.module_from_spec(spec)
    from trace_megatron.predictor import key_values, pack, score

    return key_values.KeyValuePages, pack.history_paths, score.score_paths


KeyValuePages, history_paths, score_paths = _import_parts()

CONFIG = SimpleNamespace(
    num_attention_heads=8, num_key_value_heads=2, hidden_size=512, head_dim=64, num_hidden_layers=2
)
_VOCABULARY, _TOKENS_PER_FORWARD = 1000, 8192


class Backbone(nn.Module):
    """Pre-norm attention with rotary positions and a gated MLP, as in Llama; callable as ``score_paths`` wants it."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        super().__init__()
        width, heads, groups, dim = CONFIG.hidden_size, CONFIG.num_attention_heads, CONFIG.num_key_value_heads, 64
        torch.manual_seed(0)
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.qkv = nn.ModuleList(nn.Linear(width, (heads + 2 * groups) * dim) for _ in range(CONFIG.num_hidden_layers))
        self.out = nn.ModuleList(nn.Linear(heads * dim, width) for _ in range(CONFIG.num_hidden_layers))
        self.mlp = nn.ModuleList(nn.Linear(width, width) for _ in range(CONFIG.num_hidden_layers))
        self.head = nn.Linear(width, 1)
        self.device = device
        self.to(device, dtype)

    def forward(self, histories, key_values) -> torch.Tensor:
        """[A] float32 in (0, 1)."""
        heads, groups = CONFIG.num_attention_heads, CONFIG.num_key_value_heads
        positions = histories.position_ids[key_values.positions].to(self.device)
        hidden = self.embedding(histories.tokens[key_values.positions].to(self.device))
        for layer, (qkv, out, mlp) in enumerate(zip(self.qkv, self.out, self.mlp, strict=True)):
            rows = qkv(functional.rms_norm(hidden, hidden.shape[-1:])).unflatten(-1, (heads + 2 * groups, 64))
            q, k, v = rows.split((heads, groups, groups), 1)
            seen = key_values.attend(layer, _rotate(q, positions), _rotate(k, positions), v, 0.125)
            hidden = hidden + out(seen.flatten(1))
            hidden = hidden + functional.silu(mlp(functional.rms_norm(hidden, hidden.shape[-1:])))
        last = functional.rms_norm(hidden[key_values.rows.to(self.device)], hidden.shape[-1:])
        return torch.sigmoid((4.0 * self.head(last))[:, 0].float())


def _rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    angles = positions[:, None, None] * 10000.0 ** (-torch.arange(32, device=x.device) / 32)
    low, high = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


def random_trees(num_trees: int, rng: np.random.Generator) -> list[RolloutTree]:
    """Prompts with one opening, and rollouts of a few turns."""

    def ids(low, high):
        return tuple(rng.integers(0, _VOCABULARY, rng.integers(low, high)).tolist())

    def rollout():
        turns = (Turn(action := ids(5, 40), (-0.5,) * len(action), ids(2, 20), 0) for _ in range(rng.integers(2, 5)))
        return Rollout(ROOT, tuple(turns), float(rng.integers(2)), RolloutStatus.FINISHED)

    opening = ids(40, 41)
    return [
        RolloutTree(
            Prompt(f"p{index}", Task(f"p{index}", (), {}), opening + ids(20, 200)), tuple(rollout() for _ in range(3))
        )
        for index in range(num_trees)
    ]


def score(backbone: Backbone, requests, pages, keep: bool) -> torch.Tensor:
    """[A] float64 on the backbone's device."""
    scores = torch.zeros(sum(len(a) for _, a in requests), dtype=torch.float64, device=backbone.device)
    score_paths(backbone, history_paths(requests), _TOKENS_PER_FORWARD, scores, pages, keep)
    return scores


def _requests(trees):
    roots = [(RolloutTree(tree.prompt, ()), (ROOT,)) for tree in trees]
    return roots, [(tree, prefix_anchors(tree)) for tree in trees]


def _pages(dtype: torch.dtype, device: torch.device) -> KeyValuePages:
    return KeyValuePages(CONFIG, dtype, device, 256 * 2**20)


def scorer_checks(device: torch.device, num_trees: int) -> list[Check]:
    checks = {"scores": check_scores, "plans": check_plans, "nothing read back": check_copies}
    return [Check(f"scorer: {name}", functools.partial(run, device, num_trees)) for name, run in checks.items()]


def check_scores(device: torch.device, num_trees: int) -> Outcome:
    """bfloat16 on the device, prompts known from the root pass, against float32 on the CPU without pages."""
    roots, prefixes = _requests(random_trees(num_trees, np.random.default_rng(1)))
    cpu = torch.device("cpu")
    exact = Backbone(torch.float32, cpu)
    wanted = torch.cat([score(exact, requests, _pages(torch.float32, cpu), False) for requests in (roots, prefixes)])
    worst = {}
    for dtype, tolerance in ((torch.float32, 2e-3 if device.type == "cuda" else 1e-5), (torch.bfloat16, 0.1)):
        backbone, pages = Backbone(dtype, device), _pages(dtype, device)
        actual = torch.cat([score(backbone, roots, pages, True), score(backbone, prefixes, pages, False)]).cpu()
        worst[dtype] = float((actual - wanted).abs().max())
        assert worst[dtype] < tolerance, f"{dtype}: off by {worst[dtype]:.1e}, allowed {tolerance:.0e}"
        assert float(wanted.std()) > 0.05, "the scores tell nothing apart"
    found = ", ".join(f"{str(dtype).removeprefix('torch.')} off by {error:.0e}" for dtype, error in worst.items())
    return Outcome(f"{wanted.numel()} histories; {found}")


def check_plans(device: torch.device, num_trees: int) -> Outcome:
    """TRACE's plans made where the scores are, against its plans of the same scores in NumPy."""
    trees = random_trees(num_trees, np.random.default_rng(2))
    roots, prefixes = _requests(trees)
    backbone, pages = Backbone(torch.bfloat16, device), _pages(torch.bfloat16, device)
    root_scores, prefix_scores = score(backbone, roots, pages, True), score(backbone, prefixes, pages, False)
    selector, prompts, budget = TraceSelector(_budget(num_trees), {}), [tree.prompt for tree in trees], 2 * num_trees
    plans = [
        selector.select_roots(root_view(prompts, scores), budget, np.random.default_rng(0))
        for scores in (root_scores, to_host(root_scores))
    ]
    assert plans[0].tolist() == plans[1].tolist(), "the plans of the roots differ"
    sizes = [len(anchors) for _, anchors in prefixes]
    for tree, scores in zip(trees, prefix_scores.split(sizes), strict=True):
        plans = [
            selector.select_prefixes(prefix_view(tree, some), 12, np.random.default_rng(0))
            for some in (scores, to_host(scores))
        ]
        assert plans[0].tolist() == plans[1].tolist(), f"the plans of prompt {tree.prompt.prompt_id} differ"
    return Outcome(f"{len(roots)} prompts for {budget} units, {sum(sizes)} prefixes for 12 each prompt")


def _budget(num_prompts: int) -> SimpleNamespace:
    return SimpleNamespace(
        candidates=num_prompts, rollouts=2 * num_prompts, continuations=4, max_rollouts_per_prompt=0, exact=True
    )


def check_copies(device: torch.device, num_trees: int) -> Outcome:
    """Between tokens and plan one copy comes back: the plan."""
    if device.type != "cuda":
        raise SkippedError("needs a GPU: a CPU copies nothing")
    roots, prefixes = _requests(random_trees(num_trees, np.random.default_rng(3)))
    backbone, pages = Backbone(torch.bfloat16, device), _pages(torch.bfloat16, device)
    score(backbone, roots, pages, True)
    allocate_prefixes(score(backbone, prefixes, pages, False), 8)  # what is made once, is made
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        allocate_prefixes(score(backbone, prefixes, pages, False), 8)
        torch.cuda.synchronize(device)
    copies = sum("DtoH" in event.name for event in profile.events())
    assert copies == 1, f"expected 1 copy from the device, the plan, found {copies}"
    return Outcome("one copy from the device: the plan")
