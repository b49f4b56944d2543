"""One training step, as the algorithm reads. GRPO, PCL, TreePO and TRACE differ only in the selector and the advantage
that the configuration names; parallel layout and device are the policy's own affair.

Source: TRACE, arXiv 2606.11119. Suffixes: P candidate prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trace_megatron.algorithm.advantage import tree_advantages
from trace_megatron.algorithm.pack import pack_micro_batches
from trace_megatron.algorithm.scores import Scores, to_host
from trace_megatron.algorithm.selectors import PromptHistory, Selector, root_view
from trace_megatron.algorithm.summary import summarize_trees
from trace_megatron.config import Config
from trace_megatron.errors import WeightSyncError
from trace_megatron.event_loop import EventLoop
from trace_megatron.log import progress, say
from trace_megatron.metrics import StepMetrics, Stopwatch
from trace_megatron.policy.worker import Policy
from trace_megatron.predictor import Predictor, PredictorDiagnostics, TimedScores, predictor_diagnostics
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
    policy: Policy
    weight_sync: WeightSync
    colocation: Colocation
    """Who holds the devices' memory, where trainer and engines share them."""
    sampling: Sampling
    loop: EventLoop
    """Of the engine and the environments."""


def run_step(parts: Parts, step: int) -> tuple[StepMetrics, list[RolloutTree]]:
    """Spend one step's budget, learn from it, and leave engine and predictor up to date. Steps count from 1."""
    config, selector, predictor, policy = parts.config, parts.selector, parts.predictor, parts.policy
    rng = np.random.default_rng((config.run.seed, step))
    clock = Stopwatch()

    candidates = parts.prompts.next(selector.num_candidates)
    with clock("root_scores"):
        root_probs_P = predictor.score_roots(candidates)
    root_counts_P = selector.select_roots(root_view(candidates, root_probs_P, parts.history), selector.root_budget, rng)

    # Per prompt, without a barrier: bare rollouts -> prefix scores -> prefix plan -> continuations -> rewards.
    with clock("rollouts"), progress("rollouts") as report:
        trees = parts.loop.run(parts.collector.collect(candidates, root_counts_P, step, report.update))

    trained_trees = selector.keep(trees)
    batch = pack_micro_batches(
        trained_trees,
        [tree_advantages(tree, config.method) for tree in trained_trees],
        tokens_per_micro_batch=config.policy.tokens_per_micro_batch,
        num_ranks=policy.data_parallel_size,
        aggregation=config.loss.aggregation,
    )
    with clock("policy_update"):
        parts.loop.run(parts.colocation.begin_training())
        train_stats = policy.train_step(policy.prepare(batch))
    with clock("predictor_update"):
        predictor_stats = predictor.update(trees, config.predictor.target_mode)
    parts.history.observe(trees)
    with clock("weight_sync"):
        sync_stats, engine_difference = push_weights(parts, version=step)

    predictor_s = clock.seconds["root_scores"] + parts.prefix_scores.take_seconds() + clock.seconds["predictor_update"]
    return StepMetrics(
        step=step,
        groups={
            "rollout": summarize_trees(trees, len(candidates)),
            "train": train_stats,
            "predictor": predictor_stats,
            "calibration": _calibration(candidates, root_probs_P, trees),
            "sync": sync_stats,
            "verify": engine_difference or {},
            "engines": parts.sampling.engine.counts(),
            "colocation": parts.colocation.metrics(),
            "time": {"predictor_share": predictor_s / sum(clock.seconds.values())},
        },
        seconds=clock.seconds,
    ), trees


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
        sync = parts.weight_sync.push(*parts.policy.weights(), version, before_resume=parts.colocation.end_push)
        return parts.loop.run(sync)

    parts.loop.run(parts.colocation.begin_push())
    try:
        return push()
    except WeightSyncError as error:
        if len(engines) == engines.num_engines:  # all alive: it was not an engine's death
            raise
        say(f"{error}; trying again")
    return push()


def _calibration(
    candidates: Sequence[Prompt], root_probs_P: Scores, trees: Sequence[RolloutTree]
) -> PredictorDiagnostics:
    """The scores that the budget was spent by, beside what came of it."""
    root_probs = {prompt.prompt_id: prob for prompt, prob in zip(candidates, to_host(root_probs_P), strict=True)}
    return predictor_diagnostics(
        [root_probs[tree.prompt.prompt_id] for tree in trees], trees, [np.array(tree.prefix_probs) for tree in trees]
    )
