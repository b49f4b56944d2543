"""Several engines as one: a prompt's tree stays on one of them, and a dead one's requests move to the others."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trace_megatron.errors import UserError
from trace_megatron.log import say
from trace_megatron.rollout.engine import Completion, Engine, EngineError, SamplingSettings

MAX_DEATHS = 2
"""Engines that one request may see die: it could be what kills them."""
MAX_HOMES = 2**16
"""Affinities remembered."""


@dataclass(slots=True)
class _Place:
    engine: Engine
    num_tokens: int = 0
    """Of its open requests, those that may still be sampled included."""
    last_death: int = 0
    """Number of the start that ended in the last death seen."""


class EnginePool:
    """A RolloutEngine over ``engines``, which it starts, closes, and starts again when one has died.

    A request whose engine dies, or does not answer within ``timeout_s``, is sent to another one: with the same seed and
    weights it samples the same tokens, and the caller sees one completion. A dead engine is started again by ``heal``
    and serves from the next weight push on. With no engine left requests raise EngineError.
    """

    def __init__(self, engines: Sequence[Engine], timeout_s: float) -> None:
        if not engines:
            raise UserError("expected at least one engine, found none")
        self._places = [_Place(engine) for engine in engines]
        self._timeout_s = timeout_s
        self._homes: OrderedDict[str, _Place] = OrderedDict()
        self.num_moved = 0
        """Requests that were sent again because their engine died."""
        self.num_deaths = 0

    def __iter__(self) -> Iterator[Engine]:
        """The engines that are alive."""
        return iter([place.engine for place in self._places if place.engine.alive])

    def __len__(self) -> int:
        return sum(place.engine.alive for place in self._places)

    @property
    def num_engines(self) -> int:
        """Dead ones included."""
        return len(self._places)

    async def start(self) -> None:
        """Start all of them; raises UserError or EngineError."""
        for place in self._places:  # one after the other: a start changes this process's environment for its children
            await place.engine.start()

    async def heal(self) -> None:
        """Start the dead ones again. They serve when a push has succeeded; one that does not start stays out."""
        for index, place in enumerate(self._places):
            if place.engine.alive:
                continue
            await place.engine.close()
            try:
                await place.engine.start()
            except EngineError as error:
                say(f"engine {index} does not start again: {error}")
                continue
            place.engine.block("it was started again, and waits for the trainer's weights")
            say(f"engine {index} was started again")

    async def generate(
        self, token_ids: Sequence[int], settings: SamplingSettings, seed: int, affinity: str = ""
    ) -> Completion:
        """Sample one completion of ``token_ids``; raises EngineError."""
        num_deaths = 0
        while True:
            place = self._place(affinity)
            try:
                return await self._generate(place, token_ids, settings, seed)
            except EngineError as error:
                if place.engine.alive:
                    raise
                self._count_death(place, error)
                num_deaths += 1
                if num_deaths == MAX_DEATHS or not any(other.engine.serving for other in self._places):
                    raise
                self.num_moved += 1

    async def _generate(
        self, place: _Place, token_ids: Sequence[int], settings: SamplingSettings, seed: int
    ) -> Completion:
        num_tokens = len(token_ids) + settings.max_new_tokens
        place.num_tokens += num_tokens
        try:
            async with asyncio.timeout(self._timeout_s):
                return await place.engine.generate(token_ids, settings, seed)
        except TimeoutError:
            place.engine.give_up(f"no answer to a request within {self._timeout_s:g} s")
            raise EngineError(f"expected an answer within engine.timeout_s={self._timeout_s:g}, found none") from None
        finally:
            place.num_tokens -= num_tokens

    def _place(self, affinity: str) -> _Place:
        home = self._homes.get(affinity)
        if home is None or not home.engine.serving:
            serving = [place for place in self._places if place.engine.serving]
            # With none of them: any one, whose own words say why.
            home = min(serving or self._places, key=lambda place: place.num_tokens)
        if affinity:
            self._homes[affinity] = home
            self._homes.move_to_end(affinity)
            if len(self._homes) > MAX_HOMES:
                self._homes.popitem(last=False)
        return home

    def _count_death(self, place: _Place, error: EngineError) -> None:
        """Once, though each of the engine's requests reports it."""
        if place.last_death == place.engine.num_starts:
            return
        place.last_death = place.engine.num_starts
        self.num_deaths += 1
        say(f"engine {self._places.index(place)} of {len(self._places)} died: {error}")

    def counts(self) -> dict[str, float]:
        """For the metrics: engines alive now; deaths and moved requests of the whole run."""
        return {"alive": len(self), "deaths": self.num_deaths, "moved_requests": self.num_moved}

    async def close(self) -> None:
        """Close all of them. Safe to call twice."""
        for place in self._places:
            await place.engine.close()
