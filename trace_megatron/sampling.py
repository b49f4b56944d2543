"""The sampling side of a run: engine, environment, renderer; what training and evaluation share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from trace_megatron.config import Config
from trace_megatron.envs import build_environment
from trace_megatron.event_loop import EventLoop
from trace_megatron.log import say
from trace_megatron.rollout.chat import ChatRenderer
from trace_megatron.rollout.collector import evaluate
from trace_megatron.rollout.engine import Engine
from trace_megatron.rollout.env import Environment
from trace_megatron.rollout.pool import EnginePool
from trace_megatron.rollout.prompts import PromptSource
from trace_megatron.rollout.served_engine import ServedEngine
from trace_megatron.rollout.vllm_engine import VLLMEngine
from trace_megatron.validate import Accuracy, measure_accuracy
from trace_megatron.weight_sync.bucket_server import check_address


@dataclass(frozen=True, slots=True)
class Sampling:
    """A running engine with what its episodes need."""

    config: Config
    engine: EnginePool
    environment: Environment
    renderer: ChatRenderer

    def prompts(self, split: str) -> PromptSource:
        """A source that stands at the split's beginning."""
        limit = self.config.rollout.max_prompt_tokens
        return PromptSource(self.environment, self.renderer, split, self.config.run.seed, limit)

    async def validate(self, progress: Callable[[int, int], None] | None = None) -> Accuracy:
        """Accuracy on the first ``validation.prompts`` held-out prompts: the same ones and seeds each time."""
        settings = self.config.validation
        rollouts = await evaluate(
            self.engine,
            self.environment,
            self.renderer,
            replace(self.config.rollout, temperature=settings.temperature),
            self.prompts("validation").next(settings.prompts),
            settings.samples,
            run_seed=self.config.run.seed,
            step=0,
            max_model_len=max_model_len(self.config),
            progress=progress,
        )
        return measure_accuracy(rollouts)


@contextmanager
def open_sampling(config: Config, loop: EventLoop) -> Iterator[Sampling]:
    """Start the engine on ``loop``, and close it whatever happens."""
    if config.sync.address:
        check_address(config.sync.address)  # before an engine's minutes
    environment = build_environment(config.env)
    renderer = ChatRenderer.from_folder(config.policy.model)
    try:
        with open_engine(config, loop) as engine:
            yield Sampling(config, engine, environment, renderer)
    finally:
        loop.run(environment.close())


@contextmanager
def open_engine(config: Config, loop: EventLoop) -> Iterator[EnginePool]:
    """The engines of ``open_sampling`` alone."""
    engine = EnginePool(_engines(config), config.engine.timeout_s)
    try:
        start_s = time.perf_counter()
        loop.run(engine.start())
        say(f"{_counted(len(engine))} up in {time.perf_counter() - start_s:.0f} s")
        yield engine
    finally:
        loop.run(engine.close())


def _engines(config: Config) -> list[Engine]:
    if config.engine.urls:
        return [ServedEngine(url, config.engine, max_model_len(config)) for url in config.engine.urls]
    size = config.engine.tensor_parallel
    devices = [tuple(range(index * size, (index + 1) * size)) for index in range(config.engine.num_engines)]
    return [
        VLLMEngine(
            config.policy.model,
            config.engine,
            max_model_len=max_model_len(config),
            seed=config.run.seed,
            devices=devices[index] if len(devices) > 1 else (),
        )
        for index in range(len(devices))
    ]


def _counted(num_engines: int) -> str:
    return "engine" if num_engines == 1 else f"{num_engines} engines"


def max_model_len(config: Config) -> int:
    """Tokens that the engine must be able to hold for one sequence."""
    return config.engine.max_model_len or config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
