"""The predictor on three ranks against one: the same scores, losses and weights, from equal shares of the work."""

import sys
from pathlib import Path

import numpy as np
import pytest
from example_trees import random_trees
from replica_ranks import OPTIONS, scenario

from trace_megatron.algorithm.tree import prefix_anchors
from trace_megatron.config import PredictorConfig
from trace_megatron.launch.local import run_ranks
from trace_megatron.predictor import build_predictor
from trace_megatron.predictor.pack import history_paths
from trace_megatron.predictor.replicas import Shares, as_paths, as_tensors
from trace_megatron.types import ROOT, RolloutTree

NUM_RANKS = 3


@pytest.fixture(scope="module")
def folder(tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("replicas")
    (folder / "model").symlink_to(tiny_llama)
    script = Path(__file__).with_name("replica_ranks.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{Path(__file__).parents[2]}")
        assert run_ranks([sys.executable, str(script), str(folder)], NUM_RANKS) == 0
    return folder


def test_three_ranks_equal_one(folder, tmp_path):
    predictor = build_predictor(PredictorConfig(model=str(folder / "model"), **OPTIONS), seed=2)
    expected = scenario(predictor, tmp_path)
    results = np.load(folder / "results.npz")
    assert set(results.files) == set(expected)
    for name, values in expected.items():  # Adam's first steps are signs: float noise moves weights a little
        np.testing.assert_allclose(results[name], values, rtol=0, atol=2e-5, err_msg=name)
    assert expected["nothing"].size == 0 and len(expected["prefixes0"]) > 20


def test_replicas_stay_equal(folder):
    weights = [np.load(folder / f"weights{rank}.npy") for rank in range(NUM_RANKS)]
    assert all(np.array_equal(weights[0], other) for other in weights[1:])


def paths_of(trees, anchors_of):
    return history_paths([(tree, anchors_of(tree)) for tree in trees])


def test_every_path_has_one_rank_and_ranks_have_about_equal_tokens():
    trees = random_trees(0, 40)
    paths = paths_of(trees, prefix_anchors)
    shares = [Shares(4).mine(paths, rank) for rank in range(4)]
    assert sorted(path.rows for share in shares for path in share) == sorted(path.rows for path in paths)
    loads = [sum(path.token_ids.size for path in share) for share in shares]
    assert max(loads) < 1.35 * np.mean(loads)
    assert all(len({id(path) for path in share} & {id(path) for path in shares[0]}) == 0 for share in shares[1:])


def test_prompts_stay_where_their_keys_and_values_are():
    trees = random_trees(1, 40)
    shares = [Shares(4) for _ in range(4)]
    roots = paths_of([RolloutTree(tree.prompt, ()) for tree in trees], lambda _: (ROOT,))
    before = {path.prompt_ids.tobytes(): rank for rank in range(4) for path in shares[rank].mine(roots, rank)}
    prefixes = paths_of(trees, prefix_anchors)
    after = {path.prompt_ids.tobytes(): rank for rank in range(4) for path in shares[rank].mine(prefixes, rank)}
    stayed = np.mean([before[prompt] == rank for prompt, rank in after.items()])
    assert stayed > 0.7
    loads = [sum(path.token_ids.size for path in shares[rank].mine(prefixes, rank)) for rank in range(4)]
    assert max(loads) < 1.5 * np.mean(loads)


@pytest.mark.parametrize("num_trees", [0, 1, 5])
def test_paths_survive_the_journey(num_trees):
    paths = paths_of(random_trees(3, num_trees), prefix_anchors)
    returned = as_paths(as_tensors(paths))
    assert len(returned) == len(paths)
    for path, other in zip(paths, returned, strict=True):
        assert np.array_equal(path.token_ids, other.token_ids)
        assert (path.lengths, path.rows, path.prompt_length) == (other.lengths, other.rows, other.prompt_length)
