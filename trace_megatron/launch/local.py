"""Start the trainer's ranks on this machine and end them together.

Why not torchrun: its rendezvous store listens on every network interface, and it reports a rank's failure as its own
traceback with exit code 1. Here ranks meet through a file, so nothing listens beyond loopback, and a rank's exit code
(2: a mistake in the input) is the command's. Several machines do use torchrun; the ranks read the same variables.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

POLL_S = 0.1
GRACE_S = 20.0
"""Time for ranks to close their engines after the first one failed."""


def run_ranks(command: Sequence[str], num_ranks: int) -> int:
    """Run ``command`` once per rank and return the first exit code that is not 0, else 0.

    When a rank fails, or the user interrupts, the others receive SIGTERM and, after a while, SIGKILL.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the ranks end with us
    with tempfile.TemporaryDirectory(prefix="trace-megatron-") as folder:
        ranks = [subprocess.Popen(command, env=_environment(rank, num_ranks, folder)) for rank in range(num_ranks)]
        try:
            while True:
                codes = [rank.poll() for rank in ranks]
                failed = next((code for code in codes if code), 0)
                if failed or all(code == 0 for code in codes):
                    return failed if failed >= 0 else 128 - failed
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        finally:
            _end(ranks)


def _environment(rank: int, num_ranks: int, folder: str) -> dict[str, str]:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    return os.environ | {
        **{name: str(value) for name, value in ranks.items()},
        "TRACE_RENDEZVOUS_FILE": os.path.join(folder, "rendezvous"),
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    }


def _end(ranks: Sequence[subprocess.Popen]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    deadline = time.monotonic() + GRACE_S
    for rank in ranks:
        try:
            rank.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
