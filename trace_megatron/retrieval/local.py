"""A retrieval server of our own on this machine: started when it is needed, ended with its owner."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path

from trace_megatron.retrieval.client import RetrievalError

_START_TIMEOUT_S = 300.0  # a dense index loads a model; a large one is read from a cold disk
_STOP_TIMEOUT_S = 5.0
_GREETING = "listening on "


class LocalServer:
    """A server process over an index folder, on a free loopback port."""

    def __init__(self, index: str | Path) -> None:
        self._index = str(index)
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the server

    async def start(self) -> str:
        """Start it and return its URL; raises RetrievalError with what it said if it does not come up."""
        command = [sys.executable, "-m", "trace_megatron.retrieval.server", "--index", self._index]
        command += ["--port", "0", "--owner", str(os.getpid())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._log, close_fds=True
        )
        line = await asyncio.to_thread(self._first_line)
        if not line.startswith(_GREETING):
            raise RetrievalError(self.failure() or f"the retrieval server did not start within {_START_TIMEOUT_S:g} s")
        return line.removeprefix(_GREETING)

    def failure(self) -> str:
        """How the process ended, with its last words; empty while it runs."""
        if self._process is None or self._process.poll() is None:
            return ""
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip().splitlines()
        return f"the retrieval server ended with exit code {self._process.returncode}: {' '.join(words[-1:])}"

    async def stop(self) -> None:
        """End it, and wait for that."""
        if self._process is not None:
            await asyncio.to_thread(self._end, self._process)
            self._process = None
        self._log.close()

    def _first_line(self) -> str:
        """What the process says when it is up; empty if it ends, or takes too long."""
        process = self._process
        readable, _, _ = select.select([process.stdout], [], [], _START_TIMEOUT_S)
        line = process.stdout.readline().decode().strip() if readable else ""
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_TIMEOUT_S if readable else 0)  # an ending process closes stdout before it has ended
            self._end(process)
        return line

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
