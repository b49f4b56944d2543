"""A step's rollouts on a fleet of engines, event by event: how long it takes, and how much of the fleet idles.

An engine decodes its running requests together: with b of them an iteration, one token for each, takes
``base_ms + b * per_request_ms``. A turn waits for a free slot, prefills what of its history the engine does not have,
decodes, and leaves the slot while the environment answers. Bare rollouts come first, then a prompt's continuations:
when all bare rollouts of that prompt are done, or behind a batch barrier when all of the step are.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines, all alike."""

    num_engines: int
    num_slots: int = 128
    """Requests that one decodes together."""
    base_ms: float = 12.0
    """Of an iteration: reading the weights."""
    per_request_ms: float = 0.1
    prefill_tokens: float = 40.0
    """Prompt tokens that cost an engine as much as one decoded token of one request."""

    def token_ms(self, num_running: int) -> float:
        """Of one token of each running request."""
        return self.base_ms + num_running * self.per_request_ms


@dataclass(frozen=True, slots=True)
class Workload:
    """A step. Turn lengths are drawn for every rollout on its own, all else is fixed."""

    bare: Sequence[Sequence[Sequence[int]]]
    """[prompts][bare rollouts][turns] tokens."""
    continuations: Sequence[Sequence[Sequence[int]]]
    """[prompts][continuations][turns] tokens, those after the prefix."""
    prompt_tokens: int = 500
    observation_tokens: int = 300
    tool_ms: float = 500.0
    """From a turn's end to its observation."""

    @property
    def num_tokens(self) -> int:
        return sum(tokens for groups in (self.bare, self.continuations) for p in groups for r in p for tokens in r)


@dataclass(frozen=True, slots=True)
class FleetResult:
    seconds: float
    """From the first request to the end of the last rollout."""
    lower_bound_s: float
    """No schedule is faster: the tokens at full speed on all engines, or the longest rollout alone."""
    idle_share: float
    """Of the engines' time in which none of their slots was in use."""
    empty_share: float
    """Of slots x time without a running request."""
    prefilled_tokens: float


def simulate_fleet(work: Workload, fleet: Fleet, *, barrier: bool, affinity: bool) -> FleetResult:
    """Play the step. ``affinity``: a prompt's requests all go to the engine of its first, as the pool does it;
    otherwise each goes to the engine with the fewest running and waiting requests, which holds no history."""
    return _Run(work, fleet, barrier, affinity).play()


def draw_workload(
    num_prompts: int,
    rollouts: int,
    continuations: int,
    max_turns: int,
    stop_prob: float,
    mean_tokens: float,
    sigma: float,
    rng: np.random.Generator,
) -> Workload:
    """``rollouts`` bare and as many times ``continuations`` continued rollouts a prompt; turns geometric, tokens of a
    turn lognormal with the stated mean and ``sigma``: 1.0 makes a long tail."""

    def turns(most: int) -> list[int]:
        count = min(int(rng.geometric(stop_prob)), max(most, 1))
        return np.maximum(rng.lognormal(np.log(mean_tokens) - sigma**2 / 2, sigma, count), 1).astype(int).tolist()

    def prompt(count: int, most: int) -> list[list[int]]:
        return [turns(most) for _ in range(count)]

    return Workload(
        bare=[prompt(rollouts, max_turns) for _ in range(num_prompts)],
        continuations=[prompt(rollouts * continuations, max_turns // 2) for _ in range(num_prompts)],
    )


@dataclass(slots=True)
class _Turn:
    prompt: int
    rollout: Sequence[int]
    """Tokens of its turns."""
    index: int
    history: int
    """Tokens before this turn."""
    cached: int
    """Of those, what the last engine has."""
    is_bare: bool
    last_engine: int = -1


@dataclass(slots=True)
class _Engine:
    """Processor sharing: ``clock`` counts tokens decoded by each request that runs all along."""

    clock: float = 0.0
    updated_ms: float = 0.0
    running: list[tuple[float, int, _Turn]] = field(default_factory=list)
    waiting: deque[_Turn] = field(default_factory=deque)
    busy_ms: float = 0.0
    slot_ms: float = 0.0
    epoch: int = 0
    """Of its next finish in the event queue; older entries are void."""


class _Run:
    def __init__(self, work: Workload, fleet: Fleet, barrier: bool, affinity: bool):
        self._work, self._fleet, self._barrier, self._affinity = work, fleet, barrier, affinity
        self._engines = [_Engine() for _ in range(fleet.num_engines)]
        self._homes: dict[int, int] = {}
        self._open_bare = [len(rollouts) for rollouts in work.bare]
        self._events: list[tuple[float, int, int, int, _Turn | None]] = []
        self._loads = np.zeros(fleet.num_engines, dtype=np.int64)
        self._number = 0
        self._prefilled = 0.0
        self._now_ms = 0.0

    def play(self) -> FleetResult:
        for prompt, rollouts in enumerate(self._work.bare):
            for rollout in rollouts:
                self._submit(_Turn(prompt, rollout, 0, self._work.prompt_tokens, 0, True))
        while self._events:
            self._now_ms, _, engine, epoch, turn = heapq.heappop(self._events)
            if turn is not None:
                self._submit(turn)
            elif self._engines[engine].epoch == epoch:
                self._finish(engine)
        return self._result()

    def _submit(self, turn: _Turn) -> None:
        index = self._choose(turn.prompt)
        if turn.last_engine != index and not (self._affinity and turn.last_engine < 0):
            turn.cached = 0  # another engine's; a continuation at home finds its prefix there
        turn.last_engine = index
        self._engines[index].waiting.append(turn)
        self._advance(index)
        self._admit(index)

    def _choose(self, prompt: int) -> int:
        if self._affinity and prompt in self._homes:
            return self._homes[prompt]
        index = int(self._loads.argmin())
        self._homes[prompt] = index
        return index

    def _advance(self, index: int) -> None:
        engine = self._engines[index]
        elapsed, count = self._now_ms - engine.updated_ms, len(engine.running)
        if count:
            engine.clock += elapsed / self._fleet.token_ms(count)
            engine.busy_ms += elapsed
            engine.slot_ms += elapsed * count
        engine.updated_ms = self._now_ms

    def _admit(self, index: int) -> None:
        engine = self._engines[index]
        while engine.waiting and len(engine.running) < self._fleet.num_slots:
            turn = engine.waiting.popleft()
            missing = turn.history - turn.cached
            self._prefilled += missing
            work = turn.rollout[turn.index] + missing / self._fleet.prefill_tokens
            self._number += 1
            heapq.heappush(engine.running, (engine.clock + work, self._number, turn))
        self._loads[index] = len(engine.running) + len(engine.waiting)
        engine.epoch += 1
        if engine.running:
            left = max(engine.running[0][0] - engine.clock, 0.0)
            at_ms = self._now_ms + left * self._fleet.token_ms(len(engine.running))
            self._push(at_ms, index, engine.epoch, None)

    def _finish(self, index: int) -> None:
        self._advance(index)
        _, _, turn = heapq.heappop(self._engines[index].running)
        turn.history += turn.rollout[turn.index]
        turn.cached = turn.history
        turn.index += 1
        if turn.index < len(turn.rollout):
            turn.history += self._work.observation_tokens
            self._push(self._now_ms + self._work.tool_ms, 0, 0, turn)
        elif turn.is_bare:
            self._open_bare[turn.prompt] -= 1
            self._continue(turn.prompt)
        self._admit(index)

    def _continue(self, prompt: int) -> None:
        """Start the continuations that nothing holds back any more."""
        if self._barrier:
            ready = range(len(self._work.bare)) if not any(self._open_bare) else ()
        else:
            ready = (prompt,) if not self._open_bare[prompt] else ()
        for tree in ready:
            prefix = self._work.prompt_tokens + self._work.observation_tokens
            for rollout in self._work.continuations[tree]:
                self._push(self._now_ms, 0, 0, _Turn(tree, rollout, 0, prefix, prefix, False))

    def _push(self, at_ms: float, engine: int, epoch: int, turn: _Turn | None) -> None:
        self._number += 1
        heapq.heappush(self._events, (at_ms, self._number, engine, epoch, turn))

    def _result(self) -> FleetResult:
        fleet, work = self._fleet, self._work
        for index in range(fleet.num_engines):
            self._advance(index)
        full_ms = work.num_tokens * fleet.token_ms(fleet.num_slots) / (fleet.num_slots * fleet.num_engines)
        chains = [
            max(map(self._alone_ms, bare), default=0.0) + max(map(self._alone_ms, continued), default=0.0)
            for bare, continued in zip(work.bare, work.continuations, strict=True)
        ]
        whole_ms = self._now_ms * fleet.num_engines
        return FleetResult(
            seconds=self._now_ms / 1e3,
            lower_bound_s=max(full_ms, max(chains, default=0.0)) / 1e3,
            idle_share=1.0 - sum(engine.busy_ms for engine in self._engines) / whole_ms,
            empty_share=1.0 - sum(engine.slot_ms for engine in self._engines) / (whole_ms * fleet.num_slots),
            prefilled_tokens=self._prefilled,
        )

    def _alone_ms(self, rollout: Sequence[int]) -> float:
        return sum(rollout) * self._fleet.token_ms(1) + (len(rollout) - 1) * self._work.tool_ms
