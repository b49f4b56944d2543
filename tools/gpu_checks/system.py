"""The whole installation on the user's hardware. Every check is a process of its own with a time limit."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from .results import Check, Outcome, SkippedError

ROOT = Path(__file__).parents[2]
_CASES = Path(__file__).parent
_PACKAGES = ("torch", "megatron-core", "transformer-engine", "vllm", "transformers")
_IMPORTS = {"megatron-core": "megatron.core", "vllm": "vllm", "transformers": "transformers"}

# One step of TRACE on one device; everything else as in the quickstart.
_STEP = {
    "run.steps": 1,
    "policy.pipeline_parallel": 1,
    "budget.candidates": 8,
    "budget.rollouts": 8,
    "predictor.dtype": "bfloat16",
    "engine.gpu_memory_utilization": 0.3,
    "validation.every": 0,
}

_OFFLOADED = {
    "modules' activations": {"policy.offload_modules": "[core_attn, mlp_norm]"},
    "layers' activations": {"policy.offload_layers": 2},
    "half of the optimizer": {"optimizer.offload_share": 0.5},
}
_NEED_TRANSFORMER_ENGINE = {"policy.offload_layers", "optimizer.offload_share"}
_NONE: Mapping[str, object] = {}


def system_checks(model: Path) -> list[Check]:
    """``model``: an HF folder with a tokenizer, small."""
    return [
        Check("system: packages", check_packages),
        Check("system: engine starts, sleeps and wakes", functools.partial(check_engine, model)),
        *(
            Check(f"system: weights live by {backend}", functools.partial(check_sync, backend))
            for backend in ("trace_megatron_shared_memory", "ipc", "nccl")
        ),
        Check("system: one TRACE step", functools.partial(check_step, model, False)),
        Check("system: one TRACE step, engine and trainer in turns", functools.partial(check_step, model, True)),
        *(
            Check(f"system: one TRACE step, {name} on the host", functools.partial(check_step, model, False, options))
            for name, options in _OFFLOADED.items()
        ),
    ]


def check_packages() -> Outcome:
    found = {name: _version(name) for name in _PACKAGES}
    missing = [name for name, module in _IMPORTS.items() if importlib.util.find_spec(module.split(".")[0]) is None]
    text = ", ".join(f"{name} {version or 'missing'}" for name, version in found.items())
    if missing:
        raise RuntimeError(f"expected {', '.join(missing)} to be importable, found {text}: make install")
    return Outcome(text)


def check_engine(model: Path) -> Outcome:
    _need_model(model)
    return Outcome(run_case([str(_CASES / "engine_case.py"), str(model)], 600.0))


def check_sync(backend: str) -> Outcome:
    if backend == "nccl" and torch.cuda.device_count() < 2:
        raise SkippedError(f"needs an engine on a second GPU, found {torch.cuda.device_count()}")
    return Outcome(run_case([str(_CASES / "sync_case.py"), backend], 600.0))


def step_settings(model: Path, folder: str, colocated: bool, options: Mapping[str, object] = _NONE) -> list[str]:
    """What ``trace-megatron train -c configs/quickstart.yaml`` is called with."""
    own = {
        "policy.model": model,
        "predictor.model": model,
        "run.output_dir": folder,
        "engine.colocated": str(colocated).lower(),
    }
    return [f"{name}={value}" for name, value in (_STEP | own | dict(options)).items()]


def check_step(model: Path, colocated: bool, options: Mapping[str, object] = _NONE) -> Outcome:
    """``colocated``: the engine sleeps while the trainer trains. ``options``: more ``section.key`` of the run."""
    _need_model(model)
    if _NEED_TRANSFORMER_ENGINE & set(options) and importlib.util.find_spec("transformer_engine") is None:
        raise SkippedError("needs Transformer Engine, found none")
    with tempfile.TemporaryDirectory() as folder:
        settings = step_settings(model.resolve(), folder, colocated, options)
        config = str(ROOT / "configs/quickstart.yaml")
        run_case(["-m", "trace_megatron.cli", "train", "-c", config, *settings], 1200.0)
        metrics = list(Path(folder).rglob("metrics.jsonl"))
        if len(metrics) != 1 or not metrics[0].read_text().strip():
            raise RuntimeError("expected one step in metrics.jsonl, found none")
        return Outcome("a step with its metrics")


def run_case(arguments: list[str], limit_s: float) -> str:
    """The last line that this Python prints. Raises RuntimeError with the end of what it said; ends its family."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"expected an end within {limit_s:.0f} s, found none") from None
    finally:
        _end_family(process)
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {said[-1500:]}")
    return said.strip().splitlines()[-1] if said.strip() else ""


def _end_family(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _need_model(model: Path) -> None:
    if not (model / "config.json").is_file():
        raise SkippedError(f"needs an HF folder, found none at {model}: tools/fetch_smollm2.py, or --model FOLDER")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
