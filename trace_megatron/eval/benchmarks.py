"""The names in ``eval.benchmarks`` -> environments, prompts and k."""

from __future__ import annotations

import difflib
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trace_megatron.config import Config, EnvConfig, RolloutConfig
from trace_megatron.data.sources import SOURCES
from trace_megatron.envs import build_environment
from trace_megatron.errors import UserError
from trace_megatron.log import say
from trace_megatron.problems import KINDS, read_problems
from trace_megatron.rollout.chat import ChatRenderer
from trace_megatron.rollout.env import Environment
from trace_megatron.rollout.prompts import PromptSource
from trace_megatron.rollout.react import ReActRenderer
from trace_megatron.types import Prompt

VALIDATION, BFCL = "validation", "bfcl"
BFCL_SAMPLES = 4
"""k of arXiv 2606.11119, as those of data/sources.py."""

_ENVIRONMENTS = {"math": "python_tool", "choice": "python_tool", "qa": "retrieval"}
_EXAMPLES = {
    "python_tool": {"num_examples": 3},
    "retrieval": {"num_examples": 3},
    "reasoning_gym": {"num_examples": 2},
    "bfcl": {"worked_example": True},
}
"""A base model learns the scaffold from examples, so it gets them unless env.params says otherwise."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One row of the table."""

    name: str
    env: EnvConfig
    rollout: RolloutConfig
    samples: int
    """k."""
    num_prompts: int
    """0: all that the environment has."""
    data: str
    """Digest of the problem file; empty where the environment brings its own."""


def plan_benchmarks(config: Config) -> list[Benchmark]:
    """The benchmarks of a configuration. Raises UserError for a name, a file or a k that makes no sense."""
    settings = config.eval
    for option, value in (("samples", settings.samples), ("prompts", settings.prompts)):
        if value < 0:
            raise UserError(f"expected eval.{option} of at least 0 (0: the benchmark's own), found {value}")
    if settings.temperature < 0 or not 0 <= settings.top_p <= 1:
        raise UserError(
            "expected eval.temperature of at least 0 and eval.top_p in [0, 1] (0: those of the configuration), found "
            f"{settings.temperature:g} and {settings.top_p:g}"
        )
    if not settings.benchmarks:
        raise UserError("expected benchmarks in eval.benchmarks, found none: name some, e.g. [math500]")
    planned = [_plan(name, config) for name in settings.benchmarks]
    names = [benchmark.name for benchmark in planned]
    if len(set(names)) < len(names):
        raise UserError(f"expected every benchmark once in eval.benchmarks, found {', '.join(names)}")
    return planned


def open_environment(benchmark: Benchmark) -> Environment:
    """Its environment. Raises UserError where it has nothing to ask."""
    environment = build_environment(benchmark.env)
    if not len(environment.tasks("validation")):
        raise UserError(f"expected tasks in the benchmark '{benchmark.name}', found none: check env.params")
    return environment


def prompts_of(
    benchmark: Benchmark, environment: Environment, renderer: ChatRenderer | ReActRenderer, seed: int
) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts to play, and those that are longer than the limit, which count as wrong."""
    limit = benchmark.rollout.max_prompt_tokens
    if (
        benchmark.name == VALIDATION
    ):  # the very prompts of a training run's validations, where long ones are passed over
        return PromptSource(environment, renderer, "validation", seed, limit).next(benchmark.num_prompts), []
    tasks = environment.tasks("validation")
    numbers = range(len(tasks))
    if 0 < benchmark.num_prompts < len(tasks):
        numbers = sorted(random.Random(f"{seed}:{benchmark.name}").sample(numbers, benchmark.num_prompts))
    chosen = [tasks[number] for number in numbers]
    prompts = [Prompt(task.task_id, task, renderer.prompt_ids(task.messages, task.tools)) for task in chosen]
    short = [prompt for prompt in prompts if len(prompt.token_ids) <= limit]
    long = [prompt for prompt in prompts if len(prompt.token_ids) > limit]
    if long:
        say(
            f"{benchmark.name}: {len(long)} of {len(prompts)} prompts are longer than rollout.max_prompt_tokens={limit}"
            f" (up to {max(len(prompt.token_ids) for prompt in long)}); they count as wrong"
        )
    return short, long


def _plan(name: str, config: Config) -> Benchmark:
    settings, validation = config.eval, config.validation
    if name == VALIDATION:
        rollout = _sampled(config, settings.temperature or validation.temperature)
        samples, prompts = settings.samples or validation.samples, settings.prompts or validation.prompts
        return Benchmark(name, _with_examples(config.env, config), rollout, samples, prompts, "")
    rollout = _sampled(config, settings.temperature or config.rollout.temperature)
    if name == BFCL:
        env = _environment("bfcl", config, {})
        return Benchmark(name, env, rollout, settings.samples or BFCL_SAMPLES, settings.prompts, "")
    path = _file(name, Path(settings.data))
    kinds = {problem.kind for problem in read_problems(str(path), "eval.benchmarks", KINDS)}
    if len({_ENVIRONMENTS[kind] for kind in kinds}) != 1:
        raise UserError(
            f"expected problems of one environment in '{path}', found the kinds {', '.join(sorted(kinds)) or 'none'}"
        )
    env = _environment(_ENVIRONMENTS[kinds.pop()], config, {"validation": str(path)})
    label = name if name in SOURCES else path.stem if path.stem != "eval" else path.parent.name
    samples = SOURCES[name].samples if name in SOURCES else 1
    content = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    return Benchmark(label, env, rollout, settings.samples or samples, settings.prompts, content)


def _file(name: str, data: Path) -> Path:
    """A prepared data set, or a path. Raises UserError that names the nearest data set, or how to prepare it."""
    prepared = data / name / "eval.jsonl"
    if prepared.is_file():
        return prepared
    if Path(name).is_file():
        return Path(name)
    if name in SOURCES and "eval" not in SOURCES[name].splits:
        raise UserError(f"expected an evaluation set in eval.benchmarks, found '{name}', which has none")
    if name in SOURCES:
        raise UserError(
            f"expected the prepared data set '{name}' at '{prepared}', found none: python tools/prepare_data.py --out "
            f"{data} --split eval {name}, or set eval.data"
        )
    known = [VALIDATION, BFCL, *SOURCES, *(path.parent.name for path in data.glob("*/eval.jsonl"))]
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    raise UserError(
        f"unknown benchmark '{name}': did you mean '{nearest[0]}'? Known: {', '.join(dict.fromkeys(known))}, and paths "
        "of problem files"
    )


def _sampled(config: Config, temperature: float) -> RolloutConfig:
    return replace(config.rollout, temperature=temperature, top_p=config.eval.top_p or config.rollout.top_p)


def _environment(name: str, config: Config, own: Mapping[str, Any]) -> EnvConfig:
    """The environment ``name`` with the run's own settings if it is the run's, without training data."""
    params = {}
    if config.env.name == name:
        params = {key: value for key, value in config.env.params.items() if key not in ("train", "validation")}
    elif name == "retrieval":
        raise UserError(
            f"expected env.name=retrieval with an index to evaluate on questions, found env.name={config.env.name}: "
            "use a configuration like configs/hotpotqa.yaml"
        )
    base = config.env if config.env.name == name else EnvConfig(name)
    own_tasks = replace(base, name=name, params={**params, **own}, urls=())  # servers have the run's
    return _with_examples(own_tasks, config)


def _with_examples(env: EnvConfig, config: Config) -> EnvConfig:
    if config.eval.scaffold == "chat":
        return env
    return replace(env, params={**_EXAMPLES.get(env.name, {}), **env.params})


def describe(benchmarks: Sequence[Benchmark]) -> str:
    """For the log."""
    return ", ".join(f"{benchmark.name} (k={benchmark.samples})" for benchmark in benchmarks)
