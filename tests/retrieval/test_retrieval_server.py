"""The server with its clients: batching, limits, failures, and whose process it is."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager, closing
from pathlib import Path

import aiohttp
import psutil
import pytest
from aiohttp import web
from retrieval.small_corpus import write_corpus

from trace_megatron.retrieval.client import RetrievalClient, RetrievalError
from trace_megatron.retrieval.index import Index, build_index
from trace_megatron.retrieval.local import LocalServer
from trace_megatron.retrieval.server import SearchQueue, build_app

QUERIES = ["violin of Oslo", "a glacier near Kyoto", "castles", "", "market of Lima"]


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    build_index([write_corpus(folder / "corpus.jsonl")], folder / "bm25", "bm25")
    return folder / "bm25"


@asynccontextmanager
async def serving(app: web.Application):
    """The URL of an app in this process."""
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def test_a_local_server_answers_many_episodes_on_loopback_and_ends(index):
    async def run():
        server = LocalServer(index)
        client = RetrievalClient(await server.start(), explain=server.failure)
        process = psutil.Process(server._process.pid)
        try:
            listening = {c.laddr.ip for c in process.net_connections() if c.status == psutil.CONN_LISTEN}
            found = await asyncio.gather(*(client.search(query, k) for query in QUERIES * 40 for k in (1, 3)))
        finally:
            await client.close()
            await server.stop()
        return listening, found, process.is_running()

    listening, found, running = asyncio.run(run())
    assert listening == {"127.0.0.1"} and not running
    expected = [[hit.passage for hit in hits] for hits in Index(index).search(QUERIES, 3)]
    assert found == [passages[:k] for passages in expected * 40 for k in (1, 3)]


def test_a_server_dies_with_its_owner(index):
    code = (
        "import asyncio, os, signal, sys; from trace_megatron.retrieval.local import LocalServer\n"
        f"server = LocalServer({str(index)!r}); asyncio.run(server.start())\n"
        "print(server._process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    owner = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert owner.returncode == -signal.SIGKILL, owner.stderr
    deadline = time.monotonic() + 10
    while psutil.pid_exists(int(owner.stdout)) and time.monotonic() < deadline:
        if psutil.Process(int(owner.stdout)).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.05)
    assert time.monotonic() < deadline


def test_a_server_that_cannot_start_or_dies_says_why(index, tmp_path):
    async def start_without_index():
        server = LocalServer(tmp_path)
        try:
            await server.start()
        finally:
            await server.stop()

    with pytest.raises(RetrievalError, match="exit code 2: error: expected an index folder"):
        asyncio.run(start_without_index())

    async def die():
        server = LocalServer(index)
        client = RetrievalClient(await server.start(), explain=server.failure)
        try:
            await client.search("violin", 1)
            os.kill(server._process.pid, signal.SIGKILL)
            await asyncio.gather(*(client.search("violin", 1) for _ in range(3)))
        finally:
            await client.close()
            await server.stop()

    with pytest.raises(RetrievalError, match="ended with exit code -9"):
        asyncio.run(die())


def test_a_taken_port_is_one_sentence(index):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        command = [sys.executable, "-m", "trace_megatron.retrieval.server", "--index", str(index), "--port"]
        port = str(taken.getsockname()[1])
        server = subprocess.run([*command, port], capture_output=True, text=True, timeout=60)
    assert server.returncode == 2 and server.stderr.startswith("error: expected a free port")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"queries": []}, "expected {"),
        ({"queries": "violin"}, "expected {"),
        ({"queries": ["violin", 3]}, "expected {"),
        ({"queries": ["violin"], "k": 0}, "k from 1 to 100"),
        ({"queries": ["violin"], "k": True}, "k from 1 to 100"),
        ({"queries": ["violin"] * 2000}, "at most 1024"),
        ([], "expected {"),
        ("{", "Expecting"),
    ],
)
def test_wrong_requests_are_refused(index, body, message):
    async def run():
        async with serving(build_app(Index(index))) as url, aiohttp.ClientSession() as session:
            data = body if body == "{" else json.dumps(body)
            async with session.post(f"{url}/search", data=data) as response:
                refused = response.status, (await response.json())["error"]
            async with session.get(f"{url}/health") as response:
                return refused, await response.json()

    refused, health = asyncio.run(run())
    assert refused[0] == 400 and message in refused[1]
    assert health == {"kind": "bm25", "num_passages": 40}


def test_requests_that_wait_are_searched_together_and_fail_alone():
    sizes: list[int] = []

    class Slow:
        def search(self, queries, k):
            sizes.append(len(queries))
            time.sleep(0.05)
            if "bad" in queries:
                raise ValueError("bad")
            return [[f"{query}{number}" for number in range(k)] for query in queries]

    async def run():
        queue = SearchQueue(Slow())
        searches = [queue.search([str(number)], 1 + number % 2) for number in range(20)]
        good = await asyncio.gather(*searches)
        bad = await asyncio.gather(queue.search(["bad"], 1), return_exceptions=True)
        return good, bad, await queue.search(["after"], 1)

    good, bad, after = asyncio.run(run())
    assert good == [[[f"{number}{k}" for k in range(1 + number % 2)]] for number in range(20)]
    assert isinstance(bad[0], ValueError) and after == [["after0"]]
    assert sizes == [1, 19, 1, 1]


def flaky_app(failures: int, seen: list[int]) -> web.Application:
    """Fails so many requests, each in another way, before it answers."""

    async def search(request: web.Request) -> web.Response:
        queries = (await request.json())["queries"]
        seen.append(len(queries))
        if len(seen) <= failures:
            if len(seen) % 2:
                return web.Response(status=503)
            request.transport.close()
        hits = [[{"id": query, "title": "", "text": query, "score": 1.0}] for query in queries]
        return web.json_response({"results": hits})

    app = web.Application()
    app.add_routes([web.post("/search", search)])
    return app


@pytest.mark.parametrize(("failures", "answered"), [(2, True), (3, False)])
def test_failures_are_retried_and_then_told(failures, answered):
    async def run(seen):
        async with serving(flaky_app(failures, seen)) as url:
            client = RetrievalClient(url)
            try:
                return await asyncio.gather(*(client.search(str(n), 1) for n in range(5)), return_exceptions=True)
            finally:
                await client.close()

    seen: list[int] = []
    results = asyncio.run(run(seen))
    assert seen == [5, 5, 5]  # one request for all five, each time
    if answered:
        assert [passages[0].text for passages in results] == [str(n) for n in range(5)]
    else:
        assert {str(error).partition(": ")[2] for error in results} == {"status 503"}
        assert all("after 3 tries" in str(error) for error in results)


def test_silence_and_strangers_are_named():
    async def silent(request: web.Request) -> web.Response:
        await asyncio.sleep(0.5)

    async def stranger(request: web.Request) -> web.Response:
        return web.Response(text="<html>welcome</html>")

    async def run(handler):
        app = web.Application()
        app.add_routes([web.post("/search", handler)])
        async with serving(app) as url:
            client = RetrievalClient(url, timeout_s=0.05, num_tries=2)
            try:
                await client.search("violin", 1)
            finally:
                await client.close()

    with pytest.raises(RetrievalError, match=r"after 2 tries: no answer within 0\.05 s"):
        asyncio.run(run(silent))
    with pytest.raises(RetrievalError, match=r"expected a retrieval server at .* found something else"):
        asyncio.run(run(stranger))


def test_a_missing_server_is_named_at_once():
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]

    async def run():
        client = RetrievalClient(f"http://127.0.0.1:{port}")
        try:
            await client.search("violin", 1)
        finally:
            await client.close()

    start_s = time.perf_counter()
    with pytest.raises(RetrievalError, match=rf"127\.0\.0\.1:{port}, found none after 3 tries"):
        asyncio.run(run())
    assert time.perf_counter() - start_s < 10


def test_a_cancelled_search_disturbs_nobody():
    async def run(seen):
        async with serving(flaky_app(0, seen)) as url:
            client = RetrievalClient(url)
            first, second = (asyncio.create_task(client.search(text, 1)) for text in ("a", "b"))
            await asyncio.sleep(0)
            first.cancel()
            try:
                return await second
            finally:
                await client.close()

    seen: list[int] = []
    assert asyncio.run(run(seen))[0].text == "b" and seen == [1]
