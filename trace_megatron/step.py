"""One training step, as the algorithm reads. GRPO, PCL, TreePO and TRACE differ only in the selector and the advantage
that the configuration names; parallel layout and device are the policy's own affair.

With ``rollout.max_staleness`` the rollouts of the next step begin before this one trains, and go on beside it.

Source: TRACE, arXiv 2606.11119. Suffixes: P candidate prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from trace_megatron.algorithm.advantage import tree_advantages
from trace_megatron.algorithm.pack import pack_micro_batches
from trace_megatron.algorithm.scores import to_host
from trace_megatron.algorithm.selectors import PromptHistory, Selector, root_view
from trace_megatron.algorithm.summary import summarize_trees
from trace_megatron.background import in_background
from trace_megatron.config import Config
from trace_megatron.errors import WeightSyncError
from trace_megatron.event_loop import EventLoop
from trace_megatron.log import progress, say
from trace_megatron.metrics import StepMetrics, Stopwatch
from trace_megatron.policy.worker import Policy
from trace_megatron.predictor import Predictor, TimedScores, predictor_diagnostics
from trace_megatron.rollout.collector import Collector
from trace_megatron.rollout.engine import SamplingSettings
from trace_megatron.rollout.prompts import PromptSource
from trace_megatron.sampling import Sampling
from trace_megatron.types import Prompt, RolloutTree
from trace_megatron.validate import score_completions
from trace_megatron.weight_sync.colocation import Colocation
from trace_megatron.weight_sync.push import WeightSync
from trace_megatron.weight_sync.stats import SyncStats
from trace_megatron.weight_sync.verify import LogprobDifference, verify

VERIFIED_PROMPTS, VERIFIED_TOKENS = 8, 16  # a comparison of engine and trainer: a second or two


@dataclass(frozen=True, slots=True)
class Planned:
    """A prompt whose tree is not trained on yet."""

    step: int
    """That planned it."""
    prompt: Prompt
    count: int
    """Its bare rollouts."""
    root_prob: float
    """What the predictor said of it then."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a step works with; each was built from its own section of the configuration."""

    config: Config
    prompts: PromptSource
    predictor: Predictor
    prefix_scores: TimedScores
    """What the collector asks for V of prefixes."""
    selector: Selector
    history: PromptHistory
    collector: Collector
    planned: dict[str, Planned]
    """By prompt, in the order of planning: what the collector has been told to grow."""
    policy: Policy
    weight_sync: WeightSync
    colocation: Colocation
    """Who holds the devices' memory, where trainer and engines share them."""
    sampling: Sampling
    loop: EventLoop
    """Of the engine and the environments."""


def run_step(parts: Parts, step: int) -> tuple[StepMetrics, list[RolloutTree]]:
    """Spend one step's budget, learn from it, and leave engine and predictor up to date. Steps count from 1."""
    config, selector, policy = parts.config, parts.selector, parts.policy
    runs_ahead, is_last = config.rollout.max_staleness > 0, step == config.run.steps
    clock = Stopwatch()

    if not _planned_by(parts, step):
        begin_rollouts(parts, step, clock, version=step - 1)
    num_skipped = selector.num_candidates - len(_planned_by(parts, step))
    with clock("rollouts"), progress("rollouts") as report:
        carried_share = 0.0 if is_last else config.rollout.carried_share
        taken = parts.loop.run(parts.collector.take(step, carried_share, report.update))
    trees = taken.trees
    root_probs = [parts.planned.pop(tree.prompt.prompt_id).root_prob for tree in trees]
    staleness = measure_staleness(trees, step - 1, config.rollout.max_staleness)
    parts.history.observe(trees)
    if runs_ahead and not is_last:
        begin_rollouts(parts, step + 1, clock, version=step - 1)

    trained_trees = selector.keep(trees)
    batch = pack_micro_batches(
        trained_trees,
        [tree_advantages(tree, config.method) for tree in trained_trees],
        tokens_per_micro_batch=config.policy.tokens_per_micro_batch,
        num_ranks=policy.data_parallel_size,
        aggregation=config.loss.aggregation,
    )
    learn = partial(parts.predictor.update, trees, config.predictor.target_mode)
    if runs_ahead:
        learn = in_background(learn).result
    with clock("policy_update"):
        parts.loop.run(parts.colocation.begin_training())
        train_stats = policy.train_step(policy.prepare(batch))
    with clock("predictor_update"):
        predictor_stats = learn()
    with clock("weight_sync"):
        sync_stats, engine_difference = push_weights(parts, version=step)

    predictor_s = clock.seconds.get("root_scores", 0.0) + parts.prefix_scores.take_seconds() + predictor_stats.seconds
    overlap = {"hidden_s": taken.hidden_s, "carried_units": taken.carried_units, **staleness}
    return StepMetrics(
        step=step,
        groups={
            "rollout": summarize_trees(trees, num_skipped + len(trees)),
            "train": train_stats,
            "predictor": predictor_stats,
            "calibration": predictor_diagnostics(root_probs, trees, [np.array(tree.prefix_probs) for tree in trees]),
            "sync": sync_stats,
            "verify": engine_difference or {},
            "engines": parts.sampling.engine.counts(),
            "colocation": parts.colocation.metrics(),
            "overlap": overlap if runs_ahead else {},
            "time": {"predictor_share": predictor_s / sum(clock.seconds.values())},
        },
        seconds=clock.seconds,
    ), trees


def begin_rollouts(parts: Parts, step: int, clock: Stopwatch, version: int) -> None:
    """Plan a step, and let its trees grow: they do so while the caller goes on. ``version``: of the engine's weights.

    Per prompt, without a barrier: bare rollouts -> prefix scores -> prefix plan -> continuations -> rewards.
    """
    selector, rng = parts.selector, np.random.default_rng((parts.config.run.seed, step))
    candidates = parts.prompts.next(selector.num_candidates)
    with clock("root_scores"):
        root_probs_P = parts.predictor.score_roots(candidates)
    root_counts_P = selector.select_roots(root_view(candidates, root_probs_P, parts.history), selector.root_budget, rng)
    planned = [
        Planned(step, prompt, int(count), float(prob))
        for prompt, count, prob in zip(candidates, root_counts_P, to_host(root_probs_P), strict=True)
        if count > 0
    ]
    grow(parts, step, planned, version)


def grow(parts: Parts, step: int, planned: Sequence[Planned], version: int) -> None:
    """Let the trees that ``step`` planned grow."""
    parts.planned.update((here.prompt.prompt_id, here) for here in planned)
    prompts, counts = [here.prompt for here in planned], [here.count for here in planned]
    parts.loop.run(parts.collector.begin(prompts, counts, step, version))


def _planned_by(parts: Parts, step: int) -> list[Planned]:
    return [planned for planned in parts.planned.values() if planned.step == step]


def measure_staleness(trees: Sequence[RolloutTree], version: int, bound: int) -> dict[str, float]:
    """Updates between each tree's oldest token and ``version``, which trains on it: mean and max.

    Raises WeightSyncError above ``bound``: the loss would rest on weights that the configuration does not allow.
    """
    ages = {
        tree.prompt.prompt_id: version - min(turn.weight_version for rollout in tree.rollouts for turn in rollout.turns)
        for tree in trees
        if any(rollout.turns for rollout in tree.rollouts)
    }
    for prompt_id, age in ages.items():
        if not 0 <= age <= bound:
            raise WeightSyncError(
                f"expected trees of weights at most {bound} updates old (rollout.max_staleness), found {age} updates "
                f"in the tree of prompt '{prompt_id}', trained by version {version}"
            )
    return {"staleness_mean": sum(ages.values()) / max(len(ages), 1), "staleness_max": max(ages.values(), default=0)}


def push_weights(parts: Parts, version: int) -> tuple[SyncStats, LogprobDifference | None]:
    """Give the engine the trainer's weights; on the first push, and when asked, compare the logprobs of both.

    Raises WeightSyncError: the engine never samples from weights that are not the trainer's.
    """
    stats = _push_to_all(parts, version)
    if not parts.weight_sync.verify_due:
        return stats, None
    rollout, sampling = parts.config.rollout, parts.sampling
    return stats, verify(
        parts.loop.run,
        sampling.engine,
        lambda pairs: score_completions(parts.policy, pairs),
        [prompt.token_ids for prompt in sampling.prompts("train").next(VERIFIED_PROMPTS)],
        SamplingSettings(rollout.temperature, rollout.top_p, VERIFIED_TOKENS, sampling.renderer.stop_token_ids),
        parts.weight_sync.tolerance,
    )


def _push_to_all(parts: Parts, version: int) -> SyncStats:
    """Start dead engines again, and push; once more where the push itself lost one."""
    engines = parts.sampling.engine

    def push() -> SyncStats:
        parts.loop.run(engines.heal())
        weights = parts.policy.weights_in_place()
        sync = parts.weight_sync.push(*weights, version, before_resume=parts.colocation.end_push)
        return parts.loop.run(sync)

    parts.loop.run(parts.colocation.begin_push())
    try:
        return push()
    except WeightSyncError as error:
        if len(engines) == engines.num_engines:  # all alive: it was not an engine's death
            raise
        say(f"{error}; trying again")
    return push()
