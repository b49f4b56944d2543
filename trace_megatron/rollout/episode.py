"""One episode, token in and token out, from the root or from any visited prefix of a tree."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from trace_megatron.config import RolloutConfig
from trace_megatron.errors import UserError
from trace_megatron.rollout.chat import ChatRenderer
from trace_megatron.rollout.engine import Completion, EngineError, RolloutEngine, SamplingSettings
from trace_megatron.rollout.env import Environment, Transition
from trace_megatron.rollout.seeds import request_seed
from trace_megatron.types import ROOT, Anchor, Prompt, Rollout, RolloutStatus, Turn

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Visit:
    """A visited history, with all that a continuation needs to start there.

    A chain, which shares its ids with the turns: whole histories of thousands of open episodes would need their memory
    once more for every turn.
    """

    before: Visit | None
    """The history one turn earlier; None at the prompt."""
    added_ids: tuple[tuple[int, ...], ...]
    """The prompt, or the last turn's action and observation."""
    num_tokens: int
    """Of the whole history."""
    env_state: Any
    """The environment's state after the history's last action."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt, then actions and observations."""
        chain: list[tuple[int, ...]] = []
        here: Visit | None = self
        while here:
            chain.extend(reversed(here.added_ids))
            here = here.before
        return tuple(itertools.chain.from_iterable(reversed(chain)))


@dataclass(frozen=True, slots=True)
class Episode:
    """A rollout with the histories that it visited."""

    rollout: Rollout
    visits: tuple[Visit, ...]
    """After each of the rollout's own turns but the last."""


class EpisodeRunner:
    """Plays episodes: the engine acts, the environment answers, until one of them or a limit ends it."""

    def __init__(
        self,
        engine: RolloutEngine,
        environment: Environment,
        renderer: ChatRenderer,
        config: RolloutConfig,
        run_seed: int,
        max_model_len: int = 0,
    ) -> None:
        """``max_model_len``: the engine's, 0 if it holds prompt and response limit."""
        if max_model_len and max_model_len <= config.max_prompt_tokens:
            raise UserError(
                f"expected engine.max_model_len above rollout.max_prompt_tokens={config.max_prompt_tokens}, "
                f"found {max_model_len}"
            )
        self._engine = engine
        self._environment = environment
        self._renderer = renderer
        self._config = config
        self._run_seed = run_seed
        self._max_model_len = max_model_len or math.inf

    async def play(
        self, prompt: Prompt, *, step: int, k: int, anchor: Anchor = ROOT, start: Visit | None = None
    ) -> Episode:
        """Sample the ``k``-th rollout of an anchor to its end; ``start`` is the anchor's visit, None at the root.

        Failures of engine and environment end as statuses.
        """
        run = _Run()
        try:
            here = start or await self._open(prompt)
            while here:
                seed = request_seed(self._run_seed, step, prompt.prompt_id, anchor, k, anchor.turn + len(run.turns))
                completion = await self._act(prompt, here, seed)
                run.turns.append(Turn(completion.token_ids, completion.logprobs, (), completion.weight_version))
                here = await self._observe(prompt, anchor, here, completion, run)
        except EngineError as error:
            run.fail(RolloutStatus.ENGINE_ERROR, error)
        except _EnvironmentFailure as error:
            run.fail(RolloutStatus.ENV_ERROR, error)
        return Episode(self._rollout(anchor, run), tuple(run.visits))

    async def _open(self, prompt: Prompt) -> Visit:
        state = await self._ask(self._environment.reset(prompt.task))
        return Visit(None, (prompt.token_ids,), len(prompt.token_ids), state)

    async def _act(self, prompt: Prompt, here: Visit, seed: int) -> Completion:
        config = self._config
        settings = SamplingSettings(
            config.temperature,
            config.top_p,
            min(config.max_new_tokens, self._room(prompt, here.num_tokens)),
            self._renderer.stop_token_ids,
        )
        completion = await self._engine.generate(here.token_ids, settings, seed, affinity=prompt.prompt_id)
        if not completion.token_ids or len(completion.token_ids) != len(completion.logprobs):
            raise EngineError(
                f"expected tokens with one logprob each, found {len(completion.token_ids)} tokens and "
                f"{len(completion.logprobs)} logprobs"
            )
        return completion

    async def _observe(
        self, prompt: Prompt, anchor: Anchor, here: Visit, completion: Completion, run: _Run
    ) -> Visit | None:
        """Let the environment answer the action; the history that is reached, None where the episode ended."""
        if not completion.stopped and self._config.truncated != "keep":
            run.status = RolloutStatus.TRUNCATED
            return None
        action = self._renderer.action_text(completion.token_ids)
        transition: Transition = await self._ask(self._environment.step(here.env_state, action))
        if not 0.0 <= transition.reward <= 1.0:  # NaN too
            raise _EnvironmentFailure(f"expected a reward in [0, 1], found {transition.reward}")
        run.reward, run.info = float(transition.reward), transition.info
        if not completion.stopped:
            run.status = RolloutStatus.TRUNCATED
        elif transition.done:
            run.status = RolloutStatus.FINISHED
        elif anchor.turn + len(run.turns) >= self._config.max_turns:
            run.status = RolloutStatus.TURN_LIMIT
        else:
            return self._grow(prompt, here, completion, transition, run)
        return None

    def _grow(
        self, prompt: Prompt, here: Visit, completion: Completion, transition: Transition, run: _Run
    ) -> Visit | None:
        """Append the observation to the history. One that leaves no room for an action is dropped."""
        observation_ids = self._renderer.observation_ids(
            transition.observation, completion.token_ids, prompt.task.messages, prompt.task.tools
        )
        num_tokens = here.num_tokens + len(completion.token_ids) + len(observation_ids)
        if self._room(prompt, num_tokens) < 1:
            run.status = RolloutStatus.TRUNCATED
            return None
        run.turns[-1] = dataclasses.replace(run.turns[-1], observation_ids=observation_ids)
        run.visits.append(Visit(here, (completion.token_ids, observation_ids), num_tokens, transition.state))
        return run.visits[-1]

    def _room(self, prompt: Prompt, num_tokens: int) -> int:
        """Tokens that may still follow a history of ``num_tokens``."""
        limit = min(len(prompt.token_ids) + self._config.max_response_tokens, self._max_model_len)
        return int(limit) - num_tokens

    async def _ask(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except Exception as error:  # whatever an environment raises is data: the rollout is counted as failed
            raise _EnvironmentFailure(f"{type(error).__name__}: {error}") from error

    def _rollout(self, anchor: Anchor, run: _Run) -> Rollout:
        cut = run.status == RolloutStatus.TRUNCATED
        masked = cut and self._config.truncated == "mask"
        lost = run.status.failed or (cut and self._config.truncated != "keep")
        return Rollout(
            anchor=anchor,
            turns=tuple(run.turns),
            reward=0.0 if lost else run.reward,
            status=run.status,
            trained=not (run.status.failed or masked),
            info=run.info,
        )


@dataclass(slots=True)
class _Run:
    """An episode while it is played."""

    turns: list[Turn] = dataclasses.field(default_factory=list)
    visits: list[Visit] = dataclasses.field(default_factory=list)
    reward: float = 0.0
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    status: RolloutStatus = RolloutStatus.FINISHED

    def fail(self, status: RolloutStatus, error: Exception) -> None:
        self.status = status
        self.info = {"error": " ".join(str(error).split()) or type(error).__name__}


class _EnvironmentFailure(Exception):
    """A call to the environment raised or gave nonsense."""
