"""What a benchmark's records come to, and the table at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trace_megatron.eval.records import Record
from trace_megatron.types import RolloutStatus

_HEADER = ("benchmark", "prompts", "k", "avg@k", "± se", "exact", "pass@k", "turns", "tokens", "truncated", "failed")


@dataclass(frozen=True, slots=True)
class Summary:
    """Of one benchmark; shares are of all samples unless it says otherwise."""

    benchmark: str
    num_prompts: int
    num_samples: int
    """k."""
    mean_reward: float
    """avg@k: the mean over prompts of their samples' mean reward. Failed and truncated samples count 0."""
    standard_error: float | None
    """Of avg@k, over prompts: samples of one prompt are not independent. None for a single prompt."""
    exact_share: float
    """Samples with the full reward of 1; another number than avg@k where rewards may be partial (F1)."""
    pass_share: float
    """Prompts that a sample solved with the full reward: pass@k."""
    turns_mean: float
    tokens_mean: float
    """Sampled tokens of a sample."""
    truncated_share: float
    failed_share: float


def summarize(benchmark: str, records: Sequence[Record], samples: int) -> Summary:
    """``records``: [prompts * samples], prompt by prompt."""
    rewards = np.array([record.reward for record in records]).reshape(-1, samples)
    per_prompt = rewards.mean(axis=1)
    num_prompts = len(per_prompt)
    error = float(per_prompt.std(ddof=1) / np.sqrt(num_prompts)) if num_prompts > 1 else None
    return Summary(
        benchmark=benchmark,
        num_prompts=num_prompts,
        num_samples=samples,
        mean_reward=float(per_prompt.mean()),
        standard_error=error,
        exact_share=float((rewards >= 1).mean()),
        pass_share=float((rewards >= 1).any(axis=1).mean()),
        turns_mean=float(np.mean([record.turns for record in records])),
        tokens_mean=float(np.mean([record.action_tokens for record in records])),
        truncated_share=float(np.mean([record.status is RolloutStatus.TRUNCATED for record in records])),
        failed_share=float(np.mean([record.status.failed for record in records])),
    )


def describe_summaries(summaries: Sequence[Summary]) -> str:
    """A line for each benchmark."""
    rows = [_HEADER, *map(_row, summaries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    return "\n".join(
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    )


def _row(summary: Summary) -> tuple[str, ...]:
    error = "-" if summary.standard_error is None else f"{100 * summary.standard_error:.2f}"
    return (
        summary.benchmark,
        str(summary.num_prompts),
        str(summary.num_samples),
        f"{100 * summary.mean_reward:.2f}",
        error,
        f"{100 * summary.exact_share:.2f}",
        f"{100 * summary.pass_share:.2f}",
        f"{summary.turns_mean:.2f}",
        f"{summary.tokens_mean:.0f}",
        f"{summary.truncated_share:.1%}",
        f"{summary.failed_share:.1%}",
    )
