"""Weights, optimizer state and step of the policy in a folder that another TP x PP x DP can load as well.

A folder holds safetensors of every rank and ``policy.json``, written last, which says what the checkpoint is of.
Learning rate and other settings come from the configuration of the run that loads it. There is no random state to
keep: no part of a policy step draws random numbers.

A save is taken at once, into host memory, and written by a thread of each rank while the run goes on.
"""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import is_main_replica

from trace_megatron.background import in_background
from trace_megatron.config import PolicyConfig
from trace_megatron.errors import UserError
from trace_megatron.policy.hf_config import HFModelConfig
from trace_megatron.policy.optimizer import gather_state, restore_state, restore_step, state_names
from trace_megatron.policy.run_checkpoint import DESCRIPTION, check_files
from trace_megatron.policy.sharded_files import read_shards, shards_to_write, write_shards
from trace_megatron.policy.trainer import Trainer

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint on its way to the disk."""

    folder: Path
    partial: Path
    """Where it is until it is complete."""
    description: dict[str, Any]
    written: Future[None]
    """This rank's file."""


def start_save(folder: str | Path, trainer: Trainer, description: dict[str, Any]) -> Save:
    """Collective over all ranks: copy weights, optimizer state and step as they are now, and begin to write them."""
    folder = Path(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    rank = dist.get_rank()
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that died while it saved
        partial.mkdir(parents=True)
    dist.barrier()
    state = {}
    for name, place in _places(trainer).items():
        state[name] = replace(place, data=_on_host(place, place.data))
        for kind, values in gather_state(trainer.optimizer, place.data).items():
            state[f"{name}/{kind}"] = _of_optimizer(place, kind, _on_host(place, values))
    tensors = shards_to_write(state)
    written = in_background(lambda: write_shards(tensors, partial, rank))
    return Save(folder, partial, {**description, "step": trainer.step}, written)


def finish_save(save: Save, wait: bool, group: dist.ProcessGroup) -> bool:
    """Collective over all ranks: let ``folder`` appear, complete. False: not ``wait``, and some rank still writes."""
    unwritten = torch.tensor(0 if wait else int(not save.written.done()))
    dist.all_reduce(unwritten, group=group)
    if unwritten:
        return False
    save.written.result()
    dist.barrier(group=group)
    if dist.get_rank() == 0:
        files = {path.name: path.stat().st_size for path in sorted(save.partial.iterdir())}
        (save.partial / DESCRIPTION).write_text(json.dumps({**save.description, "files": files}, indent=1))
        os.rename(save.partial, save.folder)
    dist.barrier(group=group)
    return True


@torch.no_grad()
def load(folder: str | Path, trainer: Trainer) -> None:
    """On every rank, after ``check``: restore what a save wrote."""
    places, state = _places(trainer), {}
    for name, place in places.items():
        state[name] = place
        for kind in state_names(place.data):
            empty = torch.empty(place.data.shape, device="meta")
            state[f"{name}/{kind}"] = _of_optimizer(place, kind, empty)
    loaded = read_shards(state, Path(folder))
    for name, place in places.items():
        place.data.copy_(loaded[name])
        kinds = state_names(place.data)
        restore_state(trainer.optimizer, place.data, {kind: loaded[f"{name}/{kind}"] for kind in kinds})
    trainer.step = json.loads((Path(folder) / DESCRIPTION).read_text())["step"]
    restore_step(trainer.optimizer, trainer.step)


def describe(hf: HFModelConfig, policy: PolicyConfig) -> dict[str, Any]:
    """What a checkpoint must agree on to be loaded; JSON values."""
    model = {name: value for name, value in asdict(hf).items() if name not in ("dtype", "max_positions")}
    return {"format": _FORMAT, "model": json.loads(json.dumps(model)), "dtype": policy.dtype}


def check(folder: str | Path, expected: dict[str, Any]) -> None:
    """Raise UserError unless ``folder`` is a whole checkpoint of the policy that ``expected`` describes."""
    folder = Path(folder)
    path = folder / DESCRIPTION
    if not path.is_file():
        raise UserError(
            f"expected a policy checkpoint in '{folder}', found no {DESCRIPTION}: choose another checkpoint"
        )
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"expected JSON in '{path}', found: {error}: choose another checkpoint") from error
    found = found if isinstance(found, dict) else {}
    for name, value in _flat(expected).items():
        other = _flat(found).get(name)
        if other != value:
            raise UserError(
                f"expected a checkpoint with {name} {value}, found {other} in '{folder}': "
                "choose a checkpoint of this model and these options"
            )
    check_files(folder, found["files"])


def _places(trainer: Trainer) -> dict[str, Any]:
    """Megatron's description of where each parameter of this rank (``data``) lies in a global tensor (``key``)."""
    return {
        f"{index}.{name}": place
        for index, chunk in enumerate(trainer.model_chunks)
        for name, place in chunk.sharded_state_dict().items()
        if isinstance(place.data, torch.nn.Parameter)  # the rest is FP8 state of Transformer Engine, empty here
    }


def _on_host(place: Any, values: torch.Tensor) -> torch.Tensor:
    """A copy in host memory where this rank is the one that writes it; elsewhere no numbers at all."""
    if not is_main_replica(place.replica_id):
        return torch.empty(values.shape, dtype=values.dtype, device="meta")
    return values.detach().to("cpu", copy=True)


def _of_optimizer(place: Any, kind: str, values: torch.Tensor) -> Any:
    """Optimizer state lies where its parameter does; a fused parameter is cut by the same factory."""
    dtype = {"dtype": values.dtype} if isinstance(place, ShardedTensor) else {}
    return replace(place, key=f"optimizer.{kind}.{place.key}", data=values, **dtype)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
