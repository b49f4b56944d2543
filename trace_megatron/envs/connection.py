"""One environment server (envs/server.py) as a run sees it: calls, the states it holds, whether it is there."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
import weakref
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from trace_megatron.config import EnvConfig
from trace_megatron.errors import UserError
from trace_megatron.log import say

KEEP_PERIOD_S = 15.0
"""Between signs of life, which keep a run's states on their server."""
SILENCE_S = 60.0
"""A server that does not answer a sign of life for so long is lost."""
MAX_CALLS = 256
"""At once, to a server whose environment states no limit."""

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 30.0  # before a lost server is asked again; doubled each time
_LEAVE_S = 5.0
_FAILED = 422  # the environment itself, which has said why
_OTHER_TOKEN = 401
_OTHER_LIFE = 409  # a server that was started since, perhaps with another configuration

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # aiohttp asks no proxy either


class EnvironmentServerError(Exception):
    """A server is lost, or refused a call; one sentence. It fails its rollout."""


class ServerLost(EnvironmentServerError):
    """It cannot be reached."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class RemoteState:
    """A state on a server, which forgets it when nothing here refers to it any more."""

    server: Connection
    number: int


@dataclass(frozen=True, slots=True)
class Split:
    """A server's tasks of one split."""

    num_tasks: int
    digest: str


class Connection:
    """Belongs to the event loop that ``connect`` was awaited on, but for ``describe`` and ``get``."""

    def __init__(self, url: str, config: EnvConfig, token: str, client: str, digests: Mapping[str, str]) -> None:
        """``client``: the run's name for the server, nobody else's; ``digests``: of the splits that are in use."""
        self.url = url.rstrip("/")
        self.max_concurrency = 0
        """The server's own; 0: none, or not known yet."""
        self.reason = ""
        """Why it is lost."""
        self._config = config
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = client
        self._digests = digests
        self._session: aiohttp.ClientSession | None = None
        self._gone: asyncio.Future[None] | None = None
        self._turns = asyncio.Semaphore(MAX_CALLS)
        self._life = ""
        self._num_calls = 0
        self._held: set[int] = set()
        self._released: collections.deque[int] = collections.deque()

    @property
    def alive(self) -> bool:
        return self._gone is not None and not self._gone.done()

    @property
    def load(self) -> tuple[float, float]:
        """Calls, running or waiting, and states: both by what the server does at once."""
        places = self.max_concurrency or 1
        return self._num_calls / places, len(self._held) / places

    def state(self, number: int) -> RemoteState:
        """A state that the server now holds, until the last reference to it here is gone."""
        state = RemoteState(self, number)
        self._held.add(number)
        weakref.finalize(state, self._release, number).atexit = False
        return state

    def _release(self, number: int) -> None:  # in any thread
        self._held.discard(number)
        self._released.append(number)

    def describe(self, split: str) -> Split:
        """Raises UserError where it is not this run's environment, ServerLost where it is not there."""
        about = self.get(f"/environment?split={urllib.parse.quote(split)}")
        self._check(about)
        return Split(about["num_tasks"], about["digest"])

    def get(self, path: str) -> Any:
        """What a GET answers, without an event loop. Raises ServerLost, and UserError where it is refused."""
        text = ""
        try:
            with _opener.open(urllib.request.Request(self.url + path, headers=self._headers), timeout=SILENCE_S) as got:
                text = got.read().decode(errors="replace")
            return json.loads(text)
        except urllib.error.HTTPError as error:
            raise UserError(self._refusal(error.code, error.read().decode(errors="replace"))) from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerLost(f"it cannot be reached: {getattr(error, 'reason', error)}") from error
        except ValueError as error:
            raise UserError(self._refusal(200, text)) from error

    def _check(self, about: Any) -> None:
        if not isinstance(about, dict) or not about.keys() >= {"name", "params", "max_concurrency", "life"}:
            raise UserError(self._refusal(200, json.dumps(about)))
        if about.get("name") != self._config.name or about.get("params") != _plain(self._config.params):
            raise UserError(
                f"expected an environment server of this run's env section at {self.url}, found another: "
                f"{_difference(about, self._config)}; start it with the run's own configuration"
            )
        self.max_concurrency = about["max_concurrency"]

    async def connect(self) -> bool:
        """Whether it is there, and still this run's: then calls may follow."""
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(limit=0))
        try:
            about = await self._exchange("GET", "/environment", timeout_s=SILENCE_S)
            self._check(about)
            self._life = about["life"]
            for split, digest in list(self._digests.items()):
                path = f"/environment?split={urllib.parse.quote(split)}"
                if (await self._exchange("GET", path, timeout_s=SILENCE_S))["digest"] != digest:
                    raise UserError(f"expected the split '{split}' as it was when the run began, found other tasks")
        except (EnvironmentServerError, UserError) as error:
            self._lose(str(error))
            return False
        if self.reason:
            say(f"environment server {self.url} is back")
        self.reason = ""
        self._gone = asyncio.get_running_loop().create_future()
        self._turns = asyncio.Semaphore(self.max_concurrency or MAX_CALLS)
        return True

    def _lose(self, reason: str) -> None:
        if not self.reason:
            say(f"environment server {self.url} is lost: {reason}")
        self.reason = reason
        if self.alive:
            self._gone.set_result(None)

    async def keep(self) -> None:
        """Stay in touch, and connect again when it is lost. Ends when it is cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            if self.alive:
                await asyncio.wait((self._gone,), timeout=KEEP_PERIOD_S)
            if self.alive:
                with contextlib.suppress(EnvironmentServerError):
                    await self._post("/release", {}, timeout_s=SILENCE_S)
                continue
            await asyncio.sleep(pause_s)
            pause_s = _FIRST_PAUSE_S if await self.connect() else min(2 * pause_s, _LAST_PAUSE_S)

    async def call(self, path: str, body: Mapping[str, Any], number: int) -> Any:
        """What the server answers to a call that makes the state ``number``. Raises EnvironmentServerError."""
        self._num_calls += 1
        try:
            async with self._turns:
                if not self.alive:
                    raise ServerLost(self._last_words())
                return await self._until_gone(self._post(path, body))
        except BaseException:  # cancelled, too: the state may be there all the same, and nobody wants it
            self._released.append(number)
            raise
        finally:
            self._num_calls -= 1

    async def _until_gone(self, call: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait((task, self._gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ServerLost(self._last_words())
            return task.result()
        finally:
            task.cancel()

    async def _post(self, path: str, body: Mapping[str, Any], timeout_s: float | None = None) -> Any:
        released = [self._released.popleft() for _ in range(len(self._released))]
        body = {"client": self._client, "life": self._life, "released": released, **body}
        try:
            return await self._exchange("POST", path, body, timeout_s)
        except BaseException:  # perhaps they did not arrive; twice does no harm
            self._released.extend(released)
            raise

    async def _exchange(self, verb: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=SILENCE_S)
        try:
            async with self._session.request(verb, self.url + path, json=body, timeout=timeout) as response:
                text = await response.text("utf-8", "replace")
        except (aiohttp.ClientError, OSError) as error:
            self._lose(f"it cannot be reached: {error or type(error).__name__}")
            raise ServerLost(self._last_words()) from error
        if response.status == _OTHER_LIFE and body is not None:
            if body["life"] == self._life:  # else it is known
                self._lose("it was started again")
            raise ServerLost(f"the environment server at {self.url} is lost: it was started again")
        if response.status == _OTHER_TOKEN and self.alive:
            self._lose("it was started again, with another token")
            raise ServerLost(self._last_words())
        if response.status != 200:
            raise EnvironmentServerError(self._refusal(response.status, text))
        try:
            return json.loads(text)
        except ValueError as error:
            raise EnvironmentServerError(self._refusal(200, text)) from error

    def _last_words(self) -> str:
        return f"the environment server at {self.url} is lost: {self.reason}"

    def _refusal(self, status: int, text: str) -> str:
        try:
            words = json.loads(text)["error"]
        except (ValueError, KeyError, TypeError):
            words = f"status {status}, {text[:80]!r}; is it trace-megatron serve-env?"
        return words if status == _FAILED else f"the environment server at {self.url} refused a call: {words}"

    async def close(self) -> None:
        """Leave: the server forgets this run."""
        if self.alive:
            with contextlib.suppress(EnvironmentServerError):
                await self._post("/leave", {}, timeout_s=_LEAVE_S)
        if self.alive:
            self.reason = "the run is over"
            self._gone.set_result(None)
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _plain(value: Any) -> Any:
    """As JSON brings it back."""
    return json.loads(json.dumps(value))


def _difference(about: Mapping[str, Any], config: EnvConfig) -> str:
    if about.get("name") != config.name:
        return f"env.name is {about.get('name')} there and {config.name} here"
    theirs, ours = about.get("params") or {}, _plain(config.params)
    names = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
    return ", ".join(f"env.params.{name} is {theirs.get(name)!r} there and {ours.get(name)!r} here" for name in names)
