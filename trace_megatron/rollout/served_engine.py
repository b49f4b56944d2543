"""A `vllm serve` server as a rollout engine, on this machine or another. Token ids in and out, over HTTP.

The server must run with VLLM_SERVER_DEV_MODE=1 (its weight-update routes) and the flags of ``SERVE_FLAGS``; start it
where only the trainer reaches it, since those routes let anyone who does replace its weights.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import aiohttp

from trace_megatron.config import EngineConfig
from trace_megatron.errors import UserError
from trace_megatron.rollout.engine import Completion, EngineError, SamplingSettings
from trace_megatron.rollout.serve_flags import SERVE_FLAGS, SHARED_MEMORY_BACKEND

CONTROL_TIMEOUT_S = 600.0
"""Of a pause, or of one bucket's loading."""

_GENERATE = "/inference/v1/generate"

T = TypeVar("T")


class ServedEngine:
    """One server by its URL; see ``Engine``. Belongs to the event loop that it was started on.

    A server that was started again, or that another trainer updates, samples from weights that are not this trainer's:
    its first answer shows it, and it is taken for dead until the next push.
    """

    def __init__(self, url: str, config: EngineConfig, max_model_len: int) -> None:
        """``max_model_len``: tokens of prompt and response that the server must hold."""
        self.url = url.rstrip("/")
        self.dtype = config.dtype
        self.weight_backend = SHARED_MEMORY_BACKEND
        self.num_workers = 1
        self.num_starts = 0
        self._max_model_len = max_model_len
        self._session: aiohttp.ClientSession | None = None
        self._dead: asyncio.Future[str] | None = None
        self._blocked: asyncio.Future[str] | None = None
        self._version = 0

    @property
    def alive(self) -> bool:
        return self._session is not None and not self._dead.done()

    @property
    def serving(self) -> bool:
        return self.alive and not self._blocked.done()

    async def start(self) -> None:
        """Connect; raises UserError for a server that cannot serve this run, EngineError for none."""
        self.num_starts += 1
        loop = asyncio.get_running_loop()
        self._dead, self._blocked, self._version = loop.create_future(), loop.create_future(), 0
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=30.0))
        try:
            await self._check()
        except BaseException:
            await self.close()
            raise
        await self.control("update_weight_version", "0")

    async def _check(self) -> None:
        models = await self._call("GET", "/v1/models")
        length = models["data"][0].get("max_model_len") or 0
        if length < self._max_model_len:
            raise UserError(
                f"expected a server for {self._max_model_len} tokens of prompt and response at {self.url}, found one "
                f"for {length}: start it with --max-model-len {self._max_model_len}"
            )
        try:
            self.num_workers = (await self._call("GET", "/get_world_size"))["world_size"]
            await self._call("POST", _GENERATE, {"token_ids": [0], "sampling_params": {"max_tokens": 1}})
        except _Refused as error:
            raise UserError(
                f"expected a server with token-ids and weight-update routes, found another ({error}): start it with "
                f"VLLM_SERVER_DEV_MODE=1 vllm serve MODEL {SERVE_FLAGS}"
            ) from error

    async def generate(
        self, token_ids: Sequence[int], settings: SamplingSettings, seed: int, affinity: str = ""
    ) -> Completion:
        """Sample one completion of ``token_ids``; raises EngineError."""
        if self._session is None:
            raise EngineError(f"the server at {self.url} is not connected: call start() first")
        body = {
            "token_ids": list(token_ids),
            "sampling_params": {
                "temperature": settings.temperature,
                "top_p": settings.top_p,
                "max_tokens": settings.max_new_tokens,
                "stop_token_ids": list(settings.stop_token_ids),
                "ignore_eos": True,
                "seed": seed,
                "logprobs": 0,
                "detokenize": False,
            },
        }
        oldest = self._version
        answer = await self._until(self._call("POST", _GENERATE, body), self._dead, self._blocked)
        choice = answer["choices"][0]
        if choice["finish_reason"] not in ("stop", "length"):
            raise EngineError(f"the server at {self.url} ended a request with '{choice['finish_reason']}'")
        version = int(choice["weight_versions"][0]["version"])
        if not oldest <= version <= self._version:  # a request may wait for a push, or see several
            self.give_up(
                f"expected weight version {self._version} of the server at {self.url}, found {version}: it was "
                "started again, or another trainer uses it"
            )
            raise EngineError(self._dead.result())
        logprobs = tuple(entry["logprob"] for entry in choice["logprobs"]["content"])
        return Completion(tuple(choice["token_ids"]), logprobs, choice["finish_reason"] == "stop", version)

    async def control(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Await the route that does what AsyncLLM's ``method`` does; EngineError if the server fails."""
        if self._session is None:
            raise EngineError(f"the server at {self.url} is not connected: call start() first")
        path, body = _route(method, args, kwargs)
        async with asyncio.timeout(CONTROL_TIMEOUT_S):
            return await self._until(self._call("POST", path, body), self._dead)

    def block(self, reason: str) -> None:
        """Fail waiting and later requests with ``reason`` until ``unblock``; control calls still work."""
        if not self._blocked.done():
            self._blocked.set_result(reason)

    def unblock(self, weight_version: int) -> None:
        """Serve requests again, and refuse answers of other weights than this version's."""
        self._version = weight_version
        if self._blocked.done():
            self._blocked = asyncio.get_running_loop().create_future()

    def give_up(self, reason: str) -> None:
        """Take the server for dead: whoever waits for it gets an EngineError."""
        if self._dead is not None and not self._dead.done():
            self._dead.set_result(reason)

    async def close(self) -> None:
        """End the connections; the server goes on. Safe to call twice."""
        self.give_up("the connection was closed")
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _call(self, verb: str, path: str, body: Any = None) -> Any:
        """The decoded answer. A server that cannot be reached, or fails, is dead."""
        try:
            async with self._session.request(verb, self.url + path, json=body) as response:
                text = await response.text()
        except (aiohttp.ClientError, OSError) as error:
            self.give_up(f"the server at {self.url} cannot be reached: {error or type(error).__name__}")
            raise EngineError(self._dead.result()) from error
        if response.status == 200:
            return json.loads(text)
        raise _Refused(f"the server at {self.url} answered {path} with status {response.status}: {_message(text)}")

    async def _until(self, call: Awaitable[T], *stops: asyncio.Future[str]) -> T:
        """Await ``call``, or raise EngineError with the reason of the first of ``stops`` that comes true."""
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait((task, *stops), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise EngineError(next(stop.result() for stop in stops if stop.done()))
            return task.result()
        finally:
            task.cancel()


class _Refused(EngineError):
    """The server answered, but not with what was asked for."""


def _route(method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """Path and body of vLLM's route for a method of AsyncLLM."""
    match method:
        case "pause_generation":
            return f"/pause?mode={kwargs['mode']}&clear_cache={str(kwargs['clear_cache']).lower()}", None
        case "resume_generation":
            return "/resume", None
        case "reset_prefix_cache" | "start_weight_update":
            return f"/{method}", None
        case "update_weight_version":
            return f"/{method}", {"new_version": args[0]}
        case "init_weight_transfer_engine" | "update_weights":
            return f"/{method}", asdict(args[0])  # {"init_info": ...}, {"update_info": ...}
        case "finish_weight_update":
            return f"/{method}", {"weight_version": args[0]}
    raise ValueError(f"expected a method with a route, found '{method}'")


def _message(text: str) -> str:
    """vLLM's own words, where its answer has some."""
    try:
        body = json.loads(text)
        return " ".join(str(body.get("error", body)).split())[:500]
    except (ValueError, AttributeError):
        return " ".join(text.split())[:200]
