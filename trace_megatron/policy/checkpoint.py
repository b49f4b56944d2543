"""Weights, optimizer state and step of the policy, through Megatron's distributed checkpointing.

A folder holds safetensors of every rank, the optimizer's numbers that are no tensors (``common.pt``, which torch reads
with its safe subset of pickle), and ``policy.json``, written last, which says what the checkpoint is of. It can be
loaded at another TP x PP x DP. There is no random state to keep: no part of a policy step draws random numbers.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from trace_megatron.config import OptimizerConfig, PolicyConfig
from trace_megatron.errors import UserError
from trace_megatron.policy.hf_config import HFModelConfig
from trace_megatron.policy.sharded_files import SafetensorsLoad, SafetensorsSave
from trace_megatron.policy.trainer import Trainer

_FORMAT = 1
_DESCRIPTION = "policy.json"
# Optimizer state by parameter, whatever the ranks: the one layout of the distributed optimizer that can be resharded.
_SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}


def save(folder: str | Path, trainer: Trainer, description: dict[str, Any]) -> None:
    """Collective over all ranks: write a new ``folder``, which appears complete or not at all."""
    folder = Path(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that died while it saved
        partial.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_state(trainer, is_loading=False), str(partial), sharded_strategy=SafetensorsSave())
    dist.barrier()
    if dist.get_rank() == 0:
        files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
        (partial / _DESCRIPTION).write_text(json.dumps({**description, "files": files}, indent=1))
        os.rename(partial, folder)
    dist.barrier()


def load(folder: str | Path, trainer: Trainer) -> None:
    """Collective over all ranks, after ``check``: restore what ``save`` wrote."""
    state = dist_checkpointing.load(_state(trainer, is_loading=True), str(folder), sharded_strategy=SafetensorsLoad())
    for index, chunk in enumerate(trainer.model_chunks):
        chunk.load_state_dict(state[f"model{index}"], strict=False)
    trainer.step = state["step"]
    _load_optimizer(trainer, state["optimizer"])


def describe(hf: HFModelConfig, policy: PolicyConfig, optimizer: OptimizerConfig) -> dict[str, Any]:
    """What a checkpoint must agree on to be loaded; JSON values."""
    model = {name: value for name, value in asdict(hf).items() if name not in ("dtype", "max_positions")}
    return {
        "format": _FORMAT,
        "model": json.loads(json.dumps(model)),
        "dtype": policy.dtype,
        "distributed_optimizer": optimizer.distributed,
    }


def check(folder: str | Path, expected: dict[str, Any]) -> None:
    """Raise UserError unless ``folder`` is a whole checkpoint of the policy that ``expected`` describes."""
    folder = Path(folder)
    path = folder / _DESCRIPTION
    if not path.is_file():
        raise UserError(
            f"expected a policy checkpoint in '{folder}', found no {_DESCRIPTION}: choose another checkpoint"
        )
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"expected JSON in '{path}', found: {error}: choose another checkpoint") from error
    for name, value in _flat(expected).items():
        other = _flat(found).get(name)
        if other != value:
            raise UserError(
                f"expected a checkpoint with {name} {value}, found {other} in '{folder}': "
                "choose a checkpoint of this model and these options"
            )
    for name, size in found["files"].items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            raise UserError(f"expected '{file}' of {size} bytes, found it missing or cut: choose another checkpoint")


def _state(trainer: Trainer, is_loading: bool) -> dict[str, Any]:
    """Megatron's description of this rank's part of every global tensor."""
    state: dict[str, Any] = {"step": trainer.step}
    sharded = [chunk.sharded_state_dict() for chunk in trainer.model_chunks]
    state["optimizer"] = trainer.optimizer.sharded_state_dict(
        {f"model{index}": chunk for index, chunk in enumerate(sharded)}, is_loading=is_loading, metadata=_SHARDING
    )
    for index, chunk in enumerate(sharded):
        # FP8 state of Transformer Engine's layers: empty at our dtypes, and stored as pickles.
        state[f"model{index}"] = {name: value for name, value in chunk.items() if not name.endswith("_extra_state")}
    return state


def _load_optimizer(trainer: Trainer, state: dict[str, Any]) -> None:
    """Megatron's own way, but for the step count that torch's AdamW keeps beside every parameter's moments."""
    (optimizer,) = trainer.optimizer.chained_optimizers
    by_parameter = state.pop("param_state", None)  # of the distributed optimizer alone
    optimizer.load_state_dict(state)
    moments = [values for values in optimizer.optimizer.state.values() if "step" in values]
    if by_parameter is not None:
        # Megatron would look for the count among the stored tensors, where it leaves it out.
        steps = [values.pop("step") for values in moments]
        optimizer.load_parameter_state_from_fully_reshardable(by_parameter)
        for values, step in zip(moments, steps, strict=True):
            values["step"] = step
    for values in moments:
        # Megatron hands one tensor to all parameters, and each of them would count it up.
        values["step"] = torch.full_like(values["step"], trainer.step)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
