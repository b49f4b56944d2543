"""Megatron's Adam for the policy, and its state by parameter, whoever of the replicas holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from trace_megatron.config import OptimizerConfig
from trace_megatron.policy.offload import make_state, optimizer_options

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MAIN = "main"
"""The float32 weight behind a bfloat16 one."""


def build_optimizer(replicas: Sequence[DistributedDataParallel], config: OptimizerConfig) -> MegatronOptimizer:
    """Adam with decoupled weight decay over float32 weights, sharded over replicas where ``config.distributed``."""
    dtype = replicas[0].module.config.params_dtype
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.learning_rate,
            min_lr=config.min_learning_rate,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            clip_grad=config.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=config.distributed,
            **optimizer_options(config),
        ),
        list(replicas),
    )
    for group in optimizer.param_groups:
        # Norms and other vectors do not decay: Megatron marks their groups, and leaves the product to its scheduler.
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            make_state(part.optimizer)
            continue
        part.init_state_fn(part.optimizer)
        if isinstance(part.optimizer, torch.optim.AdamW):  # where Transformer Engine's and apex's are missing
            for group in part.optimizer.param_groups:
                group["fused"] = True  # one pass over memory instead of a dozen
            for parameter, state in part.optimizer.state.items():
                state["step"] = torch.zeros((), device=parameter.device)
    if config.offload_share:
        restore_step(optimizer, 0)
    return optimizer


def state_names(parameter: torch.nn.Parameter) -> tuple[str, ...]:
    """What the optimizer keeps of a model parameter, each a float32 tensor of its shape."""
    return _MOMENTS if parameter.dtype is torch.float32 else (*_MOMENTS, _MAIN)


def gather_state(optimizer: MegatronOptimizer, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Collective over the replicas: the whole state of one of this rank's parameters, by ``state_names``."""
    part = _part(optimizer, parameter)
    owned, shards = _owned(part, parameter)
    whole = {}
    for name in state_names(parameter):
        values = torch.zeros(parameter.numel(), device=parameter.device)
        if name in shards:
            values[owned] = shards[name].detach().view(-1)
        if isinstance(part, DistributedOptimizer):
            dist.all_reduce(values, group=_replicas(parameter))
        whole[name] = values.view(parameter.shape)
    return whole


@torch.no_grad()
def restore_state(
    optimizer: MegatronOptimizer, parameter: torch.nn.Parameter, whole: Mapping[str, torch.Tensor]
) -> None:
    """Put this rank's share of ``gather_state``'s result back."""
    owned, shards = _owned(_part(optimizer, parameter), parameter)
    for name, shard in shards.items():
        shard.copy_(whole[name].view(-1)[owned].view(shard.shape))


def restore_step(optimizer: MegatronOptimizer, step: int) -> None:
    """Set the number of steps that Adam's bias correction counts."""
    for part in optimizer.chained_optimizers:
        for inner in getattr(part.optimizer, "sub_optimizers", [part.optimizer]):  # the host's and the device's
            if isinstance(inner, torch.optim.AdamW):
                for state in inner.state.values():
                    state["step"].fill_(step)
            else:
                for group in inner.param_groups:
                    group["step"] = step


def _is_expert(parameter: torch.nn.Parameter) -> bool:
    return not getattr(parameter, "allreduce", True)  # Megatron's mark


def _part(optimizer: MegatronOptimizer, parameter: torch.nn.Parameter) -> MegatronOptimizer:
    """Megatron keeps an optimizer of its own for experts, after the one of everything else."""
    return optimizer.chained_optimizers[1 if _is_expert(parameter) else 0]


def _replicas(parameter: torch.nn.Parameter) -> dist.ProcessGroup:
    """The ranks that hold the same values of the parameter."""
    if _is_expert(parameter):
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _owned(optimizer: MegatronOptimizer, parameter: torch.nn.Parameter) -> tuple[slice, dict[str, torch.Tensor]]:
    """The part of the flattened parameter whose state this rank holds, and that state; nothing where it holds none."""
    if isinstance(optimizer, DistributedOptimizer):
        if parameter not in optimizer.model_param_group_index_map:
            return slice(0, 0), {}
        group, index = optimizer.model_param_group_index_map[parameter]
        main = optimizer.optimizer.param_groups[group]["params"][index]
        part = optimizer._get_model_param_range_map(parameter)["param"]
        owned = slice(part.start, part.end)
    else:
        main = getattr(parameter, "main_param", parameter)
        owned = slice(0, parameter.numel())
    state = optimizer.optimizer.state[main]
    tensors = {name: state[name] for name in _MOMENTS}
    if parameter.dtype is not torch.float32:
        tensors[_MAIN] = state.get("master_param", main)  # the former where part of the state is offloaded
    return owned, tensors
