"""The process groups of the trainer ranks: torch.distributed, Megatron's TP x PP x CP x DP, and one for commands."""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from trace_megatron.config import PolicyConfig
from trace_megatron.errors import UserError
from trace_megatron.policy import cpu

# Workers wait in this group while the driver collects rollouts, which has no upper limit worth guarding.
_COMMAND_TIMEOUT = timedelta(days=30)
# A collective of a training step that takes this long has lost a rank.
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where this process stands."""

    rank: int
    world_size: int
    data_rank: int
    """Index of the data-parallel replica that this rank belongs to."""
    data_size: int
    tensor_size: int
    context_rank: int
    reports: bool
    """True on the ranks of a replica that hold its losses and logprobs, each its own: last stage, tensor rank 0."""
    command_group: dist.ProcessGroup
    """All ranks, gloo."""
    device: torch.device

    @property
    def is_driver(self) -> bool:
        return self.rank == 0


def initialize(config: PolicyConfig, seed: int) -> Ranks:
    """Join the ranks that torchrun started (or be a world of one) and build Megatron's groups.

    Raises UserError unless the number of processes is tensor x pipeline x context x data parallel.
    """
    expected = config.num_ranks
    found = int(os.environ.get("WORLD_SIZE", "1"))
    if found != expected:
        raise UserError(
            f"expected {expected} processes for policy.tensor_parallel {config.tensor_parallel} x pipeline_parallel "
            f"{config.pipeline_parallel} x context_parallel {config.context_parallel} x data_parallel "
            f"{config.data_parallel}, found {found}: start {expected} with torchrun --nproc-per-node, or change the "
            f"four numbers"
        )
    _quiet()
    cpu.install()
    device = _device()
    if not dist.is_initialized():
        _init_process_group(device)
    parallel_state.initialize_model_parallel(
        config.tensor_parallel,
        config.pipeline_parallel,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
        context_parallel_size=config.context_parallel,
        expert_model_parallel_size=config.expert_parallel,
        expert_tensor_parallel_size=1,  # experts are small: whole ones on fewer ranks multiply faster than slices
        distributed_timeout_minutes=int(_COLLECTIVE_TIMEOUT.total_seconds() // 60),
    )
    torch.manual_seed(seed)
    if device.type == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return Ranks(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        context_rank=parallel_state.get_context_parallel_rank(),
        reports=parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0,
        command_group=dist.new_group(backend="gloo", timeout=_COMMAND_TIMEOUT),
        device=device,
    )


def shutdown() -> None:
    """Leave all groups; ``initialize`` may follow with another layout."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def _quiet() -> None:
    """Megatron's remarks on its own old names and on a debugging aid that is off: nothing that a user could act on."""
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed\.c10d_logger")
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)


def _device() -> torch.device:
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    # The ranks of one machine share its cores; torchrun's own default of one thread each would waste the rest.
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // local_ranks, 1))
    return torch.device("cpu")


def _init_process_group(device: torch.device) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if "TRACE_RENDEZVOUS_FILE" in os.environ:  # set by launch/local.py: all ranks are on this machine
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(os.environ["TRACE_RENDEZVOUS_FILE"], world_size)
    elif world_size == 1:  # needs no address
        store = dist.HashStore()
    else:  # torchrun's variables
        dist.init_process_group(backend, timeout=_COLLECTIVE_TIMEOUT)
        return
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_COLLECTIVE_TIMEOUT)
