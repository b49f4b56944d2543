"""What a model's shapes allow, and how layers are shared out over the pipeline."""

from dataclasses import replace

import pytest

from tests.policy.test_hf_config import LLAMA_3_2_1B, QWEN3_30B
from trace_megatron.config import PolicyConfig
from trace_megatron.errors import UserError
from trace_megatron.policy.hf_config import parse_hf_config
from trace_megatron.policy.layout import check_parallel, head_layers, split_layers

MODEL = parse_hf_config(LLAMA_3_2_1B, "config.json")


@pytest.mark.parametrize(
    ("policy", "found"),
    [
        (PolicyConfig(tensor_parallel=3), "32 attention heads, found 3"),
        (PolicyConfig(sequence_parallel=True), "sequence_parallel"),
        (PolicyConfig(pipeline_parallel=0), "pipeline_parallel of at least 1, found 0"),
        (PolicyConfig(virtual_pipeline=2), "pipeline_parallel above 1"),
        (PolicyConfig(pipeline_parallel=17), "16 pipeline chunks, one for each layer"),
        (PolicyConfig(pipeline_parallel=6, virtual_pipeline=3), "found 18"),
        (PolicyConfig(pipeline_parallel=2, pipeline_layers=(8, 7)), r"16 layers, found \[8, 7\]"),
        (PolicyConfig(pipeline_parallel=2, pipeline_layers=(8, 4, 4)), "2 positive numbers"),
        (PolicyConfig(pipeline_parallel=2, pipeline_layers=(16, 0)), "2 positive numbers"),
    ],
)
def test_layouts_that_the_shapes_forbid(policy, found):
    with pytest.raises(UserError, match=found):
        check_parallel(MODEL, policy)


def test_key_value_heads_and_feed_forward_limit_the_ranks_too():
    check_parallel(MODEL, PolicyConfig(tensor_parallel=16))  # two ranks share a key-value head
    with pytest.raises(UserError, match="12 key-value heads"):
        check_parallel(replace(MODEL, num_heads=24, num_kv_heads=12), PolicyConfig(tensor_parallel=8))
    with pytest.raises(UserError, match="divide the 896 rows of query, key and value, found 3"):
        check_parallel(replace(MODEL, num_heads=12, num_kv_heads=1), PolicyConfig(tensor_parallel=3))
    with pytest.raises(UserError, match="feed-forward size 8190"):
        check_parallel(replace(MODEL, ffn_size=8190), PolicyConfig(tensor_parallel=4))


@pytest.mark.parametrize(
    ("policy", "found"),
    [
        (PolicyConfig(data_parallel=3, expert_parallel=3), "128 experts, found 3"),
        (PolicyConfig(data_parallel=2, pipeline_parallel=2, expert_parallel=4), "divide the 2 tensor x context"),
        (PolicyConfig(tensor_parallel=2, expert_parallel=2), "sequence_parallel with experts"),
        (PolicyConfig(tensor_parallel=2, sequence_parallel=True), "above 1 with experts"),
    ],
)
def test_layouts_that_experts_forbid(policy, found):
    experts = parse_hf_config(QWEN3_30B, "config.json")
    with pytest.raises(UserError, match=found):
        check_parallel(experts, policy)
    check_parallel(experts, PolicyConfig(tensor_parallel=4, expert_parallel=8, data_parallel=2, sequence_parallel=True))
    with pytest.raises(UserError, match="without experts, found 2"):
        check_parallel(MODEL, PolicyConfig(data_parallel=2, expert_parallel=2))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("virtual_pipeline", [1, 2])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("vocab_size", [100, 32_000, 256_000])
def test_no_other_split_has_a_faster_slowest_chunk(vocab_size, stages, virtual_pipeline, recompute):
    model = replace(MODEL, num_layers=24, vocab_size=vocab_size)
    policy = PolicyConfig(pipeline_parallel=stages, virtual_pipeline=virtual_pipeline, recompute=recompute)
    *others, last = split_layers(model, policy)
    assert sum(others) + last == 24 and min(*others, last) >= 1
    assert max(others) - min(others) <= 1
    head = head_layers(model, policy)
    pace = max(*others, last + head)
    best = min(max(-(-(24 - n) // len(others)), n + head) for n in range(1, 25 - len(others)))
    assert pace == best


def test_a_small_vocabulary_leaves_the_stages_even_and_a_given_split_is_kept():
    small = replace(MODEL, vocab_size=100)
    assert split_layers(small, PolicyConfig(pipeline_parallel=4)) == [4, 4, 4, 4]
    assert split_layers(small, PolicyConfig()) == [16]
    assert split_layers(small, PolicyConfig(pipeline_parallel=2, pipeline_layers=(11, 5))) == [11, 5]
