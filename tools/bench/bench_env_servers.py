"""What environment servers cost and bring: the same calls in this process and over loopback.

    python tools/bench/bench_env_servers.py [--rounds 5] [--calls 2000] [--runs 120]

The calculator's steps take microseconds, so what a call takes by a server is its overhead: one after the other, and 64
at a time. Then short snippets of the Python tool in bubblewrap: two workers here, and one on each of two servers. Every
round measures all of them in turn; medians over the rounds are printed, with the processor time that this process and
the servers spent on a call, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import psutil

from trace_megatron.config import EnvConfig
from trace_megatron.envs import build_environment
from trace_megatron.rollout.env import Environment
from trace_megatron.types import Task

CALCULATOR = EnvConfig("calculator")
PYTHON = EnvConfig("python_tool", {"workers": 1})
SNIPPET = "```python\nprint(sum(n * n for n in range(1000)))\n```"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=120)
    arguments = parser.parse_args()
    print(f"load average before: {psutil.getloadavg()[0]:.1f} on {psutil.cpu_count()} cores")
    with servers(CALCULATOR, 2) as cheap, servers(PYTHON, 2) as sandboxes:
        for line in asyncio.run(measure(arguments, cheap, sandboxes)):
            print(line)


@dataclass(frozen=True)
class Server:
    url: str
    process: psutil.Process


@contextmanager
def servers(config: EnvConfig, count: int) -> Iterator[list[Server]]:
    """`trace-megatron serve-env` processes."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump({"env": {"name": config.name, "params": config.params}}, file)
        file.flush()
        command = [sys.executable, "-m", "trace_megatron.cli", "serve-env", "-c", file.name, "--port", "0"]
        started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
        try:
            yield [Server(server.stdout.readline().split()[-1], psutil.Process(server.pid)) for server in started]
            rss_mib = [psutil.Process(server.pid).memory_info().rss / 2**20 for server in started]
            print(f"{config.name}: servers of {', '.join(f'{size:.0f}' for size in rss_mib)} MiB resident")
        finally:
            for server in started:
                server.terminate()
                server.wait()


async def measure(arguments: argparse.Namespace, cheap: Sequence[Server], sandboxes: Sequence[Server]) -> list[str]:
    """A line for every way of calling."""
    number, tool = Task("t", (), {"answer": 20}), Task("t", (), {"answers": ["1"]})
    ways = [
        Way(f"calculator, {name}, {width} at a time", environment, used, number, "2+3", arguments.calls, width)
        for name, environment, used in (
            ("here", build_environment(CALCULATOR), []),
            ("one server", served(CALCULATOR, cheap[:1]), cheap[:1]),
            ("two servers", served(CALCULATOR, cheap), cheap),
        )
        for width in (1, 64)
    ]
    ways += [
        Way(f"python_tool, {name}, 8 at a time", environment, used, tool, SNIPPET, arguments.runs, 8)
        for name, environment, used in (
            ("two workers here", build_environment(replace(PYTHON, params={"workers": 2})), []),
            ("one on each of two servers", served(PYTHON, sandboxes), sandboxes),
        )
    ]
    for way in ways:
        await way.play()  # connections, and workers that start
    found = [[await way.play() for way in ways] for _ in range(arguments.rounds)]
    for way in ways:
        await way.environment.close()
    return [way.describe([row[index] for row in found]) for index, way in enumerate(ways)]


def served(config: EnvConfig, used: Sequence[Server]) -> Environment:
    return build_environment(replace(config, urls=tuple(server.url for server in used)))


@dataclass(frozen=True)
class Way:
    """``count`` steps, ``width`` at a time from states of their own."""

    name: str
    environment: Environment
    servers: Sequence[Server]
    task: Task
    action: str
    count: int
    width: int

    async def play(self) -> tuple[float, float, float]:
        """Milliseconds a call: by the clock, of this process and of the servers'."""
        states = [await self.environment.reset(self.task) for _ in range(self.width)]

        async def walk(state: object) -> None:
            for _ in range(self.count // self.width):
                await self.environment.step(state, self.action)

        before = (time.perf_counter(), time.process_time(), self._servers_s())
        await asyncio.gather(*map(walk, states))
        after = (time.perf_counter(), time.process_time(), self._servers_s())
        calls = self.count // self.width * self.width
        return tuple(1000 * (end - start) / calls for start, end in zip(before, after, strict=True))

    def _servers_s(self) -> float:
        return sum(sum(server.process.cpu_times()[:2]) for server in self.servers)

    def describe(self, rounds: Sequence[tuple[float, float, float]]) -> str:
        clock, here, there = (statistics.median(column) for column in zip(*rounds, strict=True))
        return (
            f"{self.name}: {clock:.3f} ms a call ({1000 / clock:,.0f} calls/s); processor time {here:.3f} ms here, "
            f"{there:.3f} ms there"
        )


if __name__ == "__main__":
    main()
