"""What every process of an engine runs first; it stands in for the trainer's main module (engine_process.py)."""

from __future__ import annotations

import logging
import multiprocessing.util
import os
import select
import signal
import threading
import warnings

OWNER_VARIABLE = "TRACE_MEGATRON_ENGINE_OWNER"
"""Process id of the engine's owner."""


def _end_with(owner: int) -> None:
    """Kill this process when ``owner`` ends, however it ends: vLLM's core would wait for it for ever."""
    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return

    def watch() -> None:
        select.select([handle], [], [])  # readable once the process has ended
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="engine-owner", daemon=True).start()


if __name__ == "__mp_main__":
    logging.getLogger("vllm").setLevel(logging.ERROR)  # it speaks before it reads VLLM_LOGGING_LEVEL
    warnings.simplefilter("ignore")
    # After vLLM and every finalizer have cleaned up: what follows, the interpreter's own end, hangs for seconds.
    multiprocessing.util.Finalize(None, os._exit, args=(1,), exitpriority=-1000)
    _end_with(int(os.environ[OWNER_VARIABLE]))
