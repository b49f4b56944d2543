"""How long a step's rollouts take on 8 to 1,024 engines, with and without a batch barrier and tree affinity.

    python tools/simulate_engines.py [--engines 8 64 512 1024] [--prompts-per-engine 4] [--recorded RUN] [--sigma 1.0]

A model, not a measurement (trace_megatron/simulate/engines.py): times of an iteration and of a tool are options. With
--recorded the turns' tokens are those of a run's trees instead of a long-tailed distribution.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from trace_megatron.errors import UserError
from trace_megatron.log import say
from trace_megatron.simulate.engines import Fleet, FleetResult, Workload, draw_workload, simulate_fleet
from trace_megatron.tree_files import read_trees
from trace_megatron.types import ROOT

MODES = {
    "barrier, no affinity": {"barrier": True, "affinity": False},
    "barrier, affinity": {"barrier": True, "affinity": True},
    "no barrier, no affinity": {"barrier": False, "affinity": False},
    "no barrier, affinity": {"barrier": False, "affinity": True},
}


def main() -> None:
    options = parse_options()
    check_options(options)
    recorded = read_turns(options.recorded) if options.recorded else None
    fleet = Fleet(1, options.slots, options.base_ms, options.per_request_ms)
    print("| engines | mode | seconds | of the lower bound | engines idle | slots empty | prefilled, million tokens |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for num_engines in options.engines:
        rng = np.random.default_rng(options.seed)
        work = build_workload(num_engines * options.prompts_per_engine, options, recorded, rng)
        for name, mode in MODES.items():
            result = simulate_fleet(work, replace(fleet, num_engines=num_engines), **mode)
            print(f"| {num_engines} | {name} | {describe(result)} |", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engines", type=int, nargs="+", default=[8, 64, 512, 1024])
    parser.add_argument("--prompts-per-engine", type=int, default=4)
    parser.add_argument("--rollouts", type=int, default=16, help="bare ones of a prompt")
    parser.add_argument("--continuations", type=int, default=2, help="for each bare rollout")
    parser.add_argument("--max-turns", type=int, default=20)
    parser.add_argument("--stop-prob", type=float, default=0.2, help="chance that a turn is the last")
    parser.add_argument("--turn-tokens", type=float, default=300.0)
    parser.add_argument("--sigma", type=float, default=1.0, help="of a turn's log tokens")
    parser.add_argument("--tool-ms", type=float, default=500.0)
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--base-ms", type=float, default=12.0)
    parser.add_argument("--per-request-ms", type=float, default=0.1)
    parser.add_argument("--recorded", type=Path, help="folder of a run")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def check_options(options: argparse.Namespace) -> None:
    """Raises UserError for a fleet or a workload that there cannot be."""
    at_least_one = {"--prompts-per-engine": options.prompts_per_engine, "--rollouts": options.rollouts}
    at_least_one |= {"--max-turns": options.max_turns, "--slots": options.slots, "--turn-tokens": options.turn_tokens}
    at_least_one["--engines"] = min(options.engines)
    at_least_zero = {"--continuations": options.continuations, "--sigma": options.sigma, "--tool-ms": options.tool_ms}
    at_least_zero |= {"--per-request-ms": options.per_request_ms, "--seed": options.seed}
    for least, numbers in ((1, at_least_one), (0, at_least_zero)):
        for name, number in numbers.items():
            if not least <= number < float("inf"):  # nor what is no number
                raise UserError(f"expected {name} of at least {least}, found {number}")
    if not 0 < options.base_ms < float("inf"):
        raise UserError(f"expected --base-ms above 0, found {options.base_ms}: an iteration takes time")
    if not 0 < options.stop_prob <= 1:
        raise UserError(f"expected --stop-prob in (0, 1], found {options.stop_prob}: turns end at --max-turns anyway")


def read_turns(run: Path) -> list[list[int]]:
    """Action tokens by turn of a run's bare rollouts."""
    trees = [tree for file in sorted((run / "trees").glob("*.jsonl.zst")) for tree in read_trees(file)]
    rollouts = [rollout for tree in trees for rollout in tree.rollouts if rollout.anchor == ROOT and rollout.turns]
    if not rollouts:
        raise UserError(f"expected trees of a run below '{run}', found none")
    return [[len(turn.action_ids) for turn in rollout.turns] for rollout in rollouts]


def build_workload(
    num_prompts: int, options: argparse.Namespace, recorded: list[list[int]] | None, rng: np.random.Generator
) -> Workload:
    work = draw_workload(
        num_prompts,
        options.rollouts,
        options.continuations,
        options.max_turns,
        options.stop_prob,
        options.turn_tokens,
        options.sigma,
        rng,
    )
    if recorded:
        bare = [[recorded[rng.integers(len(recorded))] for _ in rollouts] for rollouts in work.bare]
        # A continuation keeps a uniformly chosen part of a rollout's turns.
        drawn = [[recorded[rng.integers(len(recorded))] for _ in rollouts] for rollouts in work.continuations]
        work = replace(work, bare=bare, continuations=[[r[rng.integers(len(r)) :] for r in group] for group in drawn])
    return replace(work, tool_ms=options.tool_ms)


def describe(result: FleetResult) -> str:
    return (
        f"{result.seconds:.0f} | {result.seconds / result.lower_bound_s:.2f} | {result.idle_share:.0%} | "
        f"{result.empty_share:.0%} | {result.prefilled_tokens / 1e6:.2f}"
    )


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        say(f"error: {error}")
        sys.exit(2)
