"""Runs side by side: every variant, every seed, one engine for all.

    python examples/calculator/experiment.py compare|ablate|reasoning-gym [--jobs 2] [--seeds 5] [section.key=value ...]

``compare``: grpo, pcl, treepo and trace at one budget on the calculator task. ``ablate``: the stages of TRACE, budget
shapes, predictors, target modes. ``reasoning-gym``: grpo, treepo and trace with SmolLM2-135M. Runs go to
runs/calculator/ and runs/reasoning-gym/; finished ones are left alone, an interrupted one starts again, so the command
can be repeated until all are done. Then: python examples/calculator/results.py
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from trace_megatron.checks import check_config
from trace_megatron.config import Config, load_config
from trace_megatron.errors import UserError
from trace_megatron.event_loop import EventLoop
from trace_megatron.log import say
from trace_megatron.metrics import read_lines
from trace_megatron.policy import parallel
from trace_megatron.predictor import ConstantPredictor, OraclePredictor, Predictor, build_predictor
from trace_megatron.rollout.collector import evaluate
from trace_megatron.run_folder import RunFolder
from trace_megatron.sampling import Sampling, max_model_len, open_sampling
from trace_megatron.train import build_parts, build_policy, drive
from trace_megatron.types import Prompt

CALCULATOR = Path(__file__).with_name("config.yaml")
REASONING_GYM = Path(__file__).parents[1] / "reasoning_gym" / "config.yaml"

COMPARED = {
    "grpo": ("method.selector=uniform", "method.advantage=grpo", "budget.candidates=16", "predictor.kind=none"),
    "pcl": ("method.selector=pcl", "method.advantage=grpo"),
    "treepo": ("method.selector=treepo", "predictor.kind=none"),
    "trace": (),
}
ABLATED = {
    "neither": ("method.options={root: uniform, prefix: uniform}", "predictor.kind=none"),
    "root-only": ("method.options={prefix: uniform}",),
    "prefix-only": ("method.options={root: uniform}",),
    "both": (),
    "shape-32-2": ("budget.rollouts=32",),
    "shape-32-6": ("budget.rollouts=32", "budget.continuations=6"),
    "oracle": ("predictor.kind=oracle",),
    "constant": ("predictor.kind=constant",),
    "bare-mean": ("predictor.target_mode=bare_mean",),
    "path-uniform": ("predictor.target_mode=path_uniform",),
}
REASONING = {
    "grpo": ("method.selector=uniform", "method.advantage=grpo", "budget.candidates=8", "predictor.kind=none"),
    "treepo": ("method.selector=treepo", "predictor.kind=none"),
    "trace": (),
}


@dataclass(frozen=True, slots=True)
class Suite:
    config: Path
    variants: dict[str, tuple[str, ...]]
    """Name -> what it changes."""
    num_seeds: int


SUITES = {
    "compare": Suite(CALCULATOR, COMPARED, 5),
    "ablate": Suite(CALCULATOR, ABLATED, 3),
    "reasoning-gym": Suite(REASONING_GYM, REASONING, 2),
}


PROBES = 16
"""Rollouts by which the oracle knows a candidate; no budget pays for them."""


def main() -> None:
    options = parse_options()
    if options.seeds < 0 or options.jobs < 1:
        raise UserError(
            "expected --seeds of at least 0 (0: the suite's own number) and --jobs of at least 1, "
            f"found {options.seeds} and {options.jobs}"
        )
    if options.jobs > 1 and options.job is None:
        sys.exit(run_jobs(options.jobs))
    suite = SUITES[options.suite]
    configs = [config for config in chosen(suite, options) if not is_finished(config)]
    for config in configs:
        check_config(config)
        if config.policy.num_ranks != 1:
            raise UserError(
                f"expected a policy of one rank, found {config.policy.num_ranks}: this script starts no others"
            )
    say(f"{options.suite}: {len(configs)} runs to do")
    if not configs:
        return
    with EventLoop() as loop, open_sampling(configs[0], loop) as sampling:
        for number, config in enumerate(configs, 1):
            start_s = time.perf_counter()
            run(config, replace(sampling, config=config), loop)
            say(f"{config.run.name}: {time.perf_counter() - start_s:.0f} s, {number} of {len(configs)} done")


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--seeds", type=int, default=0, help="seeds of each variant; 0: the suite's own number")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the runs, each with an engine")
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)  # the number of one of them
    parser.add_argument("overrides", nargs="*", help="section.key=value, for all runs")
    return parser.parse_intermixed_args(arguments)


def chosen(suite: Suite, options: argparse.Namespace) -> list[Config]:
    """The runs of this job, seed by seed."""
    return [
        configure(suite, name, seed, options.overrides)
        for seed in range(options.seeds or suite.num_seeds)
        for number, name in enumerate(suite.variants)
        if options.job is None or (seed + number) % options.jobs == options.job
    ]


def run_jobs(num_jobs: int) -> int:
    """This command once per job; the worst exit code."""
    threads = max(1, (os.cpu_count() or 1) // num_jobs)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    commands = [[sys.executable, *sys.argv, "--job", str(job)] for job in range(num_jobs)]
    jobs = [subprocess.Popen(command, env=environment) for command in commands]
    return max(job.wait() for job in jobs)


def configure(suite: Suite, name: str, seed: int, overrides: list[str]) -> Config:
    changes = suite.variants[name]
    return load_config(suite.config, [*changes, *overrides, f"run.seed={seed}", f"run.name={name}-s{seed}"])


def is_finished(config: Config) -> bool:
    """Whether the run is there; an unfinished one starts again. Raises UserError for one of another configuration."""
    folder = RunFolder.of(config)
    if folder.config.is_file() and load_config(folder.config) != config:
        raise UserError(
            f"expected the run at '{folder.root}' to be of this configuration, found another: "
            "name another folder with run.output_dir=FOLDER"
        )
    return len(read_lines(folder.root / "metrics.jsonl")) == config.run.steps


def run(config: Config, sampling: Sampling, loop: EventLoop) -> None:
    folder = RunFolder.of(config)
    shutil.rmtree(folder.root, ignore_errors=True)  # of an interruption: ``is_finished`` has looked
    folder.prepare(config, resume=False)
    with build_policy(config) as policy:
        drive(build_parts(config, policy, choose_predictor(config, sampling, loop), sampling, loop), folder, None)
    parallel.shutdown()


def choose_predictor(config: Config, sampling: Sampling, loop: EventLoop) -> Predictor:
    if config.predictor.kind == "oracle":
        return ProbingOracle(sampling, loop)
    return build_predictor(config.predictor, config.run.seed) or ConstantPredictor()


class ProbingOracle(OraclePredictor):
    """Knows a candidate by ``PROBES`` rollouts of it with the policy as it is; else as its base."""

    def __init__(self, sampling: Sampling, loop: EventLoop):
        super().__init__()
        self._sampling, self._loop = sampling, loop
        self._num_probed = 0

    def score_roots(self, prompts: Sequence[Prompt]) -> np.ndarray:
        self._num_probed += 1
        sampling, config = self._sampling, self._sampling.config
        probing = evaluate(
            sampling.engine,
            sampling.environment,
            sampling.renderer,
            config.rollout,
            prompts,
            PROBES,
            run_seed=config.run.seed + 10**6,  # rollouts of their own
            step=self._num_probed,
            max_model_len=max_model_len(config),
        )
        for prompt, rollouts in zip(prompts, self._loop.run(probing), strict=True):
            self._outcomes[prompt.task.task_id] = (sum(rollout.reward for rollout in rollouts), len(rollouts))
        return super().score_roots(prompts)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        say(f"error: {error}")
        sys.exit(2)
