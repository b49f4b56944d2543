"""A few processes that judge mathematical answers. One that takes too long is ended, and its answer counts as wrong.

Processes, because nothing else stops arithmetic on huge integers, and because math-verify's own time limit works in
the main thread alone.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import select
import subprocess
import sys
import threading
from pathlib import Path

from trace_megatron.errors import UserError

JUDGE = Path(__file__).with_name("math_judge.py")
_TIMEOUT_S = 60.0  # the judge's own limits, in processor time, come first
_START_TIMEOUT_S = 120.0  # importing SymPy on a busy machine
_NUM_JUDGES = max(1, min(4, os.cpu_count() or 1))


class MathPool:
    """Threads take turns at the judges, which start when they are needed."""

    def __init__(self, num_judges: int = _NUM_JUDGES, timeout_s: float = _TIMEOUT_S) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise UserError(
                "expected the package math-verify to compare mathematical answers, found none: "
                "pip install 'trace-megatron[math]'"
            )
        self._timeout_s = timeout_s
        self._slots = threading.Semaphore(num_judges)
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._owner = os.getpid()
        atexit.register(self.close)

    def is_equal(self, prediction: str, gold: str) -> bool:
        """Ask a judge; False where it finds no answer in time."""
        with self._slots:
            judge = self._take()
            try:
                judge.stdin.write(json.dumps([prediction, gold]).encode() + b"\n")
                judge.stdin.flush()
                answer = _read_line(judge, self._timeout_s)
            except BrokenPipeError:
                answer = b""
            if not answer:
                _end(judge)
                return False
            with self._lock:
                self._idle.append(judge)
            return json.loads(answer)

    def close(self) -> None:
        if os.getpid() != self._owner:  # a fork's copy
            return
        with self._lock:
            judges, self._idle = self._idle, []
        for judge in judges:
            _end(judge)

    def _take(self) -> subprocess.Popen[bytes]:
        with self._lock:
            while self._idle:
                judge = self._idle.pop()
                if judge.poll() is None:
                    return judge
        # -P: the folder's modules must not shadow packages of the same names.
        judge = subprocess.Popen([sys.executable, "-P", JUDGE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if not _read_line(judge, _START_TIMEOUT_S):
            _end(judge)
            raise OSError(f"the judge of mathematical answers did not start: run {sys.executable} {JUDGE} to see why")
        return judge


def _read_line(judge: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """One short line, empty if none comes in time."""
    ready, _, _ = select.select([judge.stdout], [], [], timeout_s)
    return judge.stdout.readline() if ready else b""


def _end(judge: subprocess.Popen[bytes]) -> None:
    judge.kill()
    judge.stdin.close()
    judge.stdout.close()
    judge.wait()
