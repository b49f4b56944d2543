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
from pathlib import Path

OWNER_VARIABLE = "TRACE_MEGATRON_ENGINE_OWNER"
"""Process id of the engine's owner."""

FOLDER_VARIABLE = "TRACE_MEGATRON_ENGINE_FOLDER"
"""The engine's private folder of temporary files and sockets."""


def shared_files(pid: int) -> set[Path]:
    """The named shared memory of a process, semaphores and queues: one that is killed leaves it behind."""
    maps = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    # By inode: a semaphore is mapped under a name that it had before its last.
    inodes = {int(fields[4]) for fields in maps if fields[5:] and fields[5].startswith("/dev/shm/")}
    with os.scandir("/dev/shm") as entries:
        return {Path(entry.path) for entry in entries if entry.inode() in inodes}


def _end_with(owner: int, folder: str) -> None:
    """End this process with ``owner``, however that ends, and leave no file: vLLM would wait for it for ever."""

    def end() -> None:
        for path in shared_files(os.getpid()):
            path.unlink(missing_ok=True)
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
