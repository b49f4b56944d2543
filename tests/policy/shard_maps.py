"""Every rank's part of models, built on the meta device in one process: for test_shard_maps.py.

Usage: shard_maps.py CONFIG.json:TENSOR:PIPELINE... Prints JSON, a line for each: by Megatron's key of a weight in the
whole model, its shape there, and the offset and shape of every different part that the ranks hold.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from trace_megatron.config import PolicyConfig
from trace_megatron.policy import cpu

cpu.install()

from megatron.core import parallel_state  # noqa: E402 - after the CPU layer, as the product does
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories  # noqa: E402

from trace_megatron.policy.hf_config import parse_hf_config  # noqa: E402
from trace_megatron.policy.model import build_model  # noqa: E402


def main(cases: list[str]) -> None:
    for case in cases:
        config, tensor, pipeline = case.split(":")
        print(json.dumps(shard_map(Path(config), int(tensor), int(pipeline))))


def shard_map(config: Path, tensor: int, pipeline: int) -> dict:
    hf = parse_hf_config(json.loads(config.read_text()), str(config))
    policy = PolicyConfig(tensor_parallel=tensor, pipeline_parallel=pipeline, sequence_parallel=tensor > 1)
    shapes: dict[str, list[int]] = {}
    parts: dict[str, set] = defaultdict(set)
    for rank in range(policy.num_ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=policy.num_ranks)
        # a rank that is alone cannot join gloo groups
        parallel_state.initialize_model_parallel(tensor, pipeline, create_gloo_process_groups=False)
        with torch.device("meta"):
            (model,) = build_model(hf, policy)
            state = model.sharded_state_dict()
            apply_factories(state)
        for shard in nested_values(state):
            if isinstance(shard, ShardedTensor) and shard.data is not None:
                shapes[shard.key] = list(shard.global_shape)
                parts[shard.key].add((shard.global_offset, (1,) * shard.prepend_axis_num + shard.local_shape))
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return {key: {"shape": shape, "parts": sorted(parts[key])} for key, shape in shapes.items()}


if __name__ == "__main__":
    main(sys.argv[1:])
