"""The published configurations, on the meta device: HF tensors and Megatron parameters have their counterparts."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from trace_megatron.config import PolicyConfig
from trace_megatron.policy import cpu
from trace_megatron.policy.hf_config import parse_hf_config
from trace_megatron.policy.layout import check_parallel
from trace_megatron.policy.names import exported_weights, model_weights, named_parameters, to_shard

NAMES = (
    "Qwen3-0.6B",
    "Qwen3-1.7B",
    "Qwen3-4B-Thinking-2507",
    "Qwen3-8B",
    "Qwen3-14B",
    "Qwen3-32B",
    "Llama-3.2-1B-Instruct",
    "Llama-3.2-3B-Instruct",
    "Qwen2.5-3B",
)
LAYOUTS = ((1, 1), (2, 2), (4, 2), (8, 4))


@pytest.fixture(params=NAMES)
def config_file(request, trace_data) -> Path:
    return trace_data / "models" / "configs" / f"{request.param}.json"


def test_no_tensor_is_left_or_missing(config_file):
    values = json.loads(config_file.read_text())
    hf = parse_hf_config(values, str(config_file))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config_file))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if hf.tied:
        del expected["lm_head.weight"]
    assert {name: shape for weight in exported_weights(hf) for name, shape in weight.hf.items()} == expected


@pytest.mark.parametrize(("tensor", "pipeline"), LAYOUTS)
def test_no_parameter_is_left_or_missing(config_file, tensor, pipeline):
    hf = parse_hf_config(json.loads(config_file.read_text()), str(config_file))
    policy = PolicyConfig(tensor_parallel=tensor, pipeline_parallel=pipeline)
    check_parallel(hf, policy)
    shapes = {}
    for stage in range(pipeline):
        shapes |= parameter_shapes(hf, policy, rank=stage * tensor + tensor - 1)
    for weight in model_weights(hf):
        tensors = [torch.empty(shape, device="meta") for shape in weight.hf.values()]
        shard = to_shard(weight, tensors, hf, tensor - 1, tensor)
        found = [shapes.pop(name) for name in weight.megatron if name in shapes]
        tied_here = weight.is_copy and pipeline == 1  # the embedding itself, then
        assert found == ([] if tied_here else [tuple(shard.shape)]), weight
    assert not shapes


def parameter_shapes(hf, policy, rank) -> dict[str, tuple[int, ...]]:
    """Of the parameters that one rank of many would build; there are no others, and no memory behind them."""
    from megatron.core import parallel_state

    from trace_megatron.policy.model import build_model

    cpu.install()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=policy.num_ranks)
    try:
        parallel_state.initialize_model_parallel(
            policy.tensor_parallel, policy.pipeline_parallel, create_gloo_process_groups=False
        )
        with torch.device("meta"):
            chunks = build_model(hf, policy)
        return {name: tuple(parameter.shape) for name, parameter in named_parameters(chunks).items()}
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
