"""What every process of an engine runs first; it stands in for the trainer's main module (engine_process.py)."""

from __future__ import annotations

import logging
import multiprocessing.util
import os
import select
import shutil
import signal
import threading
import warnings

OWNER_VARIABLE = "TRACE_MEGATRON_ENGINE_OWNER"
"""Process id of the engine's owner."""

FOLDER_VARIABLE = "TRACE_MEGATRON_ENGINE_FOLDER"
"""The engine's private folder of temporary files and sockets."""


def _end_with(owner: int, folder: str) -> None:
    """End this process and remove ``folder`` when ``owner`` ends, however it ends: vLLM would wait for it for ever."""

    def end() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def watch() -> None:
        select.select([handle], [], [])  # readable once the process has ended
        end()

    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:
        end()
    threading.Thread(target=watch, name="engine-owner", daemon=True).start()


if __name__ == "__mp_main__":
    logging.getLogger("vllm").setLevel(logging.ERROR)  # it speaks before it reads VLLM_LOGGING_LEVEL
    warnings.simplefilter("ignore")
    # After vLLM and every finalizer have cleaned up: what follows, the interpreter's own end, hangs for seconds.
    multiprocessing.util.Finalize(None, os._exit, args=(1,), exitpriority=-1000)
    _end_with(int(os.environ[OWNER_VARIABLE]), os.environ[FOLDER_VARIABLE])
