"""Environments on servers: what a run gets is what the environment here would give it, and what goes wrong is said."""

from __future__ import annotations

import asyncio
import gc
import json
import urllib.request
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web
from env_clients import CONFIG, client, tasks_of

from trace_megatron.config import ENV_TOKEN, EnvConfig
from trace_megatron.envs import build_environment, connection, remote, server
from trace_megatron.envs.connection import EnvironmentServerError, ServerLost
from trace_megatron.envs.limits import LimitedEnvironment
from trace_megatron.envs.server import build_app, serve_environment
from trace_megatron.errors import UserError
from trace_megatron.rollout.env import Transition
from trace_megatron.types import Task

TASK = Task("t", (), {"answer": 20})


@asynccontextmanager
async def serving(config=CONFIG, *, environment=None, port=0, **settings):
    """The URL of a server in this event loop."""
    app = build_app(environment or build_environment(config), config, **settings)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def num_states(url) -> int:
    return (await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(f"{url}/health"))))["num_states"]


async def eventually(condition, limit_s=5.0):
    async with asyncio.timeout(limit_s):
        while not await condition():
            await asyncio.sleep(0.02)


def test_tasks_and_transitions_are_those_of_the_environment_here():
    async def play(environment, task):
        """What every action answers, where a state is left twice."""
        start = await environment.reset(task)
        first = await environment.step(start, "2+3")
        fork, other = await environment.step(first.state, "7*6"), await environment.step(first.state, "what")
        ends = [await environment.step(at.state, "=20") for at in (fork, other, first)]
        transitions = [first, fork, other, await environment.step(start, "=1"), *ends]
        return [(it.observation, it.reward, it.done, it.info) for it in transitions]

    async def run():
        here = build_environment(CONFIG)
        async with serving() as one, serving(replace(CONFIG, max_concurrency=4)) as two, client(one, two) as there:
            for split in ("train", "validation"):
                ours, theirs = here.tasks(split), await tasks_of(there, split)
                assert len(ours) == len(theirs) == 500
                for number in (0, 1, 250, 499):
                    assert await asyncio.to_thread(theirs.__getitem__, number) == ours[number]
                with pytest.raises(IndexError):
                    theirs[500]
            for number in range(4):
                assert await play(there, ours[number]) == await play(here, ours[number])
            assert there.max_concurrency == 0  # one of them has no limit
            with pytest.raises(UserError, match="expected a split of train, validation, found 'test'"):
                await tasks_of(there, "test")

    asyncio.run(run())


def test_the_sum_of_limits_and_the_share_of_episodes():
    async def run():
        small, large = (replace(CONFIG, max_concurrency=count) for count in (2, 6))
        async with serving(small) as one, serving(large) as two, client(one, two) as there:
            await tasks_of(there)
            states = await asyncio.gather(*(there.reset(TASK) for _ in range(32)))
            assert there.max_concurrency == 8
            return [await num_states(url) for url in (one, two)], len(states)

    (few, many), total = asyncio.run(run())
    assert few + many == total and abs(many - 24) <= 1  # by what each does at once


def test_states_are_dropped_when_nobody_refers_to_them_and_are_bounded():
    async def run():
        async with serving(max_states=3) as url, client(url) as there:
            states = [await there.reset(TASK) for _ in range(3)]
            with pytest.raises(EnvironmentServerError, match="expected at most 3 states at a time"):
                await there.step(states[0], "1+1")
            assert await num_states(url) == 3
            del states[1:]
            gc.collect()
            await there.reset(TASK)  # it names those that are free, and so has room
            assert await num_states(url) <= 2
            await there.close()
            assert await num_states(url) == 0

    asyncio.run(run())


def test_states_of_a_run_that_is_gone_expire(monkeypatch):
    async def run(lease_s, period_s):
        monkeypatch.setattr(connection, "KEEP_PERIOD_S", period_s)
        async with serving(lease_s=lease_s) as url, client(url) as there:
            state = await there.reset(TASK)
            await asyncio.sleep(1.5 * lease_s)
            return (await there.step(state, "=20")).reward

    assert asyncio.run(run(lease_s=0.5, period_s=0.02)) == 1.0  # signs of life
    with pytest.raises(EnvironmentServerError, match=r"expected a state that is held, found .* not heard of for 0.1 s"):
        asyncio.run(run(lease_s=0.1, period_s=60))


class Moody:
    """Its actions say how it fails."""

    cancelled = 0

    def tasks(self, split):
        return [TASK]

    async def reset(self, task):
        return "start"

    async def step(self, state, action):
        try:
            await asyncio.sleep(60 if action == "hang" else 0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if action == "raise":
            raise KeyError("server")
        return Transition(state, (), 0.0, False, {"info": object() if action == "odd" else 1})

    async def close(self):
        pass


def test_failures_of_the_environment_are_told_and_an_abandoned_call_ends():
    async def run():
        moody = Moody()
        async with serving(environment=LimitedEnvironment(moody, 0, 0.1)) as url, client(url) as there:
            state = await there.reset(TASK)
            for action, words in (("raise", "KeyError: 'server'"), ("odd", "object"), ("hang", "env.timeout_s=0.1")):
                with pytest.raises(EnvironmentServerError, match=words):
                    await there.step(state, action)
        async with serving(environment=LimitedEnvironment(moody, 0, 60)) as url, client(url) as there:
            state = await there.reset(TASK)
            hanging = asyncio.create_task(there.step(state, "hang"))

            async def begun():
                return await num_states(url) == 2  # with the place of the one to come

            async def ended():
                return await num_states(url) == 1 and moody.cancelled == 2

            await eventually(begun)
            hanging.cancel()
            await eventually(ended)
            return (await there.step(state, "go on")).info

    assert asyncio.run(run()) == {"info": 1}


def test_what_does_not_fit_is_one_sentence(monkeypatch):
    async def refusal(*urls, **more):
        async with client(*urls, **more) as there:
            with pytest.raises(UserError) as error:
                await tasks_of(there)
            assert "\n" not in str(error.value)
            return str(error.value)

    async def run():
        other = replace(CONFIG, params={"max_operations": 4, "size": 500})
        async with serving(token="secret") as url, serving() as open_url, serving(other) as other_url:
            assert f"{ENV_TOKEN}), found another" in await refusal(url, token="guess")
            assert f"{ENV_TOKEN}), found another" in await refusal(url)
            assert "env.params.max_operations is 4 there and 3 here" in await refusal(open_url, other_url)
            assert "env.name is calculator there and bfcl here" in await refusal(
                url, config=EnvConfig("bfcl"), token="secret"
            )
            async with serving(environment=LimitedEnvironment(Moody(), 0, 1.0)) as fewer:
                assert "same tasks in the split 'train' from all of env.urls, found 500" in await refusal(
                    open_url, fewer
                )
        gone = await refusal(open_url)
        assert open_url in gone and "trace-megatron serve-env" in gone and "cannot be reached" in gone

    asyncio.run(run())
    monkeypatch.delenv(ENV_TOKEN, raising=False)
    with pytest.raises(UserError, match=f"expected a token in {ENV_TOKEN} with --host 0.0.0.0, found none"):
        serve_environment(CONFIG, "0.0.0.0", 0)


def test_a_lost_server_is_left_out_until_it_is_back(monkeypatch, capfd):
    monkeypatch.setattr(remote, "LOST_S", 0.3)
    monkeypatch.setattr(connection, "_FIRST_PAUSE_S", 0.05)

    async def homes(there, count=6):
        states = await asyncio.gather(*(there.reset(TASK) for _ in range(count)))
        return [state.server.url for state in states], states

    async def run():
        async with AsyncExitStack() as first, AsyncExitStack() as second:
            one = await first.enter_async_context(serving())
            two = await second.enter_async_context(serving())
            there = await first.enter_async_context(client(one, two))
            tasks = await tasks_of(there)
            at, states = await homes(there)
            assert at == [one, two] * 3
            await second.aclose()
            with pytest.raises(ServerLost, match=f"{two} is lost: it cannot be reached"):
                await there.step(states[1], "1+1")
            assert (await there.step(states[0], "=20")).done
            assert (await homes(there))[0] == [one] * 6  # a reset that meets a lost server goes to another

            await second.enter_async_context(serving(port=int(two.rpartition(":")[2])))
            await eventually(lambda: is_alive(states[1].server))
            with pytest.raises(EnvironmentServerError, match="expected a state that is held"):
                await there.step(states[1], "1+1")
            assert (await homes(there))[0].count(two) == 3

            await second.aclose()
            (other,) = (server for server in there._servers if server.url == one)
            other._lose("by this test")
            monkeypatch.setattr(connection, "_LAST_PAUSE_S", 60)
            monkeypatch.setattr(connection.Connection, "connect", never)
            with pytest.raises(EnvironmentServerError, match=r"found none for 0.3 s \(.*by this test; .*\): start"):
                await there.reset(TASK)
            monkeypatch.undo()
            await asyncio.to_thread(tasks.__getitem__, 3)  # one of them does answer

    async def is_alive(server):
        return server.alive

    async def never(self):
        return False

    asyncio.run(run())
    said = capfd.readouterr().err
    assert said.count("is lost: it cannot be reached") == 2 and said.count("is back") == 1


@pytest.mark.parametrize(
    ("changes", "token", "words"),
    [
        ({"params": {"max_operations": 4, "size": 500}}, "", "started again|max_operations is 4 there"),
        ({}, "secret", "started again, with another token"),
    ],
)
def test_another_server_on_the_port_of_one_that_ended_gets_no_episodes(monkeypatch, capfd, changes, token, words):
    monkeypatch.setattr(remote, "LOST_S", 0.2)

    async def run():
        other = replace(CONFIG, **changes)
        async with AsyncExitStack() as first:
            url = await first.enter_async_context(serving())
            async with client(url) as there:
                await tasks_of(there)
                await there.reset(TASK)
                await first.aclose()  # and nobody calls before the port is taken again
                async with serving(other, port=int(url.rpartition(":")[2]), token=token):
                    with pytest.raises(EnvironmentServerError, match=words):
                        await there.reset(TASK)
                    assert await num_states(url) == 0

    asyncio.run(run())
    assert "is lost: it was started again" in capfd.readouterr().err


def test_what_is_no_request_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr(server, "_MAX_REQUEST_BYTES", 1 << 20)

    async def run():
        async with serving() as url, aiohttp.ClientSession() as session:
            for body, words in (
                (b"[" * 10**5, "expected JSON, found: maximum recursion depth"),
                (b" " * (1 << 21), "expected a request of at most 1 MiB, found more"),
                (b"\xff", "expected JSON"),
                (b'{"client": "c", "state": NaN}', "expected states by their numbers"),
                (b'{"client": "c", "state": 1}', "expected a task"),
                (b'{"client": "c", "state": 1, "next": 2, "action": 3}', "expected an action as text"),
            ):
                path = "step" if b"action" in body else "reset"
                async with session.post(f"{url}/{path}", data=body) as response:
                    assert 400 <= response.status < 500 and words in (await response.json())["error"]
            async with session.get(f"{url}/task?split=train&number={'1' * 5000}") as response:
                assert "expected a number below 500" in (await response.json())["error"]

    asyncio.run(run())


@pytest.mark.parametrize("answer", ["[]", "{}", "<html>"])
def test_a_server_of_something_else_is_told_apart(monkeypatch, answer):
    monkeypatch.setattr(remote, "LOST_S", 0.1)

    async def run():
        async def say_so(request):
            return web.Response(text=answer)

        app = web.Application()
        app.add_routes([web.route("*", "/{rest}", say_so)])
        runner = web.AppRunner(app, shutdown_timeout=0.01)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with client(f"http://127.0.0.1:{runner.addresses[0][1]}") as there:
            with pytest.raises(UserError, match="is it trace-megatron serve-env"):
                await tasks_of(there)
            with pytest.raises(EnvironmentServerError, match="is it trace-megatron serve-env"):
                await there.reset(TASK)
        await runner.cleanup()

    asyncio.run(run())


def test_a_server_that_is_silent_is_lost_with_its_calls(monkeypatch):
    monkeypatch.setattr(connection, "KEEP_PERIOD_S", 0.05)
    monkeypatch.setattr(connection, "SILENCE_S", 0.5)

    async def hang(request):
        await asyncio.sleep(60)

    async def answer(request):
        return web.json_response({"name": CONFIG.name, "params": CONFIG.params, "max_concurrency": 0, "life": ""})

    async def run():
        app = web.Application()
        routes = [web.get("/environment", answer), web.post("/reset", answer), web.post("/{rest}", hang)]
        app.add_routes(routes)
        runner = web.AppRunner(app, shutdown_timeout=0.01)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with client(f"http://127.0.0.1:{runner.addresses[0][1]}") as there:
            state = await there.reset(TASK)
            with pytest.raises(ServerLost, match="is lost"):
                await there.step(state, "1+1")
            there._servers[0]._gone = None  # it has nothing to be told at the end
        await runner.cleanup()

    asyncio.run(run())
