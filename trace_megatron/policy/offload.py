"""What waits in host memory between its uses: activations, weights and optimizer state, as Megatron-Core offers it.

All of it copies on streams of a CUDA device, so it asks for one. Tests see the options arrive, and run the optimizer
with a stand-in for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trace_megatron.config import Config, OptimizerConfig, PolicyConfig
from trace_megatron.errors import UserError

if TYPE_CHECKING:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
"""Megatron-Core's names of what ``policy.offload_modules`` may hold."""


def check_offload(config: Config, num_layers: int) -> None:
    """Raise UserError for what Megatron-Core cannot offload of a model of so many layers, or not together.

    Devices are looked for when a rank starts.
    """
    policy, share = config.policy, config.optimizer.offload_share
    if not 0 <= policy.offload_layers < num_layers:
        raise UserError(
            f"expected policy.offload_layers from 0 to below the model's {num_layers} layers, found "
            f"{policy.offload_layers}"
        )
    if policy.offload_layers and (policy.pipeline_parallel > 1 or policy.recompute != "none"):
        raise UserError(
            f"expected policy.pipeline_parallel=1 and policy.recompute=none with policy.offload_layers="
            f"{policy.offload_layers}, found {policy.pipeline_parallel} and {policy.recompute}: Megatron-Core offloads"
            " layers with neither, and modules (policy.offload_modules) with both"
        )
    if policy.offload_weights and not policy.offload_layers:
        raise UserError("expected policy.offload_layers above 0 with policy.offload_weights, found 0")
    if policy.offload_layers and policy.offload_modules:
        raise UserError("expected policy.offload_layers or policy.offload_modules, found both")
    for name in policy.offload_modules:
        if name not in MODULES:
            raise UserError(f"expected policy.offload_modules among {', '.join(MODULES)}, found '{name}'")
    if "attn_proj" in policy.offload_modules and "core_attn" not in policy.offload_modules:
        raise UserError("expected core_attn beside attn_proj in policy.offload_modules: it has to keep its output too")
    if not 0 <= share <= 1:
        raise UserError(f"expected optimizer.offload_share in [0, 1], found {share}")
    if share and (policy.dtype != "bfloat16" or not config.optimizer.distributed):
        raise UserError(
            f"expected policy.dtype=bfloat16 and optimizer.distributed=true with optimizer.offload_share={share:g}, "
            f"found {policy.dtype} and {str(config.optimizer.distributed).lower()}: Megatron-Core's optimizer on the"
            " host holds the float32 weights behind bfloat16 ones"
        )
    if share and config.engine.colocated:
        raise UserError(
            f"expected optimizer.offload_share=0 with engine.colocated=true, found {share:g}: the optimizer's state"
            " goes to host memory anyway while engines sample"
        )


def transformer_options(policy: PolicyConfig) -> dict:
    """Of Megatron's TransformerConfig."""
    options: dict = {}
    if policy.offload_layers:
        _need(f"policy.offload_layers={policy.offload_layers}")
        options = {
            "cpu_offloading": True,
            "cpu_offloading_num_layers": policy.offload_layers,
            "cpu_offloading_activations": True,
            "cpu_offloading_weights": policy.offload_weights,
        }
    if policy.offload_modules:
        _need(f"policy.offload_modules={','.join(policy.offload_modules)}", transformer_engine=False)
        options = {"fine_grained_activation_offloading": True, "offload_modules": list(policy.offload_modules)}
    return options


def optimizer_options(config: OptimizerConfig) -> dict:
    """Of Megatron's OptimizerConfig. Its optimizer then holds the main weights, which is called precision-aware."""
    if not config.offload_share:
        return {}
    _need(f"optimizer.offload_share={config.offload_share:g}")
    return {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": config.offload_share,
        "overlap_cpu_optimizer_d2h_h2d": True,
        "use_precision_aware_optimizer": True,
    }


def make_state(optimizer: HybridDeviceOptimizer) -> None:
    """Moments of zero for every parameter: they come into being with a step, here of rate 0 and without gradient."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.decoupled_grad = torch.zeros_like(parameter, dtype=torch.float32)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _need(option: str, transformer_engine: bool = True) -> None:
    if not torch.cuda.is_available():
        raise UserError(f"expected a CUDA device with {option}, found none: there is nothing to offload from")
    if transformer_engine:
        from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE

        if not HAVE_TE:
            raise UserError(
                f"expected Transformer Engine with {option}, found none: install it, or leave the option out"
            )
