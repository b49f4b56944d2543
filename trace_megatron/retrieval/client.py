"""Searches over HTTP from many episodes at once: queries are batched, connections reused, failures retried."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from trace_megatron.retrieval.passages import Passage

_BATCH_WINDOW_S = 0.003  # queries that arrive this soon after the first share its request
_MAX_BATCH = 64
_FIRST_PAUSE_S = 0.2  # before the second try; doubled for each further one


class RetrievalError(Exception):
    """No answer from the server; one sentence. An environment turns it into a failed rollout."""


@dataclass(frozen=True, slots=True)
class _Query:
    text: str
    k: int
    passages: asyncio.Future[list[Passage]]


class RetrievalClient:
    """One server. Belongs to the event loop that it was first used on."""

    def __init__(
        self, url: str, *, timeout_s: float = 30.0, num_tries: int = 3, explain: Callable[[], str] = lambda: ""
    ) -> None:
        """``timeout_s``: of one try; ``explain``: what else is known when the server cannot be reached."""
        self._url = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._num_tries = num_tries
        self._explain = explain
        self._session: aiohttp.ClientSession | None = None
        self._waiting: list[_Query] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def search(self, query: str, k: int) -> list[Passage]:
        """The best ``k`` passages; raises RetrievalError."""
        entry = _Query(query, k, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        if len(self._waiting) == 1:
            self._start(self._send_soon())
        elif len(self._waiting) == _MAX_BATCH:
            self._start(self._send())
        return await entry.passages

    async def close(self) -> None:
        """End the connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for entry in self._waiting:
            entry.passages.cancel()
        if self._session:
            await self._session.close()
            self._session = None

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_soon(self) -> None:
        await asyncio.sleep(_BATCH_WINDOW_S)
        await self._send()

    async def _send(self) -> None:
        """One request for everything that waits; every query gets an answer or an error."""
        batch, self._waiting = self._waiting, []
        batch = [entry for entry in batch if not entry.passages.done()]  # a caller may have given up
        if not batch:
            return
        try:
            results = await self._request([entry.text for entry in batch], max(entry.k for entry in batch))
            for entry, passages in zip(batch, results, strict=True):
                if not entry.passages.done():
                    entry.passages.set_result(passages[: entry.k])
        except RetrievalError as error:
            for entry in batch:
                if not entry.passages.done():
                    entry.passages.set_exception(RetrievalError(*error.args))  # each its own: tracebacks grow
        finally:
            for entry in batch:
                entry.passages.cancel()

    async def _request(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        reason = ""
        for number in range(self._num_tries):
            if number:
                await asyncio.sleep(_FIRST_PAUSE_S * 2 ** (number - 1))
            try:
                return await self._post(queries, k)
            except TimeoutError:
                reason = f"no answer within {self._timeout.total:g} s"
            except (aiohttp.ClientError, OSError) as error:
                reason = str(error) or type(error).__name__
            if self._explain():
                break  # it has ended: it will not come back
        raise RetrievalError(
            f"expected an answer from the retrieval server at {self._url}, found none after {number + 1} tries: "
            f"{self._explain() or reason}"
        )

    async def _post(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=self._timeout)
        async with self._session.post(f"{self._url}/search", json={"queries": list(queries), "k": k}) as response:
            text = await response.text()
            if response.status >= 500:
                raise aiohttp.ClientError(f"status {response.status}")
            try:
                body = json.loads(text)
                if response.status == 200:
                    return [[_passage(hit) for hit in hits] for hits in body["results"]]
                raise RetrievalError(f"the retrieval server at {self._url} refused a search: {body['error']}")
            except (ValueError, KeyError, TypeError) as error:
                raise RetrievalError(
                    f"expected a retrieval server at {self._url}, found something else: status {response.status}, "
                    f"{text[:80]!r}"
                ) from error


def _passage(hit: dict[str, str]) -> Passage:
    return Passage(hit["id"], hit["title"], hit["text"])
