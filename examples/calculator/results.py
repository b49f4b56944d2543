"""Tables and plots of the calculator runs, as Markdown on stdout and PNG files.

    python examples/calculator/results.py [--root runs/calculator] [--baseline treepo]

Primary: effective ratio, the mean over a run's steps, and over its first ones, before a policy that learned quickly
solves too much for mixed trees. Then held-out accuracy at every validation (the same step is equal units) and at equal
sampled tokens (quarters of the smallest total of all runs). Differences are paired by seed, intervals 95 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from trace_megatron.config import load_config
from trace_megatron.errors import UserError
from trace_megatron.log import say
from trace_megatron.metrics import read_lines
from trace_megatron.report.statistics import mean_interval, paired_difference, value_at

WINDOW = 10
EARLY = 20
"""Steps."""
ACCURACY = "validation/accuracy"


@dataclass(frozen=True, slots=True)
class Run:
    variant: str
    seed: int
    lines: list[dict]
    """metrics.jsonl."""

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """(index of the step, value) of the steps that have one."""
        found = [(index, line[key]) for index, line in enumerate(self.lines) if line.get(key) is not None]
        return np.array([index for index, _ in found]), np.array([value for _, value in found])

    def mean(self, key: str) -> float:
        return float(np.mean(self.series(key)[1]))

    def total(self, key: str) -> float:
        return float(np.sum(self.series(key)[1]))

    @property
    def tokens(self) -> np.ndarray:
        """Sampled so far, after each step."""
        return np.cumsum(self.series("rollout/generated_tokens")[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, default=Path("runs/calculator"))
    parser.add_argument("--baseline", default="treepo")
    options = parser.parse_args()
    runs = list(read_runs(options.root))
    if not runs:
        raise UserError(f"expected finished runs below '{options.root}', found none: run experiment.py first")
    print("\n\n".join(tables(runs, options.baseline)))
    label = f"effective ratio, mean over {WINDOW} steps"
    plot(runs, "rollout/effective_ratio", label, options.root / "effective_ratio.png", WINDOW)
    plot(runs, ACCURACY, "held-out accuracy", options.root / "accuracy.png")


def read_runs(root: Path) -> Iterator[Run]:
    """The finished runs."""
    for folder in sorted(path.parent for path in root.glob("*/metrics.jsonl")):
        variant, _, seed = folder.name.rpartition("-s")
        lines = [json.loads(line) for line in read_lines(folder / "metrics.jsonl")]
        if variant and seed.isdigit() and len(lines) == load_config(folder / "config.yaml").run.steps:
            yield Run(variant, int(seed), lines)


def tables(runs: Sequence[Run], baseline: str) -> Iterator[str]:
    least_tokens = min(run.tokens[-1] for run in runs)
    yield table("effective ratio, mean over steps", runs, baseline, lambda run: run.mean("rollout/effective_ratio"))
    if len(runs[0].lines) > EARLY:
        yield table(f"effective ratio, steps 1 to {EARLY}", runs, baseline, early_ratio)
    for index in range(min(run.series(ACCURACY)[1].size for run in runs)):
        step = runs[0].series(ACCURACY)[0][index] + 1
        yield table(f"held-out accuracy after step {step}", runs, baseline, partial(accuracy, index=index))
    if all(run.series(ACCURACY)[1].size for run in runs):
        for share in (0.25, 0.5, 0.75, 1.0):
            tokens = share * least_tokens
            title = f"held-out accuracy after {tokens:,.0f} sampled tokens"
            yield table(title, runs, baseline, partial(accuracy_at_tokens, tokens=tokens))
    yield table("mixed trees a step", runs, baseline, mixed_trees)
    yield table("mixed pairs per unit", runs, baseline, lambda run: run.mean("rollout/contrasts_per_unit"))
    yield table("units", runs, baseline, lambda run: run.total("rollout/units"))
    yield table("sampled tokens", runs, baseline, lambda run: float(run.tokens[-1]))
    yield table("predictor's share of the time", runs, baseline, lambda run: run.mean("time/predictor_share"))
    yield table(
        "seconds",
        runs,
        baseline,
        lambda run: sum(run.total(key) for key in run.lines[-1] if key.startswith("seconds/")),
    )
    for key in (
        "calibration/root_spearman",
        "calibration/prefix_spearman",
        "calibration/root_brier",
        "calibration/prefix_brier",
    ):
        scored = [run for run in runs if run.series(key)[1].size]
        if scored:
            yield table(f"{key.partition('/')[2].replace('_', ', ')}, last half", scored, baseline, last_half(key))


def table(title: str, runs: Sequence[Run], baseline: str, measure: Callable[[Run], float]) -> str:
    """One row a variant: the mean over seeds, and the paired difference to the baseline."""
    values: dict[str, dict[int, float]] = {}
    for run in runs:
        values.setdefault(run.variant, {})[run.seed] = measure(run)
    lines = [f"### {title}", "| variant | seeds | mean | minus " + baseline + " |", "| --- | --- | --- | --- |"]
    for variant, by_seed in values.items():
        shared = by_seed.keys() & values.get(baseline, {}).keys()
        known = variant != baseline and shared
        difference = str(paired_difference(by_seed, values[baseline])) if known else ""
        lines.append(f"| {variant} | {len(by_seed)} | {mean_interval(list(by_seed.values()))} | {difference} |")
    return "\n".join(lines)


def mixed_trees(run: Run) -> float:
    """Trees with a success and a failure: the ratio's numerator, which a selector of more prompts does not thin out."""
    return float(np.mean([line["rollout/effective_ratio"] * line["rollout/num_trees"] for line in run.lines]))


def early_ratio(run: Run) -> float:
    return float(np.mean([line["rollout/effective_ratio"] for line in run.lines[:EARLY]]))


def accuracy(run: Run, index: int) -> float:
    """At a validation."""
    return float(run.series(ACCURACY)[1][index])


def accuracy_at_tokens(run: Run, tokens: float) -> float:
    steps, accuracies = run.series(ACCURACY)
    return value_at(run.tokens[steps], accuracies, tokens)


def last_half(key: str) -> Callable[[Run], float]:
    def measure(run: Run) -> float:
        values = run.series(key)[1]
        return float(np.mean(values[values.size // 2 :]))

    return measure


def averaged(steps: np.ndarray, values: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """(last step, mean value) of every full window."""
    count = values.size // window
    return steps[window - 1 :: window][:count], values[: count * window].reshape(count, window).mean(axis=1)


def plot(runs: Sequence[Run], key: str, label: str, path: Path, window: int = 1) -> None:
    """Mean over seeds with its 95 % interval, by step; each point is a mean over ``window`` values of a run."""
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for variant in dict.fromkeys(run.variant for run in runs):
        curves = [averaged(*run.series(key), window) for run in runs if run.variant == variant]
        length = min(values.size for _, values in curves)
        if not length:
            continue
        steps = curves[0][0][:length] + 1
        intervals = [mean_interval([values[index] for _, values in curves]) for index in range(length)]
        (line,) = axes.plot(steps, [interval.mean for interval in intervals], label=variant)
        if len(curves) > 1:
            low, high = ([getattr(interval, side) for interval in intervals] for side in ("low", "high"))
            axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.15)
    axes.set(xlabel="step", ylabel=label)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        say(f"error: {error}")
        sys.exit(2)
