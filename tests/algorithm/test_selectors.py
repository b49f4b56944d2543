"""Each selector against a plan worked out by hand or by brute force, and all against one budget."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys

import numpy as np
import pytest

from trace_megatron.algorithm.allocate import allocate_prefixes, allocate_roots
from trace_megatron.algorithm.contrast import flip_prob, mixed_prob
from trace_megatron.algorithm.selectors import (
    SELECTORS,
    PromptHistory,
    RootView,
    build_selector,
    fallback_rollouts,
    prefix_view,
    root_view,
)
from trace_megatron.config import BudgetConfig, MethodConfig
from trace_megatron.errors import UserError
from trace_megatron.types import ROOT, Anchor

from .trees import make_rollout, make_tree, outcome_tree


def build(name, budget, **options):
    return build_selector(MethodConfig(selector=name, options=options), budget)


def view_of(probs, rates=None, tokens=None):
    nan = np.full(len(probs), np.nan)
    return RootView(
        tuple(map(str, range(len(probs)))),
        np.asarray(probs, dtype=np.float64),
        nan if rates is None else np.asarray(rates, dtype=np.float64),
        nan if tokens is None else np.asarray(tokens, dtype=np.float64),
    )


def roots(selector, view, seed=0):
    counts = selector.select_roots(view, selector.root_budget, np.random.default_rng(seed))
    assert counts.dtype == np.int64 and counts.shape == (len(view.prompt_ids),)
    return counts


def prefixes(selector, view, budget, seed=0):
    counts = selector.select_prefixes(view, budget, np.random.default_rng(seed))
    assert counts.dtype == np.int64 and counts.sum() == budget
    return counts


def example_prefixes(probs=None):
    """Bare 0 fails in 3 turns of 2 tokens, bare 1 succeeds in 2: anchors (0, 1), (0, 2), (1, 1)."""
    rng = random.Random(0)
    tree = make_tree(
        make_rollout(ROOT, [(2, 1)] * 3, 0.0, rng),
        make_rollout(ROOT, [(2, 1)] * 2, 1.0, rng),
        make_rollout(ROOT, [(2, 1)], 1.0, rng),
    )
    return prefix_view(tree, probs)


# trace: arXiv 2606.11119, stages 1 and 2


def test_trace_roots_by_brute_force():
    selector = build("trace", BudgetConfig(candidates=4, rollouts=7, continuations=2))
    assert (selector.root_budget, selector.num_candidates, selector.prefix_budget(3)) == (7, 4, 6)
    assert selector.needs_root_scores and selector.needs_prefix_scores
    probs = np.array([0.1, 0.45, 0.7, 0.97])
    plans = [m for m in itertools.product(range(8), repeat=4) if sum(m) == 7 and 1 not in m]
    best = max(plans, key=lambda m: mixed_prob(probs, m).sum())
    assert roots(selector, view_of(probs)).tolist() == list(best)


def test_trace_prefixes_by_brute_force():
    """q = 1 - V for the failed rollout, V for the successful one."""
    selector = build("trace", BudgetConfig(candidates=4, rollouts=6, continuations=2))
    view = example_prefixes(np.array([0.2, 0.7, 0.55]))
    np.testing.assert_array_equal(view.rewards, [0, 0, 1])
    np.testing.assert_array_equal(view.remaining_tokens, [4, 2, 2])
    repeats = np.array([0.8, 0.3, 0.55])
    for budget in range(1, 7):
        plans = [k for k in itertools.product(range(budget + 1), repeat=3) if sum(k) == budget]
        best = max(plans, key=lambda k: flip_prob(repeats, k).sum())
        assert prefixes(selector, view, budget).tolist() == list(best)


def test_trace_breaks_ties_at_random_and_repeats_with_the_seed():
    selector = build("trace", BudgetConfig(candidates=6, rollouts=6, continuations=2))
    plans = {tuple(roots(selector, view_of([0.5] * 6), seed)) for seed in range(8)}
    assert len(plans) > 1 and all(sorted(plan) == [0, 0, 0, 2, 2, 2] for plan in plans)
    view = example_prefixes()
    chosen = [tuple(prefixes(selector, view, 1, seed)) for seed in range(8)]
    assert len(set(chosen)) > 1
    assert chosen == [tuple(prefixes(selector, view, 1, seed)) for seed in range(8)]


def test_trace_cap_and_at_most():
    selector = build("trace", BudgetConfig(4, 8, 2, max_rollouts_per_prompt=3))
    assert roots(selector, view_of([0.5, 0.4, 0.3, 0.01])).tolist() == [3, 3, 2, 0]
    selector = build("trace", BudgetConfig(4, 8, 2, max_rollouts_per_prompt=3, exact=False))
    assert roots(selector, view_of([0.5, 0.0, 1.0, 0.0])).tolist() == [3, 0, 0, 0]


def test_trace_ablation_options():
    """The paper's Table 1: each stage uniform or active; uniform stages are TreePO's."""
    budget = BudgetConfig(candidates=32, rollouts=16, continuations=2)
    uniform = build("trace", budget, root="uniform")
    assert uniform.num_candidates == 4 and not uniform.needs_root_scores and uniform.needs_prefix_scores
    assert roots(uniform, view_of([0.1, 0.5, 0.5, 0.9])).tolist() == [4, 4, 4, 4]
    half = build("trace", budget, prefix="uniform")
    assert half.needs_root_scores and not half.needs_prefix_scores
    counts = prefixes(half, example_prefixes(np.array([0.0, 1.0, 0.5])), 6)
    assert counts[:2].sum() == 3 and counts[2] == 3
    flat = build("trace", budget, prefix="none")
    assert (flat.root_budget, flat.prefix_budget(5), flat.num_candidates) == (32, 0, 32)
    neither = build("trace", budget, root="uniform", prefix="none")
    assert (neither.root_budget, neither.num_candidates) == (32, 4)


def test_trace_by_cost_per_token():
    selector = build("trace", BudgetConfig(candidates=3, rollouts=6, continuations=2), cost="tokens")
    probs, tokens = np.array([0.4, 0.45, 0.3]), np.array([100.0, 900.0, np.nan])
    expected = allocate_roots(probs, 6, costs=[100.0, 900.0, 500.0])
    np.testing.assert_array_equal(roots(selector, view_of(probs, tokens=tokens)), expected)
    assert expected[0] > expected[1]
    view = example_prefixes(np.array([0.6, 0.6, 0.4]))  # q = 0.4 everywhere, the first has 4 tokens to go, not 2
    counts = selector.select_prefixes(view, 2, np.random.default_rng(0))
    assert counts.tolist() == [0, 1, 1] == allocate_prefixes([0.4] * 3, 2, costs=[4, 2, 2]).tolist()


# uniform: GRPO, arXiv 2402.03300


def test_uniform_by_hand():
    selector = build("uniform", BudgetConfig(candidates=3, rollouts=11))
    assert roots(selector, view_of([0.5, 0.0, 1.0])).tolist() == [4, 4, 3]
    assert not selector.needs_root_scores and selector.prefix_budget(4) == 0
    assert build("uniform", BudgetConfig(candidates=24, rollouts=12, continuations=2)).num_candidates == 12
    grouped = build("uniform", BudgetConfig(512, 1024, 2), group_size=8)
    assert grouped.num_candidates == 256 and roots(grouped, view_of([0.5] * 256)).tolist() == [8] * 256


# pcl: arXiv 2510.01135


def test_pcl_keeps_the_prompts_nearest_one_half():
    selector = build("pcl", BudgetConfig(candidates=6, rollouts=8, continuations=0), group_size=4)
    assert (selector.num_candidates, selector.num_kept) == (6, 2)
    assert roots(selector, view_of([0.9, 0.45, 0.1, 0.6, 0.52, 0.0])).tolist() == [0, 4, 0, 0, 4, 0]
    with_remainder = build("pcl", BudgetConfig(6, 9, 0), group_size=4)
    assert sorted(roots(with_remainder, view_of([0.9, 0.45, 0.1, 0.6, 0.52, 0.0]))) == [0, 0, 0, 0, 4, 5]


# treepo: the baseline of arXiv 2606.11119 after arXiv 2508.17445


def test_treepo_by_hand():
    selector = build("treepo", BudgetConfig(candidates=512, rollouts=1024, continuations=2))
    assert selector.num_candidates == 256 and selector.prefix_budget(4) == 8
    assert roots(selector, view_of([0.5] * 256)).tolist() == [4] * 256
    view = example_prefixes()
    lone = [tuple(prefixes(selector, view, 1, seed)) for seed in range(40)]
    assert {plan[2] for plan in lone} == {0, 1}  # what does not divide goes to either rollout
    totals = np.zeros(3)
    for seed in range(400):
        counts = prefixes(selector, view, 6, seed)
        assert counts[:2].sum() == 3 and counts[2] == 3  # the rollout without prefixes leaves its share to the others
        totals += counts
    assert abs(totals[0] - 600) < 75  # 1,200 fair draws between (0, 1) and (0, 2): 4.3 standard deviations


# random: a control


def test_random_gives_pairs_to_everyone_alike():
    selector = build("random", BudgetConfig(candidates=5, rollouts=21, continuations=2))
    totals = np.zeros(5)
    for seed in range(300):
        counts = roots(selector, view_of([0.5, 0.0, 1.0, 0.9, 0.1]), seed)
        assert counts.sum() == 21 and 1 not in counts and (counts % 2).sum() == 1
        totals += counts
    assert np.all(np.abs(totals / 300 - 21 / 5) < 0.75)  # 4.2 standard errors
    drawn = sum(prefixes(selector, example_prefixes(), 6, seed) for seed in range(300))
    assert np.all(np.abs(drawn - 600) < 90)


# dapo: arXiv 2503.14476


def test_dapo_keeps_mixed_groups():
    selector = build("dapo", BudgetConfig(candidates=64, rollouts=64), group_size=8)
    assert selector.num_candidates == 8 and roots(selector, view_of([0.5] * 8)).tolist() == [8] * 8
    mixed = outcome_tree((ROOT, 1, 0.2), (ROOT, 1, 0.2), (ROOT, 1, 0.7))
    equal = outcome_tree((ROOT, 1, 1.0), (ROOT, 1, 1.0), (ROOT, 1, 0.0, False))
    assert selector.keep([equal, mixed, outcome_tree()]) == [mixed]
    assert build("uniform", BudgetConfig(4, 8)).keep([equal, mixed]) == [equal, mixed]


# knapsack: arXiv 2509.25849


def test_knapsack_by_brute_force():
    selector = build("knapsack", BudgetConfig(candidates=4, rollouts=13, max_rollouts_per_prompt=6))
    rates = np.array([0.1, 0.5, 0.8, np.nan])
    known = np.where(np.isnan(rates), 0.5, rates)
    weight = known * (1 - known) ** 2
    plans = [m for m in itertools.product(range(2, 7), repeat=4) if sum(m) == 13]
    best = max(weight @ mixed_prob(known, m) for m in plans)
    counts = roots(selector, view_of([0.5] * 4, rates))
    assert counts.sum() == 13 and counts.min() >= 2 and counts.max() <= 6
    assert weight @ mixed_prob(known, counts) == pytest.approx(best, abs=1e-12)


def test_knapsack_leaves_worthless_units_to_unsolved_prompts():
    selector = build("knapsack", BudgetConfig(candidates=4, rollouts=13, max_rollouts_per_prompt=5))
    assert roots(selector, view_of([0.5] * 4, [1.0, 0.0, 1.0, 0.0])).tolist() == [2, 5, 2, 4]
    selector = build("knapsack", BudgetConfig(candidates=3, rollouts=15, max_rollouts_per_prompt=5))
    assert roots(selector, view_of([0.5] * 3, [1.0, 0.0, 1.0])).tolist() == [5, 5, 5]


# what all share


@pytest.mark.parametrize("budget", [BudgetConfig(512, 1024, 2), BudgetConfig(64, 128, 6), BudgetConfig(32, 64, 0)])
def test_all_selectors_plan_the_same_units(budget):
    rng, expected = np.random.default_rng(0), budget.rollouts * (1 + budget.continuations / 2)
    for name in SELECTORS:
        selector = build(name, budget)
        size = selector.num_candidates
        counts = roots(selector, view_of(rng.beta(0.5, 0.5, size), rng.beta(0.5, 0.5, size)))
        assert not (counts == 1).any()
        units = counts.sum() + sum(selector.prefix_budget(int(m)) for m in counts) / 2
        assert abs(units - expected) <= 0.01 * expected, name


def test_fallback_keeps_the_units():
    assert [fallback_rollouts(k) for k in (0, 1, 4, 7)] == [0, 0, 2, 3]


def test_history_is_the_last_visit_of_the_bare_rollouts():
    rng, history = random.Random(0), PromptHistory()
    first = make_tree(
        make_rollout(ROOT, [(4, 1)], 1.0, rng),
        make_rollout(ROOT, [(2, 1), (2, 0)], 0.0, rng),
        make_rollout(Anchor(1, 1), [(9, 0)], 1.0, rng),
        make_rollout(ROOT, [(50, 0)], 1.0, rng, trained=False),
    )
    unseen = make_tree(name="new").prompt
    history.observe([first, make_tree(name="failed")])
    np.testing.assert_array_equal(history.success_rates([first.prompt, unseen]), [0.5, np.nan])
    restored = PromptHistory()
    restored.load_state_dict(json.loads(json.dumps(history.state_dict())))
    view = root_view([first.prompt, unseen], np.array([0.2, 0.3]), restored)
    np.testing.assert_array_equal(view.success_rates, [0.5, np.nan])
    np.testing.assert_array_equal(view.rollout_tokens, [4.0, np.nan])
    np.testing.assert_array_equal(view.success_probs, [0.2, 0.3])
    history.observe([make_tree(make_rollout(ROOT, [(1, 0)], 1.0, rng))])
    assert history.success_rates([first.prompt])[0] == 1.0
    assert np.isnan(root_view([unseen]).success_rates[0]) and root_view([unseen]).success_probs[0] == 0.5
    with pytest.raises(ValueError, match="expected 1 success"):
        root_view([unseen], np.zeros(2))


@pytest.mark.parametrize(
    ("name", "budget", "options", "message"),
    [
        ("trase", BudgetConfig(), {}, "did you mean 'trace'"),
        ("trace", BudgetConfig(), {"rot": "active"}, "method.options.rot.*did you mean 'root'"),
        ("trace", BudgetConfig(), {"root": "activ"}, "one of active, uniform"),
        ("treepo", BudgetConfig(), {"root": 1}, "has no options"),
        ("uniform", BudgetConfig(), {"group_size": "8"}, "whole number"),
        ("uniform", BudgetConfig(), {"group_size": 1}, "at least 2"),
        ("pcl", BudgetConfig(8, 4, 0), {}, "one group of 8"),
        ("trace", BudgetConfig(4, 9, 0, max_rollouts_per_prompt=2), {}, "budget.rollouts.*at most 4 prompts x 2"),
        ("trace", BudgetConfig(9, 9, 0, max_rollouts_per_prompt=2), {}, "even"),
        ("uniform", BudgetConfig(4, 32, 0, max_rollouts_per_prompt=4), {}, "max_rollouts_per_prompt=4"),
        ("knapsack", BudgetConfig(4, 32, 0, max_rollouts_per_prompt=4), {}, "2 to 4 rollouts"),
        ("random", BudgetConfig(4, 32, 0, max_rollouts_per_prompt=4), {}, "set it to 0"),
        ("trace", BudgetConfig(4, 1, 0), {}, "budget.rollouts >= 2"),
        ("trace", BudgetConfig(0, 4, 0), {}, "budget.candidates >= 1"),
    ],
)
def test_mistakes_are_named(name, budget, options, message):
    with pytest.raises(UserError, match=message):
        build(name, budget, **options)


def test_the_algorithm_needs_only_torch_and_numpy():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('yaml', 'scipy', 'transformers', 'vllm', 'megatron')))\n"
        "import trace_megatron.algorithm.selectors, trace_megatron.ops\n"
        "from trace_megatron.algorithm import advantage, allocate, loss, pack, summary, targets\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
