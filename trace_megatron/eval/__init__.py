"""`trace-megatron eval`: avg@k of any checkpoint on any benchmark, with the run's own rollouts and verifiers.

checkpoint -> HF folder -> engine -> per benchmark: environment, prompts, k samples each -> records -> table
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from trace_megatron.checks import check_engine
from trace_megatron.config import Config
from trace_megatron.errors import RolloutError, UserError
from trace_megatron.eval.benchmarks import Benchmark, describe, open_environment, plan_benchmarks, prompts_of
from trace_megatron.eval.checkpoints import digest, find_checkpoint, to_hf_folder
from trace_megatron.eval.records import Record, RecordFile
from trace_megatron.eval.table import Summary, summarize
from trace_megatron.event_loop import EventLoop
from trace_megatron.log import progress, say
from trace_megatron.rollout.chat import ChatRenderer
from trace_megatron.rollout.engine import RolloutEngine
from trace_megatron.rollout.env import Environment
from trace_megatron.rollout.episode import EpisodeRunner
from trace_megatron.rollout.react import ReActEngine, ReActRenderer
from trace_megatron.sampling import max_model_len, open_engine
from trace_megatron.types import Prompt, Rollout, RolloutStatus

OPEN_EPISODES = 2
"""Episodes in play for each sequence that the engine runs at once: some wait for their environment."""

Renderer = ChatRenderer | ReActRenderer


def evaluate_policy(config: Config) -> list[Summary]:
    """Play what is missing of every benchmark; the same call goes on after an interruption.

    Raises UserError on bad input, before anything is started; RolloutError where too many rollouts fail.
    """
    if config.engine.urls:
        raise UserError(
            "expected evaluation without engine.urls, found some: servers hold weights of their own, not the "
            "checkpoint's; leave engine.urls empty, and set engine.num_engines for several"
        )
    benchmarks = plan_benchmarks(config)
    checkpoint = find_checkpoint(config)
    config = _with_model(config, str(checkpoint.like or checkpoint.folder))
    check_engine(config)
    environments = [open_environment(benchmark) for benchmark in benchmarks]
    folder = to_hf_folder(checkpoint)
    config = _with_model(config, str(folder))
    renderer = (ChatRenderer if config.eval.scaffold == "chat" else ReActRenderer).from_folder(folder)
    weights = digest(folder)
    say(f"{folder}: {describe(benchmarks)}; records in {checkpoint.home}")
    with ExitStack() as stack:
        loop = stack.enter_context(EventLoop())
        for environment in environments:
            stack.callback(lambda environment=environment: loop.run(environment.close()))
        works = []
        for benchmark, environment in zip(benchmarks, environments, strict=True):
            records = RecordFile(checkpoint.home / benchmark.name, _settings(config, benchmark, weights))
            stack.callback(records.close)
            short, long = prompts_of(benchmark, environment, renderer, config.run.seed)
            works.append(_Work(benchmark, environment, records, short, long))
        if any(work.missing() for work in works):
            engine: RolloutEngine = stack.enter_context(open_engine(config, loop))
            if isinstance(renderer, ReActRenderer):
                engine = ReActEngine(engine, renderer)
            for work in works:
                loop.run(_play(work, engine, renderer, config))
        summaries = [work.finish() for work in works]
    return summaries


@dataclass(frozen=True, slots=True)
class _Work:
    """A benchmark with all it needs but the engine."""

    benchmark: Benchmark
    environment: Environment
    records: RecordFile
    short: Sequence[Prompt]
    long: Sequence[Prompt]
    """Too long to be asked."""

    def missing(self) -> list[tuple[Prompt, int]]:
        """Samples that are not on record."""
        places = ((prompt, k) for prompt in self.short for k in range(self.benchmark.samples))
        return [(prompt, k) for prompt, k in places if (prompt.prompt_id, k) not in self.records]

    def finish(self) -> Summary:
        for prompt in self.long:
            for k in range(self.benchmark.samples):
                if (prompt.prompt_id, k) not in self.records:
                    self.records.add(_too_long(prompt, k))
        order = [(prompt.prompt_id, k) for prompt in (*self.short, *self.long) for k in range(self.benchmark.samples)]
        summary = summarize(self.benchmark.name, self.records.records(order), self.benchmark.samples)
        self.records.finish(order, asdict(summary))
        return summary


async def _play(work: _Work, engine: RolloutEngine, renderer: Renderer, config: Config) -> None:
    """Play the missing samples, each written as it ends; a sample's seed depends on its prompt and number alone."""
    settings, missing = work.benchmark.rollout, work.missing()
    runner = EpisodeRunner(engine, work.environment, renderer, settings, config.run.seed, max_model_len(config))
    turns = asyncio.Semaphore(OPEN_EPISODES * config.engine.max_num_seqs)
    total = len(work.short) * work.benchmark.samples
    done, failures = total - len(missing), []
    with progress(work.benchmark.name) as report:

        async def play(prompt: Prompt, k: int) -> None:
            nonlocal done
            async with turns:
                rollout = (await runner.play(prompt, step=0, k=k)).rollout
            work.records.add(_record(prompt, k, rollout, renderer))
            done += 1
            report.update(done, total)
            if rollout.status.failed:
                failures.append(f"{rollout.status}: {rollout.info.get('error')}")
                if len(failures) > settings.max_failed_share * total:
                    raise RolloutError(
                        f"{len(failures)} of {total} samples of {work.benchmark.name} failed, more than rollout."
                        f"max_failed_share={settings.max_failed_share:g} allows; the first: {failures[0]}"
                    )

        try:
            async with asyncio.TaskGroup() as group:
                for prompt, k in missing:
                    group.create_task(play(prompt, k))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None


def _record(prompt: Prompt, k: int, rollout: Rollout, renderer: Renderer) -> Record:
    ids = [token_id for turn in rollout.turns for token_id in (*turn.action_ids, *turn.observation_ids)]
    answer = rollout.info.get("answer")
    return Record(
        prompt_id=prompt.prompt_id,
        sample=k,
        reward=rollout.reward,
        status=rollout.status,
        turns=len(rollout.turns),
        action_tokens=sum(len(turn.action_ids) for turn in rollout.turns),
        observation_tokens=sum(len(turn.observation_ids) for turn in rollout.turns),
        answer=None if answer is None else str(answer),
        text=renderer.text(ids),
        info=dict(rollout.info),
    )


def _too_long(prompt: Prompt, k: int) -> Record:
    error = f"the prompt has {len(prompt.token_ids)} tokens"
    return Record(prompt.prompt_id, k, 0.0, RolloutStatus.TRUNCATED, 0, 0, 0, None, "", {"error": error})


def _with_model(config: Config, folder: str) -> Config:
    return replace(config, policy=replace(config.policy, model=folder))


def _settings(config: Config, benchmark: Benchmark, weights: str) -> dict[str, Any]:
    """What the records depend on; a difference is refused."""
    rollout = asdict(benchmark.rollout)
    del rollout["max_failed_share"]
    params = dict(sorted(benchmark.env.params.items()))
    if benchmark.data:  # where the file lies does not matter
        del params["validation"]
    return {
        "samples (k)": benchmark.samples,
        "prompts": benchmark.num_prompts,
        "problems": benchmark.data,
        "weights": weights,
        "scaffold": config.eval.scaffold,
        "seed": config.run.seed,
        "environment": benchmark.env.name,
        **{f"env.params.{name}": value for name, value in params.items()},
        **{f"rollout.{name}": value for name, value in rollout.items()},
        "engine.dtype": config.engine.dtype,
        "engine.tensor_parallel": config.engine.tensor_parallel,
        "max_model_len": max_model_len(config),
    }
