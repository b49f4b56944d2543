"""Whether a run repeated another: the same sampled tokens, and metrics that agree, over the steps that both have.

    python tools/compare_runs.py RUN OTHER_RUN

Prints the largest difference of a metric that no clock made. Exit code 1: other tokens, or a difference above 1e-5.
Runs in float32 repeat; in bfloat16 a sampled token can depend on which requests shared the engine's batch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from trace_megatron.errors import UserError
from trace_megatron.log import say
from trace_megatron.metrics import read_lines
from trace_megatron.tree_files import read_step

TOLERANCE = 1e-5
CLOCK = ("_s", "seconds", "predictor_share", "flop_utilisation", "_gib")
"""Ends of the names of what a clock, or the memory of the moment, made."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("other", type=Path)
    options = parser.parse_args()
    runs = [options.run, options.other]
    lines = [[json.loads(line) for line in read_lines(run / "metrics.jsonl")] for run in runs]
    num_steps = min(map(len, lines))
    if not num_steps:
        raise UserError(f"expected two runs of at least a step, found {len(lines[0])} and {len(lines[1])} steps")
    for step in range(1, num_steps + 1):
        first, second = (sampled(run, step) for run in runs)
        if first != second:
            print(f"step {step}: other tokens were sampled")
            return 1
    largest, key = max(pair for step in range(num_steps) for pair in differences(lines[0][step], lines[1][step]))
    print(f"{num_steps} steps: the same tokens; largest difference of a metric {largest:.1e} ({key})")
    return int(largest > TOLERANCE)


def sampled(run: Path, step: int) -> list[tuple]:
    """Prompts, anchors, tokens and rewards of a step."""
    return [
        (tree.prompt.prompt_id, rollout.anchor, rollout.reward, turn.action_ids, turn.observation_ids)
        for tree in read_step(run / "trees", step)
        for rollout in tree.rollouts
        for turn in rollout.turns
    ]


def differences(line: dict, other: dict) -> Iterator[tuple[float, str]]:
    """(difference, name) of every metric that should repeat; infinite where one run lacks a number."""
    yield 0.0, "none"
    for key in sorted(line.keys() | other.keys()):
        if not (key.startswith("seconds/") or key.endswith(CLOCK)):
            yield difference(line.get(key), other.get(key)), key


def difference(first: object, second: object) -> float:
    """Of two numbers, or the largest of two tables of numbers."""
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return max((difference(first[key], second[key]) for key in first), default=0.0)
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return max(map(difference, first, second), default=0.0)
    if first == second:
        return 0.0
    numbers = isinstance(first, int | float) and isinstance(second, int | float)
    return abs(first - second) if numbers else float("inf")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        say(f"error: {error}")
        sys.exit(2)
