"""Accuracy on held-out prompts, and the trainer's view of an engine's completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trace_megatron.algorithm.pack import pack_trees
from trace_megatron.algorithm.tree import SUCCESS_THRESHOLD
from trace_megatron.policy.worker import Policy
from trace_megatron.types import (
    ROOT,
    Prompt,
    Rollout,
    RolloutStatus,
    RolloutTree,
    Task,
    TreeBatch,
    Turn,
)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Held-out accuracy. Failed rollouts (engine, environment) count as wrong and are reported."""

    accuracy: float
    """Mean over prompts of the share of their samples with reward above 1/2."""
    standard_error: float
    """Of that mean, over prompts: samples of one prompt are not independent. 0 for a single prompt."""
    reward: float
    num_prompts: int
    num_samples: int
    """Per prompt."""
    turns_mean: float
    truncated_share: float
    failed_share: float


def measure_accuracy(rollouts: Sequence[Sequence[Rollout]]) -> Accuracy:
    """Summarise [prompts][samples] flat rollouts, equally many samples each."""
    everything = [rollout for group in rollouts for rollout in group]
    per_prompt = np.array([np.mean([rollout.reward > SUCCESS_THRESHOLD for rollout in group]) for group in rollouts])
    spread = per_prompt.std(ddof=1) if len(per_prompt) > 1 else 0.0
    return Accuracy(
        accuracy=float(per_prompt.mean()),
        standard_error=float(spread / np.sqrt(len(per_prompt))),
        reward=float(np.mean([rollout.reward for rollout in everything])),
        num_prompts=len(rollouts),
        num_samples=len(rollouts[0]),
        turns_mean=float(np.mean([len(rollout.turns) for rollout in everything])),
        truncated_share=float(np.mean([rollout.status is RolloutStatus.TRUNCATED for rollout in everything])),
        failed_share=float(np.mean([rollout.status.failed for rollout in everything])),
    )


def score_completions(policy: Policy, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
    """The trainer's logprobs of the completions of (prompt ids, completion ids) pairs, at the run's temperature."""
    batches = [_as_batch(prompt_ids, completion_ids) for prompt_ids, completion_ids in pairs]
    num_ranks = policy.data_parallel_size
    per_rank = -(-len(batches) // num_ranks)
    filled = batches + [batches[-1]] * (per_rank * num_ranks - len(batches))  # every rank has equally many
    rows = policy.logprobs([filled[rank * per_rank : (rank + 1) * per_rank] for rank in range(num_ranks)])
    flat = [logprobs for row in rows for logprobs in row]
    return [logprobs[batch.weight > 0].tolist() for batch, logprobs in zip(batches, flat, strict=False)]


def _as_batch(prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> TreeBatch:
    turn = Turn(tuple(completion_ids), (0.0,) * len(completion_ids), (), 0)
    prompt = Prompt("verify", Task("verify", (), {}), tuple(prompt_ids))
    tree = RolloutTree(prompt, (Rollout(ROOT, (turn,), 0.0, RolloutStatus.FINISHED),))
    return pack_trees([tree], [np.zeros((1, 2))])
