"""Saved and loaded, a predictor goes on as if it had never stopped; what does not fit is refused."""

import itertools
import threading

import numpy as np
import pytest
import torch
from example_trees import random_trees
from safetensors import safe_open

from trace_megatron.config import PredictorConfig
from trace_megatron.errors import UserError
from trace_megatron.predictor import build_predictor


def build(folder, **options):
    options = {"learning_rate": 1e-3, "batch_size": 4, "dtype": "float32", **options}
    return build_predictor(PredictorConfig(kind="model", model=str(folder), **options), seed=2)


def test_resume_equals_no_interruption(tiny_llama, tmp_path):
    steps = [random_trees(seed, 6) for seed in range(4)]
    prompts = [tree.prompt for tree in random_trees(9, 10)]
    whole = build(tiny_llama)
    expected = [whole.update(trees, "leaf_mean").loss_after for trees in steps]

    first = build(tiny_llama)
    losses = [first.update(trees, "leaf_mean").loss_after for trees in steps[:2]]
    write, scores = first.snapshot(), first.score_roots(prompts)
    first.update(steps[3], "leaf_mean")  # what is written is of the moment before
    write(tmp_path / "predictor")
    second = build(tiny_llama)
    second.load(tmp_path / "predictor")
    np.testing.assert_array_equal(second.score_roots(prompts), scores)
    losses += [second.update(trees, "leaf_mean").loss_after for trees in steps[2:]]
    assert losses == expected
    np.testing.assert_array_equal(second.score_roots(prompts), whole.score_roots(prompts))
    assert [path.name for path in (tmp_path / "predictor").iterdir()] == ["predictor.safetensors"]


def test_before_the_first_update(tiny_llama, tmp_path):
    prompts = [tree.prompt for tree in random_trees(9, 10)]
    fresh, other = build(tiny_llama), build(tiny_llama)
    fresh.snapshot()(tmp_path)
    other.update(random_trees(1, 6), "leaf_mean")
    other.load(tmp_path)
    np.testing.assert_array_equal(other.score_roots(prompts), fresh.score_roots(prompts))
    trees = random_trees(2, 6)
    assert other.update(trees, "leaf_mean").loss_after == fresh.update(trees, "leaf_mean").loss_after


def test_the_file_holds_float32_weights_and_both_moments(tiny_llama, tmp_path):
    predictor = build(tiny_llama, dtype="bfloat16")
    predictor.update(random_trees(1, 3), "leaf_mean")
    predictor.snapshot()(tmp_path)
    with safe_open(tmp_path / "predictor.safetensors", framework="pt") as file:
        names = set(file.keys())
        for name, parameter in predictor._model.named_parameters():
            assert {f"{kind}.{name}" for kind in ("model", "step", "exp_avg", "exp_avg_sq")} <= names
            assert torch.equal(file.get_tensor(f"model.{name}"), parameter) and parameter.dtype == torch.float32


def test_other_shapes_and_damage_change_nothing(tiny_llama, tiny_qwen3, tmp_path):
    prompts = [tree.prompt for tree in random_trees(9, 10)]
    trained = build(tiny_llama)
    trained.update(random_trees(1, 3), "leaf_mean")
    trained.snapshot()(tmp_path / "whole")
    for predictor in (build(tiny_llama, num_layers=2), build(tiny_qwen3)):
        before = predictor.score_roots(prompts)
        with pytest.raises(UserError, match=r"resume with the predictor\.model and predictor\.num_layers"):
            predictor.load(tmp_path / "whole")
        np.testing.assert_array_equal(predictor.score_roots(prompts), before)
    with pytest.raises(UserError, match=r"expected a predictor checkpoint at .* found none"):
        trained.load(tmp_path / "absent")
    content = (tmp_path / "whole" / "predictor.safetensors").read_bytes()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "predictor.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="expected a predictor checkpoint in"):
        trained.load(tmp_path / "cut")


def test_threads_never_meet_half_updated_weights(tiny_llama):
    """Scores taken while updates run are those of a state between two updates."""
    trees, watched = random_trees(1, 8), random_trees(2, 4)
    reference = build(tiny_llama, learning_rate=1e-2)
    states = [reference.score_prefixes_many(watched)]
    for _ in range(3):
        reference.update(trees, "leaf_mean")
        states.append(reference.score_prefixes_many(watched))

    predictor = build(tiny_llama, learning_rate=1e-2)
    seen, stop = [], threading.Event()

    def score() -> None:
        while not stop.is_set():
            seen.append(predictor.score_prefixes_many(watched))

    threads = [threading.Thread(target=score) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        predictor.update(trees, "leaf_mean")
    stop.set()
    for thread in threads:
        thread.join()
    flat_states = [np.concatenate(state) for state in states]
    assert min(np.abs(a - b).max() for a, b in itertools.pairwise(flat_states)) > 1e-3
    assert seen
    for scores in seen:
        assert any(np.allclose(np.concatenate(scores), state, atol=1e-5) for state in flat_states)
