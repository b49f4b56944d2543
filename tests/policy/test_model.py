"""One rank: logits and gradients equal transformers', along every path of a tree, with and without recompute."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.tiny_models import LLAMA3_SCALING, write_tiny_model
from trace_megatron.config import PolicyConfig
from trace_megatron.errors import UserError
from trace_megatron.policy.hf_config import Llama3Scaling, read_hf_config
from trace_megatron.policy.hf_weights import load_hf_weights
from trace_megatron.policy.model import build_model, inverse_frequencies, padded_vocab_size
from trace_megatron.policy.names import from_shards, model_weights, named_parameters
from trace_megatron.policy.tree_attention import TreeSequence

pytestmark = pytest.mark.usefixtures("one_rank")

TINY_MODELS = {
    "llama": {"family": "llama", "tied": False},
    "llama-tied-llama3": {"family": "llama", "tied": True, "rope_scaling": LLAMA3_SCALING, "rope_theta": 5e5},
    "qwen3": {"family": "qwen3", "tied": False, "head_dim": 32, "vocab": 261},
    "qwen3-tied": {"family": "qwen3", "tied": True, "kv_heads": 1},
}


def build(folder: Path, **policy):
    hf = read_hf_config(folder)
    chunks = build_model(hf, PolicyConfig(dtype="float32", **policy))
    load_hf_weights(chunks, folder, hf)
    return hf, chunks


def chain(num_tokens: int) -> TreeSequence:
    return TreeSequence(torch.full((num_tokens,), num_tokens, dtype=torch.int32), torch.arange(num_tokens))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def assert_logits_equal(folder: Path) -> None:
    hf, [model] = build(folder)
    tokens = torch.randint(hf.vocab_size, (1, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = model(tokens, None, None, packed_seq_params=chain(150))
        expected = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_equal_transformers(name, tmp_path):
    folder = write_tiny_model(tmp_path / name, **TINY_MODELS[name])
    assert_logits_equal(folder)


@pytest.mark.parametrize("normalized", [True, False])
def test_logits_of_experts_equal_transformers(normalized, tmp_path):
    """Expert weights that sum to 1, and weights as they come out of the softmax over all experts."""
    folder = write_tiny_model(tmp_path / "experts", "qwen3_moe")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "norm_topk_prob": normalized}))
    assert_logits_equal(folder)


def test_logits_of_smollm2_equal_transformers(smollm2):
    _, [model] = build(smollm2)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    tokens = tokenizer("Paris is the capital of France. The capital of Italy is", return_tensors="pt").input_ids
    with torch.no_grad():
        found = model(tokens, None, None, packed_seq_params=chain(tokens.shape[1]))
        expected = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)(tokens).logits
    assert relative_error(found, expected) < 1e-4
    assert tokenizer.decode(found[0, -1].argmax()) == " Rome"  # the conversion from GGUF was right as well


def test_every_path_of_a_tree_equals_transformers(tmp_path):
    folder = write_tiny_model(tmp_path / "m", "qwen3", rope_scaling=LLAMA3_SCALING)
    hf, [model] = build(folder)
    # prompt 0-4; a 5-7 with leaves 8-9 and 10-12 below; b 13-15
    subtree_end = torch.tensor([16] * 5 + [13] * 3 + [10] * 2 + [13] * 3 + [16] * 3, dtype=torch.int32)
    depth = [*range(5), 5, 6, 7, 8, 9, 8, 9, 10, 5, 6, 7]
    tokens = torch.randint(hf.vocab_size, (1, 16), generator=torch.Generator().manual_seed(2))
    reference = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        packed = model(tokens, None, None, packed_seq_params=TreeSequence(subtree_end, torch.tensor(depth)))[0]
        for path in ([*range(10)], [*range(8), 10, 11, 12], [*range(5), 13, 14, 15]):
            assert relative_error(packed[path], reference(tokens[:, path]).logits[0]) < 1e-5


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gradients_equal_transformers(recompute, tmp_path):
    folder = write_tiny_model(tmp_path / "m", "qwen3", tied=True, vocab=261)
    hf, [model] = build(folder, recompute=recompute)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(hf.vocab_size, (1, 40), generator=generator)
    upstream = torch.randn(1, 40, hf.vocab_size, generator=generator)
    attention_calls = []
    for layer in model.decoder.layers:
        layer.self_attention.core_attention.register_forward_hook(lambda *_: attention_calls.append(1))
    model(tokens, None, None, packed_seq_params=chain(40)).backward(upstream)
    assert len(attention_calls) == hf.num_layers * (1 if recompute == "none" else 2)
    reference = AutoModelForCausalLM.from_pretrained(folder)
    reference(tokens).logits.backward(upstream)
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    parameters = named_parameters([model])
    for weight in model_weights(hf):
        if not weight.is_copy:
            grads = from_shards(weight, [parameters[weight.megatron[0]].grad], hf)
            for name, grad in zip(weight.hf, grads, strict=True):
                assert relative_error(grad, expected.pop(name)) < 1e-4, name
    assert not expected


def test_bfloat16_parameters_and_activations(tmp_path):
    folder = write_tiny_model(tmp_path / "m", "llama", dtype=torch.bfloat16)
    hf = read_hf_config(folder)
    chunks = build_model(hf, PolicyConfig(dtype="bfloat16"))
    load_hf_weights(chunks, folder, hf)
    assert {parameter.dtype for parameter in chunks[0].parameters()} == {torch.bfloat16}
    tokens = torch.randint(hf.vocab_size, (1, 50), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = chunks[0](tokens, None, None, packed_seq_params=chain(50))
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
    assert found.dtype is torch.bfloat16
    assert relative_error(found.float(), expected) < 0.03


def test_llama3_frequencies_equal_transformers():
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=2048, num_attention_heads=32, head_dim=64, rope_parameters=rope)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    found = inverse_frequencies(64, 500000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert not torch.allclose(found, inverse_frequencies(64, 500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192)), rtol=0.1)


def test_a_layout_that_the_model_forbids(tmp_path):
    hf = read_hf_config(write_tiny_model(tmp_path / "m"))
    with pytest.raises(UserError, match="4 attention heads, found 3"):
        build_model(hf, PolicyConfig(tensor_parallel=3))


def test_padded_vocab_size():
    assert [padded_vocab_size(261, ranks) for ranks in (1, 2, 3, 4)] == [261, 262, 261, 264]
