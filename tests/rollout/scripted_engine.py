"""An engine and an environment without a model: every sampled token follows from the history and the seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from tiny_models import build_tokenizer

from trace_megatron.rollout.chat import ChatRenderer
from trace_megatron.rollout.engine import Completion, EngineError, SamplingSettings
from trace_megatron.rollout.env import Transition
from trace_megatron.types import Prompt, Task

WIN = "win"
TOKENIZER = build_tokenizer()


@dataclass(frozen=True)
class Call:
    """One request as the engine received it."""

    token_ids: tuple[int, ...]
    settings: SamplingSettings
    seed: int


def random_action(call: Call) -> str:
    """A short word; every third or so wins."""
    rng = random.Random(f"{call.token_ids}:{call.seed}")
    return WIN if rng.random() < 0.3 else "".join(rng.choices("abcdef", k=rng.randint(1, 6)))


@dataclass
class ScriptedEngine:
    """``action`` gives the text of a call; ``before`` may wait or raise, given the call's number and the call."""

    action: Callable[[Call], str] = random_action
    before: Callable[[int, Call], Awaitable[None]] | None = None
    calls: list[Call] = field(default_factory=list)
    num_running: int = 0
    version: int = 7
    """Of the weights; a request keeps that of its start."""

    async def generate(
        self, token_ids: Sequence[int], settings: SamplingSettings, seed: int, affinity: str = ""
    ) -> Completion:
        call, version = Call(tuple(token_ids), settings, seed), self.version
        self.calls.append(call)
        number = len(self.calls) - 1
        self.num_running += 1
        try:
            await asyncio.sleep(0)
            if self.before:
                await self.before(number, call)
        finally:
            self.num_running -= 1
        ids = [*TOKENIZER.encode(self.action(call)), settings.stop_token_ids[0]][: settings.max_new_tokens]
        rng = random.Random(f"logprobs:{call.token_ids}:{seed}")
        logprobs = tuple(-rng.random() for _ in ids)
        return Completion(tuple(ids), logprobs, ids[-1] in settings.stop_token_ids, version)


async def dead(number: int, call: Call) -> None:
    raise EngineError("the engine process has ended")


@dataclass
class WordGame:
    """Say "win" to win. The state is the words said so far; ``before`` may wait or raise."""

    words: Sequence[str] = ("one", "two", "three", "four", "five", "six")
    before: Callable[[tuple[str, ...]], Awaitable[None]] | None = None

    def tasks(self, split: str) -> list[Task]:
        return [Task(word, ({"role": "user", "content": f"Task {word}"},), {}) for word in self.words]

    async def reset(self, task: Task) -> tuple[str, ...]:
        return ()

    async def step(self, state: tuple[str, ...], action: str) -> Transition:
        if self.before:
            await self.before((*state, action))
        won = action == WIN
        said = (*state, action)
        observation = () if won else ({"role": "user", "content": f"{len(said)}: {' '.join(said)} is wrong"},)
        return Transition(said, observation, 1.0 if won else len(said) / 100, won, {"words": len(said)})

    async def close(self) -> None:
        pass


def build_renderer() -> ChatRenderer:
    return ChatRenderer(TOKENIZER)


def build_prompts(renderer: ChatRenderer, game: WordGame) -> list[Prompt]:
    return [Prompt(task.task_id, task, renderer.prompt_ids(task.messages)) for task in game.tasks("train")]
