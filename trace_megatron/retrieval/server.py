"""An HTTP server over an index. Requests that wait at the same time are searched together.

    python -m trace_megatron.retrieval.server --index FOLDER [--host 127.0.0.1] [--port 8765]

POST /search  {"queries": [...], "k": 5}  ->  {"results": [[{"id", "title", "text", "score"}, ...], ...]}
GET  /health                              ->  {"kind", "num_passages"}

It listens on the loopback interface unless told otherwise: it has no authentication.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from aiohttp import web

from trace_megatron.errors import UserError
from trace_megatron.retrieval.index import Hit, Index
from trace_megatron.serving import end_with, serve

DEFAULT_PORT = 8765
MAX_QUERIES, MAX_K, MAX_QUERY_CHARS = 1024, 100, 4096
"""Of one request; longer queries are cut, more queries or passages are an error."""

_MAX_REQUEST_BYTES = 16 << 20


class SearchQueue:
    """Searches in one thread, all queries that wait for it at once."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._waiting: list[tuple[str, int, asyncio.Future[list[Hit]]]] = []
        self._turn = asyncio.Lock()

    async def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The best ``k`` passages of each query."""
        loop = asyncio.get_running_loop()
        entries = [(query, k, loop.create_future()) for query in queries]
        self._waiting += entries
        async with self._turn:
            if self._waiting and any(not hits.done() for _, _, hits in entries):
                batch, self._waiting = self._waiting, []
                await self._search_batch(batch)
        return [await hits for _, _, hits in entries]

    async def _search_batch(self, batch: Sequence[tuple[str, int, asyncio.Future[list[Hit]]]]) -> None:
        largest = max(k for _, k, _ in batch)
        try:
            results = await asyncio.to_thread(self._index.search, [query for query, _, _ in batch], largest)
            for (_, k, hits), result in zip(batch, results, strict=True):
                if not hits.done():
                    hits.set_result(result[:k])
        finally:
            for _, _, hits in batch:  # nobody may wait for a batch that failed
                hits.cancel()


def build_app(index: Index) -> web.Application:
    """The two routes."""
    queue = SearchQueue(index)

    async def search(request: web.Request) -> web.Response:
        try:
            queries, k = _parse(await request.json())
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=400)
        results = await queue.search(queries, k)
        return web.json_response(
            {"results": [[{**asdict(hit.passage), "score": hit.score} for hit in hits] for hits in results]}
        )

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"kind": index.kind, "num_passages": len(index)})

    app = web.Application(client_max_size=_MAX_REQUEST_BYTES)
    app.add_routes([web.post("/search", search), web.get("/health", health)])
    return app


def _parse(body: Any) -> tuple[list[str], int]:
    queries, k = (body.get("queries"), body.get("k", 5)) if isinstance(body, dict) else (None, None)
    if not isinstance(queries, list) or not queries or not all(isinstance(query, str) for query in queries):
        raise ValueError('expected {"queries": [text, ...], "k": number}')
    if len(queries) > MAX_QUERIES:
        raise ValueError(f"expected at most {MAX_QUERIES} queries, found {len(queries)}")
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= MAX_K:
        raise ValueError(f"expected k from 1 to {MAX_K}, found {k!r}")
    return [query[:MAX_QUERY_CHARS] for query in queries], k


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", required=True, help="a folder that tools/build_index.py made")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="0: any free one")
    parser.add_argument("--owner", type=int, default=0, help="process id; the server ends with it")
    arguments = parser.parse_args()
    if arguments.owner:
        end_with(arguments.owner)
    try:
        asyncio.run(serve(build_app(Index(arguments.index)), arguments.host, arguments.port))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
