"""Methods are compared at the same budget: every rollout that a run generates is counted, for every method."""

from __future__ import annotations

import asyncio
from itertools import product

import numpy as np
import pytest
from scripted_engine import ScriptedEngine, WordGame, build_renderer

from trace_megatron.algorithm.selectors import SELECTORS, PromptHistory, build_selector, root_view
from trace_megatron.algorithm.tree import prefix_anchors
from trace_megatron.config import BudgetConfig, MethodConfig, RolloutConfig
from trace_megatron.rollout.collector import Collector
from trace_megatron.rollout.prompts import PromptSource
from trace_megatron.types import ROOT, Rollout

RENDERER = build_renderer()
GAME = WordGame(words=["".join(letters) for letters in product("abcdefgh", repeat=3)])
ROLLOUT = RolloutConfig(max_turns=4, max_new_tokens=8, max_response_tokens=1000, max_prompt_tokens=100)
BUDGET = BudgetConfig(candidates=24, rollouts=32, continuations=2)  # M (1 + N / 2) = 64 units a step
STEPS = 8


def spend(selector_name: str) -> tuple[list[Rollout], int, int]:
    """The rollouts of a whole run, the engine's requests, and the prompts that had no prefix."""
    engine = ScriptedEngine()
    selector = build_selector(MethodConfig(selector=selector_name), BUDGET)
    rng = np.random.default_rng(0)

    def score(trees):
        return [rng.random(len(prefix_anchors(tree))) for tree in trees]

    async def run():
        collector = Collector(engine, GAME, RENDERER, selector, score, ROLLOUT, run_seed=1)
        source = PromptSource(GAME, RENDERER, "train", 0, 100)
        history = PromptHistory()
        rollouts, num_fallbacks = [], 0
        for step in range(STEPS):
            prompts = source.next(selector.num_candidates)
            view = root_view(prompts, rng.random(len(prompts)), history)
            trees = await collector.collect(prompts, selector.select_roots(view, selector.root_budget, rng), step)
            history.observe(trees)
            for tree in trees:
                rollouts += tree.rollouts
                continued = any(rollout.anchor != ROOT for rollout in tree.rollouts)
                num_fallbacks += selector.continuations > 0 and not continued
        return rollouts, len(engine.calls), num_fallbacks

    return asyncio.run(run())


@pytest.fixture(scope="module")
def spent():
    return {name: spend(name) for name in SELECTORS}


def test_units_of_all_methods_differ_by_at_most_one_percent(spent):
    units = {
        name: sum(1.0 if rollout.anchor == ROOT else 0.5 for rollout in rollouts)
        for name, (rollouts, _, _) in spent.items()
    }
    expected = STEPS * BUDGET.rollouts * (1 + BUDGET.continuations / 2)
    assert units == {name: pytest.approx(expected, rel=0.01) for name in SELECTORS}


def test_nothing_is_generated_outside_the_trees(spent):
    for name, (rollouts, num_requests, _) in spent.items():
        assert num_requests == sum(len(rollout.turns) for rollout in rollouts), name


def test_the_methods_do_differ(spent):
    """Guards the tests above: trees for some, flat groups for others, prompts without a prefix among them."""
    continued = {name for name, (rollouts, _, _) in spent.items() if any(r.anchor != ROOT for r in rollouts)}
    assert {"trace", "treepo"} <= continued
    assert not {"uniform", "pcl", "dapo", "knapsack"} & continued
    assert spent["trace"][2] > 0
