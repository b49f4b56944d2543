"""The environment of a configuration over HTTP, for runs on other hosts. JSON only.

    trace-megatron serve-env -c CONFIG [--host 127.0.0.1] [--port 8500]

GET  /health                          ->  {"num_states"}
GET  /environment[?split=train]       ->  {"name", "params", "max_concurrency", "life"[, "num_tasks", "digest"]}
GET  /task?split=train&number=7       ->  {"task_id", "messages", "payload", "tools"}
POST /reset    {"state", "task"}      ->  {}
POST /step     {"state", "next", "action"}  ->  {"observation", "reward", "done", "info"}
POST /release  {}                     ->  {}
POST /leave    {}                     ->  {}

States are arbitrary Python values, so they stay here. A client gives each a number of its own (``state``, ``next``) and
says in every POST who it is (``client``) and which states it needs no longer (``released``). Those of a client that is
not heard of for LEASE_S are dropped. It also says which process it means (``life``): another one on the same port may
be of another configuration, and refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from trace_megatron.config import ENV_TOKEN, EnvConfig
from trace_megatron.envs import build_environment
from trace_megatron.envs.limits import LimitedEnvironment
from trace_megatron.errors import UserError
from trace_megatron.serving import serve
from trace_megatron.tree_files import as_task
from trace_megatron.types import Task

MAX_STATES = 2**18
"""Held at once: 3,000 open episodes of 40 turns twice over."""
LEASE_S = 600.0
"""Clients are in touch every 15 s (envs/connection.py), even while they train."""

_MAX_REQUEST_BYTES = 64 << 20
_MAX_DIGITS = 18
_COMPARED_TASKS = 64
"""Of a split, in its digest: a lazy one may have any number."""


def serve_environment(config: EnvConfig, host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT. Raises UserError for what cannot be served, or not there."""
    token = os.environ.get(ENV_TOKEN, "")
    if not token and not _is_loopback(host):
        raise UserError(
            f"expected a token in {ENV_TOKEN} with --host {host}, found none: whoever reaches that address could use "
            f"the environment, so set {ENV_TOKEN} to one secret here and where the run starts (openssl rand -hex 16)"
        )
    config = dataclasses.replace(config, urls=())
    app = build_app(build_environment(config), config, token)
    asyncio.run(serve(app, host, port, cancel_abandoned=True))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def build_app(
    environment: LimitedEnvironment,
    config: EnvConfig,
    token: str = "",
    max_states: int = MAX_STATES,
    lease_s: float = LEASE_S,
) -> web.Application:
    """The routes; the environment is closed with them. ``token``: that requests must bear, empty for none."""
    routes = _Routes(environment, config, _HeldStates(max_states, lease_s))
    app = web.Application(client_max_size=_MAX_REQUEST_BYTES, middlewares=[_guard(token)])
    app.add_routes(
        [
            web.get("/health", routes.health),
            web.get("/environment", routes.describe),
            web.get("/task", routes.task),
            web.post("/reset", routes.reset),
            web.post("/step", routes.step),
            web.post("/release", routes.release),
            web.post("/leave", routes.leave),
        ]
    )
    app.cleanup_ctx.append(routes.while_open)
    return app


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _guard(token: str) -> Callable[..., Any]:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Callable[..., Any]) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        try:
            if token and request.path != "/health" and not hmac.compare_digest(given, expected):
                raise _Refused(401, f"expected the token that the server was started with ({ENV_TOKEN}), found another")
            return await handler(request)
        except _Refused as refusal:
            return web.json_response({"error": str(refusal)}, status=refusal.status)

    return guard


@dataclass(slots=True)
class _Client:
    heard_s: float
    states: dict[int, Any] = field(default_factory=dict)


class _HeldStates:
    """States by client and number."""

    def __init__(self, max_states: int, lease_s: float) -> None:
        self._max_states = max_states
        self.lease_s = lease_s
        self._clients: dict[str, _Client] = {}

    def __len__(self) -> int:
        return sum(len(client.states) for client in self._clients.values())

    def hear(self, name: str, released: Iterable[int]) -> _Client:
        """A client is there, and needs some states no longer."""
        client = self._clients.setdefault(name, _Client(0.0))
        client.heard_s = time.monotonic()
        for number in released:
            client.states.pop(number, None)
        return client

    def forget(self, name: str) -> None:
        self._clients.pop(name, None)

    def expire(self) -> None:
        """Drop what belongs to clients that are gone."""
        oldest_s = time.monotonic() - self.lease_s
        self._clients = {name: client for name, client in self._clients.items() if client.heard_s >= oldest_s}

    @contextlib.contextmanager
    def room(self, client: _Client, number: int) -> Iterator[None]:
        """A place for a state to come, which is gone again if it does not come."""
        if len(self) >= self._max_states:
            raise _Refused(
                507,
                f"expected at most {self._max_states} states at a time, found one more wanted: spread the run over "
                "more environment servers",
            )
        client.states[number] = _COMING
        try:
            yield
        finally:
            if client.states.get(number) is _COMING:
                del client.states[number]


_COMING = object()


class _Routes:
    def __init__(self, environment: LimitedEnvironment, config: EnvConfig, held: _HeldStates) -> None:
        self._environment = environment
        self._config = config
        self._held = held
        self._splits: dict[str, Sequence[Task]] = {}
        self._life = secrets.token_hex(8)

    async def while_open(self, app: web.Application) -> AsyncIterator[None]:
        async def expire() -> None:
            while True:
                await asyncio.sleep(self._held.lease_s / 4)
                self._held.expire()

        expiring = asyncio.create_task(expire())
        yield
        expiring.cancel()
        await self._environment.close()

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"num_states": len(self._held)})

    async def describe(self, request: web.Request) -> web.Response:
        about = {
            "name": self._config.name,
            "params": self._config.params,
            "max_concurrency": self._environment.max_concurrency,
            "life": self._life,
        }
        if "split" in request.query:
            tasks = self._tasks(request.query["split"])
            about |= {"num_tasks": len(tasks), "digest": _digest(tasks)}
        return web.json_response(about)

    async def task(self, request: web.Request) -> web.Response:
        tasks = self._tasks(request.query.get("split", ""))
        number = request.query.get("number", "")
        if not number.isdecimal() or len(number) > _MAX_DIGITS or int(number) >= len(tasks):
            raise _Refused(400, f"expected a number below {len(tasks)}, found '{number[: _MAX_DIGITS + 1]}'")
        return web.json_response(dataclasses.asdict(tasks[int(number)]))

    async def reset(self, request: web.Request) -> web.Response:
        client, body = await self._read(request, "state")
        if not isinstance(body.get("task"), dict):
            raise _Refused(400, "expected a task")
        with self._held.room(client, body["state"]), _failures_told():
            state = await self._environment.reset(as_task(body["task"]))
            _keep(client, body["state"], state)
            return web.json_response({})

    async def step(self, request: web.Request) -> web.Response:
        client, body = await self._read(request, "state", "next")
        if not isinstance(body.get("action"), str):
            raise _Refused(400, "expected an action as text")
        state = client.states.get(body["state"], _COMING)
        if state is _COMING:
            raise _Refused(
                410,
                f"expected a state that is held, found number {body['state']}: the server was started again, or the "
                f"run was not heard of for {self._held.lease_s:g} s",
            )
        with self._held.room(client, body["next"]), _failures_told():
            transition = await self._environment.step(state, body["action"])
            answer = json.dumps(
                {
                    "observation": transition.observation,
                    "reward": transition.reward,
                    "done": transition.done,
                    "info": transition.info,
                }
            )
            if not transition.done:
                _keep(client, body["next"], transition.state)
            return web.json_response(text=answer)

    async def release(self, request: web.Request) -> web.Response:
        await self._read(request)
        return web.json_response({})

    async def leave(self, request: web.Request) -> web.Response:
        _, body = await self._read(request)
        self._held.forget(body["client"])
        return web.json_response({})

    async def _read(self, request: web.Request, *numbers: str) -> tuple[_Client, dict[str, Any]]:
        """The client and the body of a POST, whose ``numbers`` are numbers."""
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError, web.RequestPayloadError) as error:
            raise _Refused(400, f"expected JSON, found: {str(error) or type(error).__name__}") from error
        except web.HTTPRequestEntityTooLarge as error:
            raise _Refused(413, f"expected a request of at most {_MAX_REQUEST_BYTES >> 20} MiB, found more") from error
        if not isinstance(body, dict) or not isinstance(body.get("client"), str):
            raise _Refused(400, 'expected {"client": text, ...}')
        released = body.get("released", [])
        if not isinstance(released, list) or not all(
            isinstance(number, int) for number in (*released, *map(body.get, numbers))
        ):
            raise _Refused(400, "expected states by their numbers")
        if body.get("life", self._life) != self._life:
            raise _Refused(409, "expected another server here: this one was started since")
        return self._held.hear(body["client"], released), body

    def _tasks(self, split: str) -> Sequence[Task]:
        if split not in self._splits:
            try:
                self._splits[split] = self._environment.tasks(split)
            except UserError as error:
                raise _Refused(400, str(error)) from error
        return self._splits[split]


def _keep(client: _Client, number: int, state: Any) -> None:
    """Unless it was released before it came: nobody waits for it any more."""
    if client.states.get(number) is _COMING:
        client.states[number] = state


@contextlib.contextmanager
def _failures_told() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever an environment raises is data, as in rollout/episode.py
        raise _Refused(422, f"{type(error).__name__}: {error}") from error


def _digest(tasks: Sequence[Task]) -> str:
    """Of up to 64 tasks, evenly spread."""
    count = min(len(tasks), _COMPARED_TASKS)
    chosen = [dataclasses.asdict(tasks[index * len(tasks) // count]) for index in range(count)]
    return hashlib.blake2b(json.dumps(chosen, sort_keys=True).encode(), digest_size=16).hexdigest()
