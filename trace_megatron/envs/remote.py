"""An environment whose states live on servers (envs/server.py): new episodes are spread, each stays where it began."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import secrets
import time
import urllib.parse
from collections.abc import Sequence

from trace_megatron.config import EnvConfig
from trace_megatron.envs.connection import Connection, EnvironmentServerError, RemoteState, ServerLost
from trace_megatron.errors import RolloutError, UserError
from trace_megatron.rollout.env import Transition
from trace_megatron.tree_files import as_task
from trace_megatron.types import Task

LOST_S = 120.0
"""For which a new episode waits while all servers are lost."""
MAX_DEATHS = 2
"""Servers that one new episode may see lost: it could be what ends them."""

_POLL_S = 0.5
_CACHED_TASKS = 4096


class RemoteEnvironment:
    """The environment that the servers of ``env.urls`` were started with.

    Their own ``env.max_concurrency`` and ``env.timeout_s`` bound the calls. The episodes of a server that is lost fail;
    it is asked again with growing pauses, and new episodes go to the others. Belongs to the event loop that it was
    first used on; ``tasks`` may be called anywhere.
    """

    def __init__(self, config: EnvConfig, token: str) -> None:
        """``token``: what the servers ask for, empty if they do not."""
        self._splits: dict[str, _RemoteTasks] = {}
        self._digests: dict[str, str] = {}
        client = secrets.token_hex(16)
        self._servers = [Connection(url, config, token, client, self._digests) for url in config.urls]
        self._numbers = itertools.count()
        self._opening: asyncio.Future[None] | None = None
        self._keepers: list[asyncio.Task[None]] = []

    @property
    def max_concurrency(self) -> int:
        """The sum of the servers'; 0: no limit, or not known before the first call."""
        limits = [server.max_concurrency for server in self._servers]
        return sum(limits) if all(limits) else 0

    def tasks(self, split: str) -> Sequence[Task]:
        """The split's tasks, which all servers must have alike; each is fetched when it is asked for.

        Raises UserError where a server is another run's, or, the first time, is not there.
        """
        if split not in self._splits:
            self._splits[split] = self._list(split)
        return self._splits[split]

    async def reset(self, task: Task) -> RemoteState:
        """The state before the first action, on the server that has least to do."""
        await self._open()
        number = next(self._numbers)
        body = {"state": number, "task": dataclasses.asdict(task)}
        num_deaths = 0
        while True:
            server = await self._freest()
            try:
                await server.call("/reset", body, number)
                return server.state(number)
            except ServerLost:  # nothing has begun: another one takes it
                num_deaths += 1
                if num_deaths == MAX_DEATHS:
                    raise

    async def step(self, state: RemoteState, action: str) -> Transition:
        """On the state's own server. Raises EnvironmentServerError."""
        number = next(self._numbers)
        body = {"state": state.number, "next": number, "action": action}
        answer = await state.server.call("/step", body, number)
        done = answer["done"]
        new_state = None if done else state.server.state(number)  # nobody steps from an end: none is kept
        return Transition(new_state, tuple(answer["observation"]), answer["reward"], done, answer["info"])

    async def close(self) -> None:
        """Let the servers forget this run's states."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(server.close() for server in self._servers))

    def read_task(self, split: str, number: int) -> Task:
        """From any server. Raises RolloutError where none answers for LOST_S."""
        path = f"/task?split={urllib.parse.quote(split)}&number={number}"
        deadline_s = time.monotonic() + LOST_S
        while True:
            for server in sorted(self._servers, key=lambda server: bool(server.reason)):  # those that are not lost
                with contextlib.suppress(ServerLost):
                    return as_task(server.get(path))
            if time.monotonic() > deadline_s:
                raise RolloutError(self._none_left())
            time.sleep(_POLL_S)

    def _list(self, split: str) -> _RemoteTasks:
        found = {}
        for server in self._servers:
            try:
                found[server.url] = server.describe(split)
            except ServerLost as error:
                if not self._splits:
                    raise UserError(
                        f"expected an environment server of env.urls at {server.url}, found that {error}: start it "
                        "there with trace-megatron serve-env, or take it out of env.urls"
                    ) from error
        if not found:
            raise RolloutError(self._none_left())
        (first_url, first), *others = found.items()
        for url, other in others:
            if other != first:
                raise UserError(
                    f"expected the same tasks in the split '{split}' from all of env.urls, found {first.num_tasks} at "
                    f"{first_url} and {other.num_tasks}, or others, at {url}: start both on the same files"
                )
        self._digests[split] = first.digest
        return _RemoteTasks(self, split, first.num_tasks)

    async def _open(self) -> None:
        """Connect to all, once: otherwise the first to answer would get all first episodes."""
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._connect())
        await asyncio.shield(self._opening)

    async def _connect(self) -> None:
        await asyncio.gather(*(server.connect() for server in self._servers))
        self._keepers = [asyncio.create_task(server.keep()) for server in self._servers]

    async def _freest(self) -> Connection:
        deadline_s = time.monotonic() + LOST_S
        while not any(server.alive for server in self._servers):
            if time.monotonic() > deadline_s:
                raise EnvironmentServerError(self._none_left())
            await asyncio.sleep(_POLL_S)
        return min((server for server in self._servers if server.alive), key=lambda server: server.load)

    def _none_left(self) -> str:
        reasons = "; ".join(f"{server.url}: {server.reason or 'no answer'}" for server in self._servers)
        return (
            f"expected an environment server of env.urls to answer, found none for {LOST_S:g} s ({reasons}): start "
            "them again with trace-megatron serve-env, and see what they said"
        )


class _RemoteTasks(Sequence[Task]):
    """One request a task: prompts are drawn in a shuffled order, of which a page would hold one."""

    def __init__(self, environment: RemoteEnvironment, split: str, size: int) -> None:
        self._size = size
        self._read = functools.lru_cache(_CACHED_TASKS)(functools.partial(environment.read_task, split))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, number: int) -> Task:
        if not 0 <= number < self._size:
            raise IndexError(number)
        return self._read(number)
