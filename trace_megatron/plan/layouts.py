"""Whether a configuration fits its devices, and which layouts do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from trace_megatron.config import Config, PolicyConfig
from trace_megatron.errors import UserError
from trace_megatron.plan.hardware import GIB, Device
from trace_megatron.plan.memory import TrainerMemory, num_parameters, trainer_memory
from trace_megatron.plan.timing import workload
from trace_megatron.policy.hf_config import HFModelConfig
from trace_megatron.policy.layout import check_parallel

RESERVED_GIB = 3.0
"""CUDA context, NCCL buffers, kernels' workspaces."""
FRAGMENTATION = 1.05
_RECOMPUTE = ("none", "full")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The fullest device of a colocated run, bytes."""

    trainer: TrainerMemory
    predictor: int
    engine_weights: int
    kv_cache: int
    """What vLLM may take besides its weights: ``engine.gpu_memory_utilization``."""
    capacity: int

    @property
    def training(self) -> int:
        """While the trainer works and the engine sleeps: its weights stay, its cache is given back."""
        reserved = RESERVED_GIB * GIB
        return int(self.trainer.total * FRAGMENTATION + self.predictor + self.engine_weights + reserved)

    @property
    def sampling(self) -> int:
        """While the engine works: the trainer keeps all but activations."""
        kept = self.trainer.weights + self.trainer.gradients + self.trainer.optimizer
        return int(kept + self.predictor + self.engine_weights + self.kv_cache + RESERVED_GIB * GIB)

    @property
    def fits(self) -> bool:
        return max(self.training, self.sampling) <= self.capacity


def device_memory(hf: HFModelConfig, predictor: HFModelConfig | None, config: Config, device: Device) -> DeviceMemory:
    """Of the pipeline stage that needs most."""
    stages = trainer_memory(hf, config, num_micro_batches(config))
    engine_weights = 2 * num_parameters(hf) // config.engine.tensor_parallel
    capacity = int(device.memory_gib * GIB)
    cache = max(int(config.engine.gpu_memory_utilization * capacity) - engine_weights, 0)
    # a replica on every rank: float32 weights, gradients and two moments
    replica = 16 * num_parameters(predictor) if predictor is not None else 0
    return DeviceMemory(max(stages, key=lambda stage: stage.total), replica, engine_weights, cache, capacity)


def num_micro_batches(config: Config) -> int:
    """Of a data-parallel replica in one step."""
    packs = math.ceil(workload(config).packed_tokens / config.policy.tokens_per_micro_batch)
    return max(math.ceil(packs / config.policy.data_parallel), 1)


def fitting_layouts(
    hf: HFModelConfig, predictor: HFModelConfig | None, config: Config, device: Device
) -> Iterator[tuple[PolicyConfig, DeviceMemory]]:
    """Layouts of the same number of ranks that fit, least model parallelism and recompute first."""
    num_ranks = config.policy.num_ranks
    candidates = []
    for tensor in (1, 2, 4, 8):
        for pipeline in (1, 2, 4, 8):
            if num_ranks % (tensor * pipeline) == 0:
                candidates += [(recompute, tensor, pipeline) for recompute in _RECOMPUTE]
    for recompute, tensor, pipeline in sorted(candidates, key=lambda c: (_RECOMPUTE.index(c[0]), c[1] * c[2], c[2])):
        policy = dataclasses.replace(
            config.policy,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            virtual_pipeline=1,
            pipeline_layers=(),
            context_parallel=1,
            data_parallel=num_ranks // (tensor * pipeline),
            sequence_parallel=tensor > 1,
            recompute=recompute,
        )
        try:
            check_parallel(hf, policy)
        except UserError:
            continue
        memory = device_memory(hf, predictor, dataclasses.replace(config, policy=policy), device)
        if memory.fits:
            yield policy, memory
