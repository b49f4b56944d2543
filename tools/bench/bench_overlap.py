"""Seconds of a step with and without overlap: the same run with rollout.max_staleness 0 and 1, in turn, on one engine.

    OMP_NUM_THREADS=1 python tools/bench/bench_overlap.py [--steps 8] [--rounds 2] [--answer-s 0]

Trainer and engine have one thread each, so that two cores are what two devices would be. A random 256-wide model of
four layers, flat groups, no predictor; both sides with decoupled old logprobs. The first and the last step of a run are
left out: there one side has nothing to overlap with. ``--answer-s``: seconds that the environment takes for each
answer, as a tool elsewhere does, without using a core.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from tiny_models import write_tiny_model
from tiny_runs import read_metrics, write_config

from trace_megatron.config import Config, load_config
from trace_megatron.event_loop import EventLoop
from trace_megatron.policy import parallel
from trace_megatron.predictor import ConstantPredictor
from trace_megatron.rollout.env import Environment, Transition
from trace_megatron.run_folder import RunFolder
from trace_megatron.sampling import Sampling, open_sampling
from trace_megatron.train import build_parts, build_policy, drive
from trace_megatron.types import Task

PHASES = ("rollouts", "policy_update", "weight_sync")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--answer-s", type=float, default=0.0)
    parser.add_argument("overrides", nargs="*", help="section.key=value, for all runs")
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        path = write_config(
            root,
            write_tiny_model(
                root / "model", family="qwen3", tied=False, hidden=256, head_dim=64, ffn=768, num_layers=4
            ),
            run={"steps": options.steps, "checkpoint_every": 0, "export_hf": False},
            policy={"pipeline_parallel": 1, "tokens_per_micro_batch": 4096},
            optimizer={"learning_rate": 1e-5},
            loss={"old_logprobs": "decoupled"},
            method={"selector": "uniform", "advantage": "grpo"},
            budget={"candidates": 8, "rollouts": 32, "continuations": 0},
            predictor={"kind": "none"},
            rollout={"max_turns": 1, "max_new_tokens": 96, "truncated": "keep"},
            engine={"threads": 1},
            validation={"every": 0},
        )
        config = load_config(path, options.overrides)
        steps: dict[int, list[dict]] = {0: [], 1: []}
        with EventLoop() as loop, open_sampling(config, loop) as sampling:
            sampling = replace(sampling, environment=SlowEnvironment(sampling.environment, options.answer_s))
            for number in range(options.rounds):
                for staleness, found in steps.items():
                    run = replace(config.run, name=f"{number}-{staleness}")
                    rollout = replace(config.rollout, max_staleness=staleness)
                    found += train(replace(config, run=run, rollout=rollout), sampling, loop)[1:-1]
    for staleness, found in steps.items():
        seconds = [sum(line[f"seconds/{phase}"] for phase in PHASES) for line in found]
        phases = {phase: statistics.median(line[f"seconds/{phase}"] for line in found) for phase in PHASES}
        print(
            f"max_staleness={staleness}: {statistics.median(seconds):.2f} s a step (median of {len(seconds)}), of it "
            + ", ".join(f"{phase.replace('_', ' ')} {value:.2f}" for phase, value in phases.items())
            + f"; trees at most {max(line.get('overlap/staleness_max', 0) for line in found)} updates old"
        )


@dataclass
class SlowEnvironment:
    """An environment whose answers take a while."""

    inner: Environment
    answer_s: float

    def tasks(self, split: str) -> Sequence[Task]:
        return self.inner.tasks(split)

    async def reset(self, task: Task) -> Any:
        return await self.inner.reset(task)

    async def step(self, state: Any, action: str) -> Transition:
        await asyncio.sleep(self.answer_s)
        return await self.inner.step(state, action)

    async def close(self) -> None:
        await self.inner.close()


def train(config: Config, sampling: Sampling, loop: EventLoop) -> list[dict]:
    folder = RunFolder.of(config)
    folder.prepare(config, resume=False)
    with build_policy(config) as policy:
        torch.set_num_threads(1)
        drive(build_parts(config, policy, ConstantPredictor(), replace(sampling, config=config), loop), folder, None)
    parallel.shutdown()
    return read_metrics(folder.root)


if __name__ == "__main__":
    main()
