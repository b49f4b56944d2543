"""The predictors without a network, and what build_predictor refuses."""

import numpy as np
import pytest
from example_trees import make_prompt, make_rollout, make_turn

from trace_megatron.algorithm.tree import prefix_anchors
from trace_megatron.config import PredictorConfig
from trace_megatron.errors import UserError
from trace_megatron.predictor import ConstantPredictor, NeuralPredictor, OraclePredictor, build_predictor
from trace_megatron.types import Anchor, RolloutTree


def tree_of(name: str, *outcomes: tuple[int, float]) -> RolloutTree:
    """Bare rollouts from (turns, reward)."""
    turn = make_turn([1], [2])
    return RolloutTree(make_prompt([1, 2], name), tuple(make_rollout([turn] * n, reward) for n, reward in outcomes))


def test_constant():
    predictor = ConstantPredictor()
    tree = tree_of("a", (3, 1.0), (1, 0.0))
    assert predictor.score_roots([tree.prompt] * 3).tolist() == [0.5] * 3
    assert [scores.tolist() for scores in predictor.score_prefixes_many([tree, tree])] == [[0.5, 0.5]] * 2
    stats = predictor.update([tree], "leaf_mean")
    assert stats.loss_before is None and predictor.score_prefixes(tree).tolist() == [0.5, 0.5]


def test_oracle_by_hand(tmp_path):
    predictor = OraclePredictor()
    seen, unseen = tree_of("seen", (1, 1.0), (1, 1.0), (1, 0.0)), make_prompt([1], "unseen")
    assert predictor.score_roots([seen.prompt, unseen]).tolist() == [0.5, 0.5]
    predictor.update([seen, tree_of("seen", (1, 1.0))], "leaf_mean")  # one task twice in a step
    assert predictor.score_roots([seen.prompt, unseen]).tolist() == [3.5 / 5, 0.5]

    again = tree_of("seen", (4, 0.0), (2, 1.0))  # rate with these: 4.5 / 7
    continued = RolloutTree(again.prompt, (*again.rollouts, make_rollout([make_turn([1])], 1.0, Anchor(0, 1))))
    rate = 4.5 / 7
    expected = [rate * (1 - 1 / 4), rate * (1 - 2 / 4), rate * (1 - 3 / 4), rate + (1 - rate) / 2]
    np.testing.assert_allclose(predictor.score_prefixes(again), expected)
    np.testing.assert_allclose(predictor.score_prefixes(continued), expected)  # continuations are no evidence here

    predictor.snapshot()(tmp_path)
    other = OraclePredictor()
    other.load(tmp_path)
    np.testing.assert_array_equal(other.score_prefixes(again), predictor.score_prefixes(again))


def test_oracle_with_the_truth():
    predictor = OraclePredictor(lambda tree, anchor: len(tree.prompt.token_ids) / 10 + anchor.turn / 100)
    tree = tree_of("a", (3, 1.0), (2, 0.0))
    predictor.update([tree], "leaf_mean")
    assert predictor.score_roots([tree.prompt]).tolist() == [0.2]
    np.testing.assert_allclose(predictor.score_prefixes(tree), [0.21, 0.22, 0.21])
    assert len(prefix_anchors(tree)) == 3


def test_checkpoints_know_their_kind(tmp_path):
    ConstantPredictor().snapshot()(tmp_path)
    ConstantPredictor().load(tmp_path)
    with pytest.raises(UserError, match=r"a predictor of kind oracle at .*, found constant"):
        OraclePredictor().load(tmp_path)
    with pytest.raises(UserError, match=r"a predictor of kind constant at .*, found: "):
        ConstantPredictor().load(tmp_path / "absent")


def test_build_by_kind(tiny_llama):
    assert build_predictor(PredictorConfig(kind="none"), seed=0) is None
    assert isinstance(build_predictor(PredictorConfig(kind="constant"), seed=0), ConstantPredictor)
    assert isinstance(build_predictor(PredictorConfig(kind="oracle"), seed=0), OraclePredictor)
    model = build_predictor(PredictorConfig(kind="model", model=str(tiny_llama)), seed=0)
    assert isinstance(model, NeuralPredictor)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": ""}, r"expected the backbone's HF folder in predictor\.model"),
        ({"model": "absent"}, "expected an HF model folder"),
        ({"learning_rate": 0.0}, r"expected a positive predictor\.learning_rate, found 0\.0"),
        ({"prefix_share": 1.0}, r"expected predictor\.prefix_share from 0 to below 1, found 1\.0"),
        ({"epochs": 0}, r"expected predictor\.epochs of at least 1, found 0"),
        ({"batch_size": 0}, r"expected predictor\.batch_size of at least 1, found 0"),
        ({"tokens_per_forward": 0}, r"expected predictor\.tokens_per_forward of at least 1, found 0"),
        ({"num_layers": 9}, r"expected predictor\.num_layers from 0 to 3"),
    ],
)
def test_bad_options_are_one_sentence(tiny_llama, options, message):
    config = PredictorConfig(kind="model", **{"model": str(tiny_llama), **options})
    with pytest.raises(UserError, match=message):
        build_predictor(config, seed=0)
