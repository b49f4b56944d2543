"""The pool on scripted engines: where requests go, and what happens to those whose engine dies."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import pytest

from trace_megatron.errors import UserError
from trace_megatron.rollout.engine import Completion, EngineError, SamplingSettings
from trace_megatron.rollout.pool import EnginePool

SETTINGS = SamplingSettings(1.0, 1.0, 10, ())


@dataclass
class FakeEngine:
    """Answers when ``gate`` opens, or raises ``error``; ``die`` fails what waits for it, as a dead process does."""

    name: int
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    error: str = ""
    start_error: str = ""
    seen: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    num_starts: int = 0
    num_closes: int = 0
    reason: str | None = "not started"
    blocked: str | None = None

    @property
    def alive(self):
        return self.reason is None

    @property
    def serving(self):
        return self.alive and self.blocked is None

    async def start(self):
        if self.start_error:
            raise EngineError(self.start_error)
        self.num_starts += 1
        self.reason = None
        self.ended = asyncio.Event()

    async def generate(self, token_ids, settings, seed, affinity=""):
        if not self.serving:
            raise EngineError(self.reason or self.blocked)
        self.seen.append((tuple(token_ids), seed))
        if self.error:
            raise EngineError(self.error)
        waits = [asyncio.create_task(event.wait()) for event in (self.gate, self.ended)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not self.alive:
            raise EngineError(self.reason)
        return Completion((seed,), (-1.0,), True, self.name)

    def block(self, reason):
        self.blocked = reason

    def unblock(self, weight_version):
        self.blocked = None

    def give_up(self, reason):
        self.reason = reason
        self.ended.set()

    async def close(self):
        self.num_closes += 1
        if self.alive:
            self.give_up("closed")


def run(test, num_engines=2, timeout_s=5.0):
    async def main():
        engines = [FakeEngine(name) for name in range(num_engines)]
        pool = EnginePool(engines, timeout_s)
        await pool.start()
        await asyncio.wait_for(test(pool, engines), 20)
        await pool.close()
        await asyncio.sleep(0)  # what was cancelled ends; Python 3.12's wait_for gives it no turn of its own
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


async def ask(pool, seed, affinity="", num_tokens=1):
    return await pool.generate([0] * num_tokens, SETTINGS, seed, affinity)


def open_requests(pool, affinities, num_tokens=1):
    return [asyncio.create_task(ask(pool, seed, name, num_tokens)) for seed, name in enumerate(affinities)]


def test_a_tree_stays_on_one_engine_and_trees_are_spread_by_open_tokens():
    async def test(pool, engines):
        big = open_requests(pool, ["big"], num_tokens=100)
        await asyncio.sleep(0)
        small = open_requests(pool, ["a", "b", "c", "a", "big", "b"])
        await asyncio.sleep(0)
        assert len(engines[0].seen) == 2  # the big one's two: three small ones have fewer tokens than the first alone
        assert len(engines[1].seen) == 5
        for engine in engines:
            engine.gate.set()
        homes = [(await request).weight_version for request in big + small]
        assert homes == [0, 1, 1, 1, 1, 0, 1]
        # Idle again, both take part; what has a home goes home.
        assert [(await request).weight_version for request in open_requests(pool, ["a", "big", "d"])] == [1, 0, 0]

    run(test)


def test_requests_of_a_dead_engine_move_and_each_is_answered_once():
    async def test(pool, engines):
        requests = open_requests(pool, [f"tree {index % 6}" for index in range(24)])
        await asyncio.sleep(0.01)
        lost = list(engines[0].seen)
        assert 0 < len(lost) < 24
        engines[0].give_up("killed")
        engines[1].gate.set()
        answers = [await request for request in requests]
        assert [answer.token_ids for answer in answers] == [(seed,) for seed in range(24)]
        assert {answer.weight_version for answer in answers} == {1}
        assert Counter(engines[1].seen) == Counter((tuple([0]), seed) for seed in range(24))
        assert pool.counts() == {"alive": 1, "deaths": 1, "moved_requests": len(lost)}

    run(test)


def test_an_engine_that_does_not_answer_is_taken_for_dead():
    async def test(pool, engines):
        engines[1].gate.set()
        answers = [await request for request in open_requests(pool, "ab")]
        assert {answer.weight_version for answer in answers} == {1}
        assert pool.counts()["deaths"] == 1 and not engines[0].alive

    run(test, timeout_s=0.05)


def test_an_error_of_a_living_engine_is_the_requests_own():
    async def test(pool, engines):
        for engine in engines:
            engine.error = "the prompt is too long"
        with pytest.raises(EngineError, match="too long"):
            await ask(pool, 0)
        assert sum(len(engine.seen) for engine in engines) == 1
        assert pool.counts() == {"alive": 2, "deaths": 0, "moved_requests": 0}

    run(test)


def test_a_request_that_kills_engines_does_not_kill_them_all():
    async def test(pool, engines):
        async def kill():
            while True:
                await asyncio.sleep(0)
                for engine in engines:
                    if any(seed == 13 for _, seed in engine.seen) and engine.alive:
                        engine.give_up("it was request 13")

        killer = asyncio.create_task(kill())
        with pytest.raises(EngineError, match="request 13"):
            await ask(pool, 13)
        killer.cancel()
        await asyncio.gather(killer, return_exceptions=True)
        assert len(pool) == 2

    run(test, num_engines=4)


def test_with_no_engine_left_requests_fail_and_healing_brings_them_back():
    async def test(pool, engines):
        for engine in engines:
            engine.give_up("killed")
        with pytest.raises(EngineError, match="killed"):
            await ask(pool, 0)
        assert len(pool) == 0
        engines[1].start_error = "no memory"
        await pool.heal()
        assert list(pool) == [engines[0]]
        with pytest.raises(EngineError, match="weights"):  # it read old ones from disk
            await ask(pool, 1)
        engines[0].unblock(1)
        engines[0].gate.set()
        assert (await ask(pool, 2)).token_ids == (2,)
        engines[1].start_error = ""
        await pool.heal()
        assert list(pool) == engines
        assert [engine.num_starts for engine in engines] == [2, 2]
        assert (await ask(pool, 3)).weight_version == 0  # the other still waits for weights

    run(test)


def test_a_request_that_is_cancelled_leaves_no_load():
    async def test(pool, engines):
        (request,) = open_requests(pool, ["a"], num_tokens=1000)
        await asyncio.sleep(0.01)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        open_requests(pool, ["b"])
        await asyncio.sleep(0.01)
        assert [len(engine.seen) for engine in engines] == [2, 0]
        for engine in engines:
            engine.gate.set()
        await asyncio.sleep(0.01)

    run(test)


def test_a_pool_of_none_is_refused():
    with pytest.raises(UserError, match="at least one engine"):
        EnginePool([], 1.0)
