"""Snippets per second of the sandboxed interpreter: short ones, states of several cells, and SymPy.

python tools/bench/bench_sandbox.py [--workers 2] [--snippets 200] [--unsafe]
"""

from __future__ import annotations

import argparse
import asyncio
import time

import psutil

from trace_megatron.envs.sandbox.pool import Cell, Limits, Sandbox

SHORT = "import math\nprint(math.factorial({n}))"
SYMPY = "import sympy\nx = sympy.symbols('x')\nprint(sympy.factor(x**2 - {n}**2))"
CASES = {
    "short": ((), SHORT),
    "short, after 8 earlier cells": ((SHORT,) * 8, SHORT),
    "SymPy": ((), SYMPY),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--snippets", type=int, default=200)
    parser.add_argument("--unsafe", action="store_true", help="without bubblewrap")
    arguments = parser.parse_args()
    print(f"load average before: {psutil.getloadavg()[0]:.1f} on {psutil.cpu_count()} cores")
    asyncio.run(measure(arguments))


async def measure(arguments: argparse.Namespace) -> None:
    sandbox = Sandbox(Limits(), arguments.workers, arguments.unsafe)
    try:
        start_s = time.perf_counter()
        await asyncio.gather(*(sandbox.run((), "1") for _ in range(arguments.workers)))
        print(f"{arguments.workers} workers up in {time.perf_counter() - start_s:.1f} s")
        for name, (earlier, code) in CASES.items():
            cells = tuple(Cell(text.format(n=n), "", 0.1) for n, text in enumerate(earlier))
            start_s = time.perf_counter()
            runs = await asyncio.gather(
                *(sandbox.run(cells, code.format(n=n)) for n in range(1, arguments.snippets + 1))
            )
            seconds = time.perf_counter() - start_s
            failed = sum(run.error is not None for run in runs)
            print(f"{name}: {arguments.snippets / seconds:.0f} snippets/s, {failed} failed")
    finally:
        await sandbox.close()


if __name__ == "__main__":
    main()
