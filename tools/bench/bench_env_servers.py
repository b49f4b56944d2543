"""What environment servers cost and bring: the same calls in this process and over loopback.

    python tools/bench/bench_env_servers.py [--rounds 5] [--calls 2000] [--runs 120]

The calculator's steps take microseconds, so what a call takes by a server is its overhead: one after the other, and 64
at a time. Then short snippets of the Python tool in bubblewrap: two workers here, and one on each of two servers. Every
round measures all of them in turn; medians over the rounds are printed.
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

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
        asyncio.run(measure(arguments, cheap, sandboxes))


@contextmanager
def servers(config: EnvConfig, count: int) -> Iterator[list[str]]:
    """The URLs of `trace-megatron serve-env` processes."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump({"env": {"name": config.name, "params": config.params}}, file)
        file.flush()
        command = [sys.executable, "-m", "trace_megatron.cli", "serve-env", "-c", file.name, "--port", "0"]
        started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
        try:
            yield [server.stdout.readline().split()[-1] for server in started]
            rss_mib = [psutil.Process(server.pid).memory_info().rss / 2**20 for server in started]
            print(f"{config.name}: servers of {', '.join(f'{size:.0f}' for size in rss_mib)} MiB resident")
        finally:
            for server in started:
                server.terminate()
                server.wait()


async def measure(arguments: argparse.Namespace, cheap: list[str], sandboxes: list[str]) -> None:
    calculators = {
        "here": build_environment(CALCULATOR),
        "one server": build_environment(replace(CALCULATOR, urls=tuple(cheap[:1]))),
        "two servers": build_environment(replace(CALCULATOR, urls=tuple(cheap))),
    }
    task = Task("t", (), {"answer": 20})
    found: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        for name, environment in calculators.items():
            for width in (1, 64):
                rate = await calls_per_s(environment, task, "2+3", arguments.calls, width)
                found.setdefault(f"calculator, {name}, {width} at a time", []).append(rate)
    tools = {
        "two workers here": build_environment(replace(PYTHON, params={"workers": 2})),
        "one on each of two servers": build_environment(replace(PYTHON, urls=tuple(sandboxes))),
    }
    task = Task("t", (), {"answers": ["1"]})
    for number in range(arguments.rounds + 1):
        for name, environment in tools.items():
            rate = await calls_per_s(environment, task, SNIPPET, arguments.runs, 8)
            if number:  # the first round starts the workers
                found.setdefault(f"python_tool, {name}, 8 at a time", []).append(rate)
    for environment in (*calculators.values(), *tools.values()):
        await environment.close()
    for name, rates in found.items():
        median = statistics.median(rates)
        print(
            f"{name}: {median:,.0f} calls/s ({1000 / median:.3f} ms each), {min(rates):,.0f} to {max(rates):,.0f} in "
            f"{len(rates)} rounds"
        )


async def calls_per_s(environment: Environment, task: Task, action: str, count: int, width: int) -> float:
    """Steps from states of their own, ``width`` at a time."""
    states = [await environment.reset(task) for _ in range(width)]

    async def play(state: object) -> None:
        for _ in range(count // width):
            await environment.step(state, action)

    start_s = time.perf_counter()
    await asyncio.gather(*map(play, states))
    return count // width * width / (time.perf_counter() - start_s)


if __name__ == "__main__":
    main()
