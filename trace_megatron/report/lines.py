"""The lines that a run prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trace_megatron.metrics import StepMetrics


def describe_step(metrics: StepMetrics, num_steps: int) -> str:
    """One line: outcome, budget, tokens, engine against trainer, seconds by phase."""
    values = metrics.flat()
    parts = [
        f"step {metrics.step}/{num_steps}",
        f"reward {values['rollout/reward_mean']:.3f}",
        f"effective {values['rollout/effective_ratio']:.0%} of {values['rollout/num_trees']} trees",
        f"rollouts {values['rollout/num_bare']}+{values['rollout/num_continuations']}"
        f" ({values['rollout/units']:g} units)",
        f"tokens {_thousands(values['rollout/generated_tokens'])} sampled,"
        f" {_thousands(values['train/num_tokens'])} packed"
        f" / {_thousands(values['train/num_unpacked_tokens'])} unpacked",
        f"ratio {values['train/ratio_mean']:.4f} (tail {values['train/ratio_tail']:.3f},"
        f" kl {values['train/mismatch_kl']:.1e}, clipped {values['train/clip_share']:.1%})",
        f"grad {values['train/grad_norm']:.3g}",
        *_validation(values),
        _seconds(metrics.seconds),
    ]
    return " | ".join(parts)


def describe_failures(metrics: StepMetrics) -> str:
    """What went wrong in a step that went on; empty when nothing did."""
    share = metrics.flat()["rollout/failed_share"]
    return (
        f"  {share:.1%} of the rollouts failed (engine or environment); they are counted and not trained on"
        if share
        else ""
    )


def describe_totals(lines: list[Mapping[str, Any]]) -> list[str]:
    """The last lines of a run: tokens with and without sharing, where the budget went, seconds by phase."""
    packed = sum(line["train/num_tokens"] for line in lines)
    unpacked = sum(line["train/num_unpacked_tokens"] for line in lines)
    phases: dict[str, float] = {}
    for line in lines:
        for key, value in line.items():
            if key.startswith("seconds/"):
                phases[key.removeprefix("seconds/")] = phases.get(key.removeprefix("seconds/"), 0.0) + value
    return [
        f"tokens trained: {packed:,} packed, {unpacked:,} if every trajectory were trained alone"
        f" ({unpacked / max(packed, 1):.2f}x)",
        "bare rollouts per candidate: " + _histogram([line["rollout/allocation_histogram"] for line in lines]),
        *_continuations([line["rollout/continuations_by_turn"] for line in lines]),
        f"predictor's share of the time: {_mean([line['time/predictor_share'] for line in lines]):.1%}",
        "time: " + _seconds(phases),
    ]


def _validation(values: Mapping[str, Any]) -> list[str]:
    if "validation/accuracy" not in values:
        return []
    return [f"validation {values['validation/accuracy']:.1%} ± {values['validation/standard_error']:.1%}"]


def _histogram(histograms: list[list[int]]) -> str:
    return ", ".join(f"{count} got {m}" for m, count in enumerate(_added(histograms)) if count)


def _continuations(by_turn: list[list[int]]) -> list[str]:
    counts = _added(by_turn)
    if not counts:
        return []
    return ["continuations by turn of their prefix: " + ", ".join(f"{n} after {t}" for t, n in enumerate(counts, 1))]


def _mean(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)


def _added(rows: list[list[int]]) -> list[int]:
    return [sum(row[i] for row in rows if i < len(row)) for i in range(max(map(len, rows), default=0))]


def _seconds(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{phase.replace('_', ' ')} {value:.1f} s" for phase, value in seconds.items())


def _thousands(count: int) -> str:
    return f"{count / 1000:.1f}k" if count >= 1000 else str(count)
