"""A plan as text."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from trace_megatron.config import Config, PolicyConfig
from trace_megatron.errors import UserError
from trace_megatron.plan.hardware import GIB, device_named
from trace_megatron.plan.layouts import device_memory, fitting_layouts, num_micro_batches
from trace_megatron.plan.memory import num_parameters
from trace_megatron.plan.timing import step_time, workload
from trace_megatron.policy.hf_config import HFModelConfig, read_hf_config
from trace_megatron.policy.layout import check_parallel
from trace_megatron.policy.offload import check_offload

_PROPOSED = 3


def describe_plan(config: Config) -> Iterator[str]:
    """The plan's lines. Raises UserError, with layouts that fit, where the configured one does not."""
    hf = read_hf_config(config.policy.model)
    predictor = read_hf_config(config.predictor.model) if config.predictor.kind == "model" else None
    if predictor is not None and config.predictor.num_layers:
        predictor = dataclasses.replace(predictor, num_layers=config.predictor.num_layers)
    for name in ("prompt_tokens", "response_tokens"):
        tokens = getattr(config.plan, name)
        if not tokens >= 0:
            raise UserError(f"expected plan.{name} of at least 0 (0: half of the rollouts' limit), found {tokens:g}")
    device = device_named(config.plan.device)
    check_parallel(hf, config.policy)
    check_offload(config, hf.num_layers)
    memory = device_memory(hf, predictor, config, device)
    if not memory.fits:
        raise UserError(
            f"expected at most {device.memory_gib:g} GiB on a {config.plan.device}, found "
            f"{memory.training / GIB:.1f} while training and {memory.sampling / GIB:.1f} while sampling with "
            f"{_name(config.policy)}: {_proposals(hf, predictor, config)}"
        )
    size, ranks = num_parameters(hf) / 1e9, config.policy.num_ranks
    yield f"{size:.2f} billion parameters on {ranks} x {config.plan.device}, {_name(config.policy)}"
    yield f"fullest device (stage {memory.trainer.stage}), GiB of {device.memory_gib:g}:"
    parts = {
        "weights": memory.trainer.weights,
        "gradients": memory.trainer.gradients,
        "optimizer": memory.trainer.optimizer,
        "activations": memory.trainer.activations,
        "logits": memory.trainer.head,
        "predictor": memory.predictor,
        "engine weights": memory.engine_weights,
        "KV cache": memory.kv_cache,
        "all while training": memory.training,
        "all while sampling": memory.sampling,
    }
    for name, size in parts.items():
        yield f"  {name:20}{size / GIB:8.2f}"
    work, times = workload(config), step_time(hf, predictor, config, device)
    yield (
        f"a step: {work.rollouts} bare rollouts and {work.continuations} continuations, {work.sampled_tokens:,.0f} "
        f"tokens sampled, {work.packed_tokens:,.0f} packed of {work.unpacked_tokens:,.0f} ({work.packing_ratio:.1f}x), "
        f"{num_micro_batches(config)} packs a replica"
    )
    for name in ("rollouts", "policy_update", "predictor_scoring", "predictor_update", "weight_sync"):
        seconds = getattr(times, name)
        yield f"  {name.replace('_', ' '):20}{seconds:8.1f} s  {seconds / times.total:6.1%}"
    if times.hidden:
        yield f"  {'hidden by overlap':20}{-times.hidden:8.1f} s  {-times.hidden / times.total:6.1%}"
    rate = work.unpacked_tokens / times.total / config.policy.num_ranks
    yield f"  {'step':20}{times.total:8.1f} s  {rate:,.0f} trajectory tokens/s a device"


def _name(policy: PolicyConfig) -> str:
    sizes = (
        f"TP{policy.tensor_parallel} PP{policy.pipeline_parallel} CP{policy.context_parallel} DP{policy.data_parallel}"
    )
    extras = [f"EP{policy.expert_parallel}"] if policy.expert_parallel > 1 else []
    extras += ["sequence parallel"] if policy.sequence_parallel else []
    extras += [f"recompute {policy.recompute}"] if policy.recompute != "none" else []
    return ", ".join([sizes, *extras])


def _proposals(hf: HFModelConfig, predictor: HFModelConfig | None, config: Config) -> str:
    device = device_named(config.plan.device)
    found = list(itertools.islice(fitting_layouts(hf, predictor, config, device), _PROPOSED))
    if not found:
        return "no layout of as many ranks fits; use more devices, or lower engine.gpu_memory_utilization"
    names = [f"{_name(policy)} ({max(m.training, m.sampling) / GIB:.0f} GiB)" for policy, m in found]
    return "these fit: " + "; ".join(names)
