"""Does the engine sample from the trainer's policy? Sample a little from the one, score it with the other."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from trace_megatron.errors import WeightSyncError
from trace_megatron.rollout.engine import Completion, RolloutEngine, SamplingSettings
from trace_megatron.rollout.seeds import request_seed
from trace_megatron.types import ROOT

Score = Callable[[list[tuple[Sequence[int], Sequence[int]]]], list[list[float]]]
"""[(prompt ids, completion ids)] -> the trainer's logprobs of the completion ids, at the sampling temperature."""
Run = Callable[[Coroutine[Any, Any, list[Completion]]], list[Completion]]
"""Runs a coroutine on the engine's event loop: the trainer scores in the caller's thread, rollouts go on meanwhile."""

MEAN_SHARE = 1 / 8
"""Allowed mean difference as a share of the allowed largest one."""


@dataclass(frozen=True, slots=True)
class LogprobDifference:
    """Engine against trainer, over all tokens that were compared."""

    max: float
    mean: float
    num_tokens: int


def verify(
    run: Run,
    engine: RolloutEngine,
    score: Score,
    prompts: Sequence[Sequence[int]],
    settings: SamplingSettings,
    tolerance: float,
) -> LogprobDifference:
    """Compare the engine's logprobs of one completion per prompt with the trainer's; the seeds are fixed.

    With top-p below 1 the engine's are renormalised over at least that mass, so that they may exceed the trainer's by
    up to -log(top_p); only what lies outside counts. Raises WeightSyncError where the largest difference is above
    ``tolerance``, or the mean above an eighth of it: rounding reaches far on a few rare tokens, other weights on all.
    """
    completions = run(_sample(engine, prompts, settings))
    scores = score([(prompt, completion.token_ids) for prompt, completion in zip(prompts, completions, strict=True)])
    slack = -math.log(settings.top_p)
    compared = [
        (_difference(engine_logprob - trainer_logprob, slack), index, position, token, engine_logprob, trainer_logprob)
        for index, (completion, trainer_logprobs) in enumerate(zip(completions, scores, strict=True))
        for position, (token, engine_logprob, trainer_logprob) in enumerate(
            zip(completion.token_ids, completion.logprobs, trainer_logprobs, strict=True)
        )
    ]
    worst, index, position, token, engine_logprob, trainer_logprob = max(compared)
    mean = sum(entry[0] for entry in compared) / len(compared)
    if worst > tolerance or mean > tolerance * MEAN_SHARE:
        raise WeightSyncError(
            f"the engine's logprobs differ from the trainer's by up to {worst:.3g} and {mean:.3g} on average, allowed "
            f"are {tolerance:.3g} and {tolerance * MEAN_SHARE:.3g} (prompt {index}, position {position}, "
            f"token {token}: engine {engine_logprob:.6g}, trainer {trainer_logprob:.6g}): the engine holds other "
            "weights, samples at another temperature, or reads the model's configuration (RoPE, norms, tied head) "
            "differently; in bfloat16 a small excess is rounding, see sync.verify_tolerance"
        )
    return LogprobDifference(worst, mean, len(compared))


async def _sample(
    engine: RolloutEngine, prompts: Sequence[Sequence[int]], settings: SamplingSettings
) -> list[Completion]:
    return await asyncio.gather(
        *(
            engine.generate(prompt, settings, request_seed(0, 0, "verify", ROOT, index, 0))
            for index, prompt in enumerate(prompts)
        )
    )


def _difference(excess: float, slack: float) -> float:
    if math.isnan(excess):
        return math.inf
    return max(excess - slack, -excess, 0.0)
