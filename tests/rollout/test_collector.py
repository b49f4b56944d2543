"""The collector against an exact account: every request belongs to a tree, and every unit is spent."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scripted_engine import WIN, ScriptedEngine, WordGame, build_prompts, build_renderer, dead

from trace_megatron.algorithm.selectors import build_selector
from trace_megatron.algorithm.tree import check_tree, history_ids, num_units, prefix_anchors, rollout_turns
from trace_megatron.config import BudgetConfig, MethodConfig, RolloutConfig
from trace_megatron.errors import RolloutError
from trace_megatron.rollout.collector import Collector, evaluate
from trace_megatron.rollout.engine import EngineError
from trace_megatron.rollout.seeds import request_seed
from trace_megatron.types import ROOT, Anchor, RolloutStatus, RolloutTree

CONFIG = RolloutConfig(max_turns=4, max_new_tokens=8, max_response_tokens=1000, max_prompt_tokens=100)
RENDERER = build_renderer()
GAME = WordGame()
PROMPTS = build_prompts(RENDERER, GAME)
COUNTS = (4, 0, 2, 3, 1, 2)
SEED, STEP = 5, 9


def constant_scores(trees):
    return [np.full(len(prefix_anchors(tree)), 0.25) for tree in trees]


def collect(
    engine, *, game=GAME, config=CONFIG, score=constant_scores, selector="trace", continuations=2, counts=COUNTS, **more
) -> list[RolloutTree]:
    budget = BudgetConfig(candidates=len(PROMPTS), rollouts=sum(COUNTS), continuations=continuations)
    method = build_selector(MethodConfig(selector=selector), budget)

    async def run():
        collector = Collector(engine, game, RENDERER, method, score, config, SEED)
        trees = await asyncio.wait_for(collector.collect(PROMPTS, counts, STEP, **more), 20)
        assert len(asyncio.all_tasks()) == 1  # nothing is left running
        return trees

    return asyncio.run(run())


def expected_requests(trees: list[RolloutTree]) -> Counter:
    """(history, seed) of every turn in the trees, worked out from the records alone."""
    requests = Counter()
    for tree in trees:
        used: Counter = Counter()
        for index, rollout in enumerate(tree.rollouts):
            k = used[rollout.anchor]
            used[rollout.anchor] += 1
            path = rollout_turns(tree, index)
            failed_in_engine = rollout.status == RolloutStatus.ENGINE_ERROR
            for turn in range(rollout.anchor.turn, len(path) + failed_in_engine):
                ids = list(tree.prompt.token_ids)
                for earlier in path[:turn]:
                    ids += earlier.action_ids + earlier.observation_ids
                seed = request_seed(SEED, STEP, tree.prompt.prompt_id, rollout.anchor, k, turn)
                requests[tuple(ids), seed] += 1
    return requests


def actual_requests(engine: ScriptedEngine) -> Counter:
    return Counter((call.token_ids, call.seed) for call in engine.calls)


def check_units(trees: list[RolloutTree], counts, continuations: int = 2) -> None:
    counts = [count for count in counts if count]
    for tree, count in zip(trees, counts, strict=True):
        check_tree(tree)
        roots = [rollout for rollout in tree.rollouts if rollout.anchor == ROOT]
        first = RolloutTree(tree.prompt, tuple(roots[:count]))
        assert num_units(tree) == count * (1 + continuations / 2)
        assert len(roots) == count + (0 if prefix_anchors(first) else count * continuations // 2)


@pytest.mark.parametrize("selector", ["trace", "treepo"])
def test_every_request_and_unit_is_in_a_tree(selector):
    engine = ScriptedEngine()
    trees = collect(engine, selector=selector)
    assert [tree.prompt for tree in trees] == [p for p, count in zip(PROMPTS, COUNTS, strict=True) if count]
    assert actual_requests(engine) == expected_requests(trees)
    check_units(trees, COUNTS)
    assert any(rollout.anchor != ROOT for tree in trees for rollout in tree.rollouts)


def test_flat_methods_make_no_continuations():
    engine = ScriptedEngine()
    trees = collect(engine, selector="uniform")
    assert [len(tree.rollouts) for tree in trees] == [count for count in COUNTS if count]
    assert actual_requests(engine) == expected_requests(trees)


def test_continuations_inherit_ids_and_logprobs():
    engine = ScriptedEngine()
    trees = collect(engine)
    calls = {call.seed: call for call in engine.calls}
    checked = 0
    for tree in trees:
        used: Counter = Counter()
        for index, rollout in enumerate(tree.rollouts):
            k, anchor = used[rollout.anchor], rollout.anchor
            used[anchor] += 1
            if anchor == ROOT:
                continue
            parent = tree.rollouts[anchor.rollout]
            first = calls[request_seed(SEED, STEP, tree.prompt.prompt_id, anchor, k, anchor.turn)]
            assert first.token_ids == history_ids(tree, anchor)
            inherited = rollout_turns(tree, index)[: anchor.turn]
            assert inherited == parent.turns[: anchor.turn]  # the same records: ids, logprobs, versions
            checked += 1
    assert checked > 5


def test_scores_reach_the_plan_and_the_tree():
    def score(trees):  # failures with a high V are the ones to branch
        return [np.array([0.9 if anchor.turn == 2 else 0.1 for anchor in prefix_anchors(tree)]) for tree in trees]

    trees = collect(ScriptedEngine(action=lambda call: "no"), score=score, continuations=1)
    continuations = [rollout for tree in trees for rollout in tree.rollouts if rollout.anchor != ROOT]
    assert continuations and {rollout.anchor.turn for rollout in continuations} == {2}
    for tree in trees:
        bare = RolloutTree(tree.prompt, tuple(rollout for rollout in tree.rollouts if rollout.anchor == ROOT))
        assert tree.prefix_probs == tuple(score([bare])[0])


def test_a_tree_without_prefixes_gets_more_roots():
    engine = ScriptedEngine(action=lambda call: WIN)
    trees = collect(engine, continuations=3, counts=COUNTS)
    expected = [count + count * 3 // 2 for count in COUNTS if count]
    assert [len(tree.rollouts) for tree in trees] == expected
    assert all(rollout.anchor == ROOT for tree in trees for rollout in tree.rollouts)
    assert actual_requests(engine) == expected_requests(trees)
    assert all(tree.prefix_probs == () for tree in trees)


def test_an_engine_error_in_the_middle_of_a_tree():
    async def fail_some(number, call):
        if number % 7 == 3:
            raise EngineError(f"request {number}")

    engine = ScriptedEngine(before=fail_some)
    trees = collect(engine, config=replace(CONFIG, max_failed_share=0.9))
    statuses = Counter(rollout.status for tree in trees for rollout in tree.rollouts)
    assert statuses[RolloutStatus.ENGINE_ERROR] == sum(number % 7 == 3 for number in range(len(engine.calls)))
    assert any(r.status.failed and r.anchor != ROOT for tree in trees for r in tree.rollouts)
    assert actual_requests(engine) == expected_requests(trees)
    check_units(trees, COUNTS)


def test_a_prompt_that_fails_does_not_stop_the_others():
    class Broken(WordGame):
        async def reset(self, task):
            if task.task_id == "three":
                raise ConnectionError("no such task")
            return ()

    trees = collect(ScriptedEngine(), game=Broken())
    failed = next(tree for tree in trees if tree.prompt.prompt_id == "three")
    assert {rollout.status for rollout in failed.rollouts} == {RolloutStatus.ENV_ERROR}
    assert len(failed.rollouts) == 4  # two roots, and two more for the same units: no prefix was visited
    assert all(not rollout.status.failed for tree in trees if tree is not failed for rollout in tree.rollouts)
    check_units(trees, COUNTS)


def test_above_the_allowed_share_the_step_ends_with_the_first_cause():
    async def fail_from_ten(number, call):
        if number >= 10:
            raise EngineError(f"request {number} ran out of memory")

    with pytest.raises(RolloutError, match=r"rollouts of step 9 failed.*max_failed_share=0\.2.*: request 10 ran"):
        collect(ScriptedEngine(before=fail_from_ten), config=replace(CONFIG, max_failed_share=0.2))


def test_a_dead_engine_ends_the_step_at_once():
    start = time.monotonic()
    engine = ScriptedEngine(before=dead)
    with pytest.raises(RolloutError, match="the engine process has ended"):
        collect(engine)
    assert time.monotonic() - start < 5 and engine.num_running == 0


def test_the_step_does_not_wait_for_rollouts_that_hang_when_it_must_end():
    async def die_or_hang(number, call):
        if number == 0:
            await asyncio.sleep(3600)
        await dead(number, call)

    engine = ScriptedEngine(before=die_or_hang)
    with pytest.raises(RolloutError):
        collect(engine)
    assert engine.num_running == 0  # the hanging request was cancelled


def test_no_prompt_waits_for_another():
    async def run():
        slow = PROMPTS[0].token_ids
        continued = asyncio.Event()
        slow_before_continuation = []

        async def hold_slow(number, call):
            if call.token_ids[: len(slow)] == slow:
                await asyncio.wait_for(continued.wait(), 10)  # would never come with a barrier over prompts
                slow_before_continuation.append(number)

        class Watched(WordGame):
            async def step(self, state, action):
                return await super().step(state, action)

        engine = ScriptedEngine(action=lambda call: "no", before=hold_slow)
        budget = BudgetConfig(candidates=2, rollouts=4, continuations=2)
        selector = build_selector(MethodConfig(selector="trace"), budget)
        collector = Collector(engine, Watched(), RENDERER, selector, constant_scores, CONFIG, SEED)
        fast_seeds = {
            request_seed(SEED, STEP, PROMPTS[1].prompt_id, Anchor(j, t), 0, t) for j in range(2) for t in range(1, 4)
        }

        async def watch():
            while not any(call.seed in fast_seeds for call in engine.calls):
                await asyncio.sleep(0.001)
            continued.set()

        watcher = asyncio.create_task(watch())
        trees = await collector.collect(PROMPTS[:2], (2, 2), STEP)
        await watcher
        assert slow_before_continuation and [len(tree.rollouts) for tree in trees] == [6, 6]

    asyncio.run(run())


def test_scoring_leaves_the_event_loop_free_and_takes_what_waits_together():
    batches: list[int] = []
    acted = threading.Event()

    async def tell(number, call):
        if batches:  # the first batch is being scored
            acted.set()
        if call.token_ids[: len(PROMPTS[0].token_ids)] == PROMPTS[0].token_ids and not batches:
            while not batches:
                await asyncio.sleep(0.001)

    def score(trees):
        batches.append(len(trees))
        assert acted.wait(10), "the event loop stood still while a batch was scored"
        return constant_scores(trees)

    trees = collect(ScriptedEngine(action=lambda call: "no", before=tell), score=score)
    assert sum(batches) == len(trees) and len(batches) < len(trees)


def test_errors_of_the_scorer_and_the_selector_end_the_step():
    def broken(trees):
        raise ValueError("no such history")

    engine = ScriptedEngine(action=lambda call: "no")
    with pytest.raises(ValueError, match="no such history"):
        collect(engine, score=broken)
    with pytest.raises(ValueError):
        collect(engine, score=lambda trees: [np.zeros(99) for _ in trees])
    with pytest.raises(ValueError):
        collect(engine, score=lambda trees: [])
    assert engine.num_running == 0


def test_the_trees_do_not_depend_on_who_comes_back_first():
    async def shuffle(number, call):
        await asyncio.sleep(call.seed % 7 / 1000)

    quick, shuffled = collect(ScriptedEngine()), collect(ScriptedEngine(before=shuffle))
    assert quick == shuffled
    assert collect(ScriptedEngine(), selector="treepo") == collect(ScriptedEngine(before=shuffle), selector="treepo")


@pytest.mark.parametrize("word", [WIN, "no"])
def test_progress_ends_complete_although_the_plan_shrinks(word):
    reports: list[tuple[int, int]] = []
    trees = collect(ScriptedEngine(action=lambda call: word), progress=lambda *report: reports.append(report))
    total = sum(len(tree.rollouts) for tree in trees)
    assert [done for done, _ in reports] == list(range(1, total + 1))
    assert reports[-1] == (total, total) and all(done <= planned for done, planned in reports)


def prompts_of(step):
    return [replace(prompt, prompt_id=f"{prompt.prompt_id}/{step}") for prompt in PROMPTS]


def without_versions(tree):
    rollouts = tuple(
        replace(rollout, turns=tuple(replace(turn, weight_version=0) for turn in rollout.turns))
        for rollout in tree.rollouts
    )
    return replace(tree, rollouts=rollouts)


@pytest.mark.parametrize(
    ("seed", "max_staleness", "carried_share", "ahead"),
    [(0, 1, 0.0, True), (1, 1, 0.5, False), (2, 2, 0.5, True), (3, 3, 0.8, True)],
)
def test_trees_carried_over_are_taken_once_and_never_too_old(seed, max_staleness, carried_share, ahead):
    """Random delays; against the trees that a step without overlap collects."""
    rng, last, ages, carried = random.Random(seed), 5, [], []
    slow = {(prompt.token_ids, number): rng.random() < 0.2 for prompt in PROMPTS for number in range(200)}

    async def wait(number, call):
        prompt = next(p.token_ids for p in PROMPTS if call.token_ids[: len(p.token_ids)] == p.token_ids)
        await asyncio.sleep(0.02 if slow[prompt, number % 200] else 0.001)

    async def run():
        engine = ScriptedEngine(before=wait)
        config = replace(CONFIG, max_staleness=max_staleness)
        selector = build_selector(
            MethodConfig(selector="trace"), BudgetConfig(len(PROMPTS), sum(COUNTS), continuations=2)
        )
        collector = Collector(engine, GAME, RENDERER, selector, constant_scores, config, SEED)
        found, planned_units, planned = [], 0.0, 0
        for step in range(1, last + 1):
            engine.version = step - 1  # pushed at the end of the step before
            if step > planned:
                await collector.begin(prompts_of(step), COUNTS, step, version=step - 1)
                planned, planned_units = step, planned_units + 2 * sum(COUNTS)
            taken = await collector.take(step, carried_share if step < last else 0.0)
            ages.extend(
                step - 1 - min(turn.weight_version for rollout in tree.rollouts for turn in rollout.turns)
                for tree in taken.trees
            )
            found += taken.trees
            carried.append(taken.carried_units)
            assert sum(map(num_units, found)) + taken.carried_units == planned_units
            if ahead and step < last:
                await collector.begin(prompts_of(step + 1), COUNTS, step + 1, version=step - 1)
                planned, planned_units = step + 1, planned_units + 2 * sum(COUNTS)
            await asyncio.sleep(rng.random() * 0.03)  # the policy trains
        assert len(asyncio.all_tasks()) == 1
        engine.before = None
        alone = Collector(engine, GAME, RENDERER, selector, constant_scores, CONFIG, SEED)
        expected = [t for step in range(1, last + 1) for t in await alone.collect(prompts_of(step), COUNTS, step)]
        return found, expected

    found, expected = asyncio.run(run())
    by_id = {tree.prompt.prompt_id: without_versions(tree) for tree in found}
    assert len(by_id) == len(found) and by_id == {t.prompt.prompt_id: without_versions(t) for t in expected}
    assert min(ages) >= 0 and max(ages) <= max_staleness
    assert carried[-1] == 0 and any(carried) == (carried_share > 0)
    assert max(ages) >= min(max_staleness, 1 + (carried_share > 0))  # the bound had something to do


def test_a_failure_while_nobody_waits_is_told_at_the_next_take():
    async def run():
        engine = ScriptedEngine(before=dead)
        selector = build_selector(MethodConfig(selector="uniform"), BudgetConfig(len(PROMPTS), sum(COUNTS)))
        collector = Collector(engine, GAME, RENDERER, selector, constant_scores, CONFIG, SEED)
        await collector.begin(PROMPTS, COUNTS, STEP, version=STEP - 1)
        await asyncio.sleep(0.05)
        with pytest.raises(RolloutError, match="the engine process has ended"):
            await collector.take(STEP)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_evaluate_is_flat_and_seeded():
    async def run(samples):
        return await evaluate(engine, GAME, RENDERER, CONFIG, PROMPTS, samples, run_seed=SEED, step=0)

    engine = ScriptedEngine()
    groups = asyncio.run(run(3))
    assert [len(group) for group in groups] == [3] * len(PROMPTS)
    assert all(rollout.anchor == ROOT for group in groups for rollout in group)
    assert asyncio.run(run(3)) == groups
    firsts = {call.token_ids for call in engine.calls if call.token_ids in {p.token_ids for p in PROMPTS}}
    assert len(firsts) == len(PROMPTS)
    engine.before = dead
    with pytest.raises(RolloutError, match="the engine process has ended"):
        asyncio.run(run(1))
