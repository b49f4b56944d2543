"""An engine's processes: what they find when they start, and that nothing of them is left."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import psutil
import torch

from trace_megatron.config import EngineConfig
from trace_megatron.rollout import engine_main

_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "ROLE_", "GROUP_")
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def engine_environment(config: EngineConfig, folder: str, devices: Sequence[int] = ()) -> dict[str, str | None]:
    """What the engine's processes find in their environment; None: removed."""
    changes: dict[str, str | None] = {
        name: None
        for name in os.environ
        # A trainer rank's place in its own process group is none of the engine's business.
        if name in _LAUNCHER_VARIABLES or name.startswith(_LAUNCHER_PREFIXES)
    }
    changes |= {
        engine_main.OWNER_VARIABLE: str(os.getpid()),
        engine_main.FOLDER_VARIABLE: folder,
        "VLLM_RPC_BASE_PATH": folder,
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "OMP_NUM_THREADS": None,  # torchrun's 1 is meant for the trainer
    }
    if torch.cuda.is_available():
        if devices:  # CUDA's own names of those that this process sees
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            names = visible.split(",") if visible else [str(device) for device in range(torch.cuda.device_count())]
            changes["CUDA_VISIBLE_DEVICES"] = ",".join(names[device] for device in devices)
        return changes
    cores = sorted(os.sched_getaffinity(0))
    threads = config.threads or max(1, len(cores) // (config.tensor_parallel * config.num_engines))
    # Without binding: the trainer's ranks live on the same cores, and vLLM's default would leave one of them idle.
    changes |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    # Threads that wait must sleep: where another process wants a core, spinning cost 5 times the speed.
    changes["OMP_WAIT_POLICY"] = "passive"
    # Weights are packed by threads: in heaps of their own, freed memory would go back to the system at every push.
    changes["MALLOC_ARENA_MAX"] = "1"
    # All that is compiled in eager mode is a token's rank among the logits: 10 s at the first request for 1% of a step.
    changes |= {"TORCH_COMPILE_DISABLE": "1", "TMPDIR": folder}
    if config.tensor_parallel == 1:
        # The model runs in the engine's own process: a third process would double the start-up.
        changes["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return changes


@contextmanager
def environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Apply ``changes`` and undo them, and whatever else was changed meanwhile (vLLM sets LD_PRELOAD and more)."""
    before = dict(os.environ)
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


@contextmanager
def stand_in_main() -> Iterator[None]:
    """Show multiprocessing another main module: it would import the trainer's, and all of the trainer, into the engine.

    The one shown quietens the new process and ties its life to ours.
    """
    main = sys.modules["__main__"]
    stand_in = types.ModuleType("__main__")
    stand_in.__spec__ = importlib.util.find_spec(engine_main.__name__)
    sys.modules["__main__"] = stand_in
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def processes_below(pids: Iterable[int]) -> list[psutil.Process]:
    """The living processes among ``pids``, and all their descendants."""
    family = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            family += [process, *process.children(recursive=True)]
    return family


def kill(family: Sequence[psutil.Process], timeout_s: float) -> None:
    """End what is still alive of ``family``, and wait for it."""
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=timeout_s)
