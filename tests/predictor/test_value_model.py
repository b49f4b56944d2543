"""Packed scores against a plain transformers forward of every history alone."""

import numpy as np
import pytest
import torch
from example_trees import make_prompt, make_rollout, make_turn, random_trees
from tiny_models import write_tiny_model
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from trace_megatron.algorithm.tree import history_ids, prefix_anchors
from trace_megatron.config import PredictorConfig
from trace_megatron.errors import UserError
from trace_megatron.predictor import NeuralPredictor, build_predictor
from trace_megatron.predictor.model import load_value_model
from trace_megatron.predictor.pack import pack_histories
from trace_megatron.predictor.score import score_histories
from trace_megatron.types import RolloutTree


class PlainScorer:
    """Value of one unpadded history: hidden state n of the untruncated LM under sdpa, its final norm, the head."""

    def __init__(self, folder, model, num_layers=0):
        self.lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
        self.model, self.num_layers = model, num_layers

    def __call__(self, token_ids) -> float:
        with torch.no_grad():
            states = self.lm(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
            last = self.lm.model.norm(states[self.num_layers]) if self.num_layers else states[-1]
            return torch.sigmoid(last[0, -1] @ self.model.head.weight[0]).item()


def predictor_for(folder, num_layers=0, tokens_per_forward=8192) -> tuple[NeuralPredictor, PlainScorer]:
    config = PredictorConfig(
        kind="model",
        model=str(folder),
        num_layers=num_layers,
        dtype="float32",
        tokens_per_forward=tokens_per_forward,
    )
    model = load_value_model(folder, num_layers=num_layers, seed=3)
    with torch.no_grad():
        model.head.weight.mul_(10.0)  # as after training: scores all over (0, 1)
    return NeuralPredictor(model, config, seed=3), PlainScorer(folder, model, num_layers)


def largest_difference(predictor, plain, trees) -> float:
    packed = predictor.score_prefixes_many(trees)
    assert [len(scores) for scores in packed] == [len(prefix_anchors(tree)) for tree in trees]
    alone = [plain(history_ids(tree, anchor)) for tree in trees for anchor in prefix_anchors(tree)]
    roots = predictor.score_roots([tree.prompt for tree in trees])
    alone += [plain(tree.prompt.token_ids) for tree in trees]
    assert np.std(alone) > 1e-3
    return float(np.abs(np.concatenate([*packed, roots]) - alone).max())


@pytest.mark.parametrize("num_layers", [0, 2])
def test_packed_scores_equal_separate_ones_llama(tiny_llama, num_layers):
    predictor, plain = predictor_for(tiny_llama, num_layers)
    assert largest_difference(predictor, plain, random_trees(0, 6)) < 1e-5


def test_packed_scores_equal_separate_ones_qwen3(tiny_qwen3):
    predictor, plain = predictor_for(tiny_qwen3)
    assert largest_difference(predictor, plain, random_trees(1, 6)) < 1e-5


def test_packed_scores_equal_separate_ones_smollm2(smollm2):
    predictor, plain = predictor_for(smollm2, num_layers=4)
    assert largest_difference(predictor, plain, random_trees(2, 2)) < 1e-5


def test_first_layers_alone_are_loaded(tiny_llama):
    names = [name for name, _ in load_value_model(tiny_llama, num_layers=1).named_parameters()]
    assert any(".layers.0." in name for name in names) and not any(".layers.1." in name for name in names)
    assert not any("lm_head" in name for name in names)


@pytest.mark.parametrize("tokens_per_forward", [1, 40, 100])
def test_the_token_budget_does_not_change_scores(tiny_llama, tokens_per_forward):
    trees = random_trees(3, 5)
    whole, _ = predictor_for(tiny_llama)
    split, _ = predictor_for(tiny_llama, tokens_per_forward=tokens_per_forward)
    requests = [(tree, prefix_anchors(tree)) for tree in trees]
    assert len(pack_histories(requests, tokens_per_forward)) > len(pack_histories(requests, 8192)) == 1
    for one, other in zip(whole.score_prefixes_many(trees), split.score_prefixes_many(trees), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    for tree, scores in zip(trees, whole.score_prefixes_many(trees), strict=True):
        np.testing.assert_allclose(whole.score_prefixes(tree), scores, atol=1e-6)


def test_twins_score_exactly_alike(tiny_llama):
    twin = make_rollout((make_turn([5, 6], [7]), make_turn([8])), 1.0)
    other = make_rollout((make_turn([5, 6], [9]), make_turn([8])), 0.0)
    tree = RolloutTree(make_prompt([1, 2, 3]), (twin, other, twin))
    predictor, plain = predictor_for(tiny_llama)
    first, middle, last = predictor.score_prefixes(tree)
    assert first == last != middle
    assert abs(first - plain([1, 2, 3, 5, 6, 7])) < 1e-5


def test_nothing_to_score(tiny_llama):
    predictor, _ = predictor_for(tiny_llama)
    single_turn = RolloutTree(make_prompt([1, 2]), (make_rollout([make_turn([3])], 1.0),))
    assert predictor.score_roots([]).shape == predictor.score_prefixes(single_turn).shape == (0,)
    assert predictor.score_prefixes_many([]) == []


def test_initial_scores_are_near_one_half_and_differ(tiny_llama):
    predictor = build_predictor(PredictorConfig(kind="model", model=str(tiny_llama)), seed=0)
    scores = predictor.score_roots([tree.prompt for tree in random_trees(4, 64)])
    assert np.abs(scores - 0.5).max() < 0.2
    assert len(np.unique(scores)) == 64


def test_half_precision_products_keep_float32_scores(tiny_llama):
    trees = random_trees(5, 6)
    scores = {
        dtype: build_predictor(PredictorConfig(kind="model", model=str(tiny_llama), dtype=dtype), seed=0).score_roots(
            [tree.prompt for tree in trees]
        )
        for dtype in ("float32", "bfloat16")
    }
    assert 0 < np.abs(scores["float32"] - scores["bfloat16"]).max() < 0.01
    as_bfloat16 = torch.from_numpy(scores["bfloat16"]).bfloat16().double().numpy()
    assert (as_bfloat16 != scores["bfloat16"]).all()


def test_learned_positions_are_depths_too(tmp_path):
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model = load_value_model(tmp_path, seed=0)
    tree = random_trees(6, 1)[0]
    packed = score_histories(model, [(tree, prefix_anchors(tree))], 8192)
    alone = [score_histories(model, [(tree, [anchor])], 8192) for anchor in prefix_anchors(tree)]
    np.testing.assert_allclose(packed, np.concatenate(alone), atol=1e-6)


def test_a_sliding_window_is_refused(tmp_path):
    config = MistralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=8,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"plain causal attention, found mistral.*windows"):
        load_value_model(tmp_path)


def test_attention_of_its_own_is_refused(tmp_path):
    torch.manual_seed(0)
    BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_head=4, n_layer=2)).save_pretrained(
        tmp_path / "bloom"
    )
    with pytest.raises(UserError, match=r"plain causal attention, found bloom.* changes their hidden states"):
        load_value_model(tmp_path / "bloom")
    MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1)).save_pretrained(
        tmp_path / "mamba"
    )
    with pytest.raises(UserError, match=r"plain causal attention, found mamba"):
        load_value_model(tmp_path / "mamba")


def test_bad_models_are_one_sentence(tmp_path, tiny_llama):
    with pytest.raises(UserError, match="expected an HF model folder"):
        load_value_model(tmp_path / "absent")
    with pytest.raises(UserError, match=r"num_layers from 0 to 3, .* found 4"):
        load_value_model(tiny_llama, num_layers=4)
    folder = write_tiny_model(tmp_path / "no_weights")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="expected the weights of a language model"):
        load_value_model(folder)
    predictor, _ = predictor_for(tiny_llama)
    with pytest.raises(UserError, match="shares the policy's tokenizer"):
        predictor.score_roots([make_prompt([1, 5000])])
