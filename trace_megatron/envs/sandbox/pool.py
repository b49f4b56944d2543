"""Warm workers that run model-written Python; a state is the code that led to it, and is restored by running it again.

So a state is a small value that any worker can continue, any number of times: forking costs nothing until the fork is
played. Code that depends on time or on fresh randomness may not repeat itself; ``Execution.repeated`` tells.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass, field

from trace_megatron.envs.sandbox.bubblewrap import sandboxed_command, unsafe_command

_START_TIMEOUT_S = 120.0
_SLACK_S = 20.0  # beyond the worker's own limits, for a worker that does not answer at all
_WALL_PER_CPU = 3  # as in worker.py
_MAX_LINE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one snippet."""

    cpu_s: float = 10.0
    """Processor time; the wall-clock limit is three times as long."""
    memory_bytes: int = 1 << 30
    """Address space, of which the interpreter with NumPy and SymPy takes about a quarter."""
    file_bytes: int = 32 << 20
    output_bytes: int = 4_000
    """The rest is cut."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Code that ran to its end, perhaps to an exception: part of the state that it left."""

    code: str
    digest: str
    """Of what it printed."""
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Execution:
    output: str
    error: str | None
    """The traceback, or which limit the code met."""
    cells: tuple[Cell, ...]
    """The state afterwards. A snippet that was ended leaves it as it was."""
    repeated: bool
    """The earlier cells printed what they had printed before."""


class SandboxError(Exception):
    """No worker could be started, or a state could not be restored."""


class Sandbox:
    """Runs snippets on ``num_workers`` processes, one at a time each. For use on one event loop."""

    def __init__(self, limits: Limits, num_workers: int, unsafe: bool = False) -> None:
        """``unsafe``: without bubblewrap. Raises UserError where bubblewrap is wanted and does not work."""
        self._limits = limits
        self._folders: list[str] = []
        self._unsafe = unsafe
        self._command = None if unsafe else sandboxed_command(asdict(limits), disk_bytes=2 * limits.file_bytes)
        self._turns = asyncio.Semaphore(num_workers)
        self._idle: list[asyncio.subprocess.Process] = []
        self.num_started = 0
        """Workers started so far; more than ``num_workers`` if some had to be replaced."""

    async def run(self, cells: tuple[Cell, ...], code: str) -> Execution:
        """Run ``code`` after ``cells``."""
        replay_s = _WALL_PER_CPU * (2 * sum(cell.seconds for cell in cells) + self._limits.cpu_s)
        request = {"earlier": [cell.code for cell in cells], "code": code, "replay_s": replay_s}
        async with self._turns:
            answer = await self._ask(request, replay_s + _WALL_PER_CPU * self._limits.cpu_s + _SLACK_S)
        if not answer["replayed"]:
            raise SandboxError("the code of an earlier turn did not run to its end again")
        if not answer["finished"]:
            return Execution(answer["output"], answer["error"], cells, True)
        *earlier, digest = answer["digests"]
        cell = Cell(code, digest, answer["seconds"])
        repeated = earlier == [cell.digest for cell in cells]
        return Execution(answer["output"], answer["error"], (*cells, cell), repeated)

    async def close(self) -> None:
        """End the workers."""
        while self._idle:
            await _end(self._idle.pop())
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    async def _ask(self, request: dict, timeout_s: float) -> dict:
        worker = self._idle.pop() if self._idle else await self._start()
        try:
            async with asyncio.timeout(timeout_s):
                worker.stdin.write(json.dumps(request).encode() + b"\n")
                await worker.stdin.drain()
                answer = json.loads(await worker.stdout.readline())
        except (TimeoutError, ConnectionError, ValueError) as error:
            await _end(worker)
            raise SandboxError("the worker died or fell silent") from error
        except BaseException:  # cancelled: the answer that is on its way belongs to nobody
            await _end(worker)
            raise
        self._idle.append(worker)
        return answer

    async def _start(self) -> asyncio.subprocess.Process:
        self.num_started += 1
        command, variables = self._command, {}
        if command is None:
            self._folders.append(tempfile.mkdtemp(prefix="trace-python-"))
            command, variables = unsafe_command(asdict(self._limits), self._folders[-1])
        worker = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", ""), **variables},
            limit=_MAX_LINE_BYTES,
        )
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                ready = await worker.stdout.readline()
        except BaseException:
            await _end(worker)
            raise
        if not ready:
            await _end(worker)
            raise SandboxError(f"a worker did not start: run {' '.join(command)!r} to see why")
        return worker


async def _end(worker: asyncio.subprocess.Process) -> None:
    if worker.returncode is None:
        worker.kill()
    worker.stdin.close()
    await worker.stdout.read()  # to the end, or the pipe stays open
    await worker.wait()
