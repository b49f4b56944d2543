"""Prompts known from the root pass: the same scores from fewer tokens, and never those of other weights."""

import copy

import numpy as np
import pytest
import torch
from example_trees import make_prompt, make_rollout, make_turn
from test_value_model import predictor_for

from trace_megatron.algorithm.tree import prefix_anchors
from trace_megatron.ops import PAGE_TOKENS
from trace_megatron.predictor.key_values import KeyValuePages
from trace_megatron.predictor.pack import history_paths, pack_histories
from trace_megatron.predictor.score import score_paths
from trace_megatron.types import ROOT, RolloutTree

OPENING = list(range(1, 25))  # of every prompt: one whole page and a half


def long_trees(num_trees, seed=0):
    """Prompts of 24 common tokens and 8 to 60 of their own, with three rollouts of two to four turns."""
    rng = np.random.default_rng(seed)

    def ids(low, high):
        return rng.integers(1, 60, rng.integers(low, high)).tolist()

    def rollout():
        turns = [make_turn(ids(2, 9), ids(1, 6)) for _ in range(rng.integers(1, 4))]
        return make_rollout((*turns, make_turn(ids(2, 5))), float(rng.integers(2)))

    def tree():
        return RolloutTree(make_prompt(OPENING + ids(8, 61)), tuple(rollout() for _ in range(3)))

    return [tree() for _ in range(num_trees)]


def roots(trees):
    return [(RolloutTree(tree.prompt, ()), (ROOT,)) for tree in trees]


def score_histories(model, requests, tokens_per_forward, pages=None, keep=False):
    scores = torch.zeros(sum(len(anchors) for _, anchors in requests), dtype=torch.float64)
    score_paths(model, history_paths(requests), tokens_per_forward, scores, pages, keep)
    return scores.numpy()


def pages_for(model, max_bytes=1 << 24):
    return KeyValuePages(model.backbone.config, model.product_dtype, model.device, max_bytes)


def count_computed(model):
    """Tokens of each forward of the backbone's first layer."""
    counts = []
    model.backbone.layers[0].register_forward_pre_hook(lambda _, inputs: counts.append(inputs[0].shape[1]))
    return counts


@pytest.mark.parametrize("folder", ["tiny_llama", "tiny_qwen3"])
@pytest.mark.parametrize("tokens_per_forward", [90, 8192])
def test_scores_are_the_same_from_fewer_tokens(folder, tokens_per_forward, request):
    predictor, _ = predictor_for(request.getfixturevalue(folder), tokens_per_forward=tokens_per_forward)
    model, trees = predictor._model, long_trees(6)
    requests = [(tree, prefix_anchors(tree)) for tree in trees]
    alone = score_histories(model, requests, tokens_per_forward)
    root_scores = score_histories(model, roots(trees), tokens_per_forward)
    pages, computed = pages_for(model), count_computed(model)
    kept = score_histories(model, roots(trees), tokens_per_forward, pages, keep=True)
    np.testing.assert_allclose(kept, root_scores, rtol=0, atol=1e-6)
    assert len(pages) > 0
    computed.clear()
    again = score_histories(model, requests, tokens_per_forward, pages)
    np.testing.assert_allclose(again, alone, rtol=0, atol=1e-6)
    assert np.std(alone) > 1e-3
    batches = pack_histories(requests, tokens_per_forward)
    known = [{position for page in batch.pages for position in page.positions} for batch in batches]
    assert computed == [batch.num_tokens - len(tokens) for batch, tokens in zip(batches, known, strict=True)]
    assert sum(computed) < 0.8 * sum(batch.num_tokens for batch in batches)
    # roots asked for again: only the rests of the prompts and their last tokens are computed
    computed.clear()
    np.testing.assert_allclose(
        score_histories(model, roots(trees), tokens_per_forward, pages), root_scores, rtol=0, atol=1e-6
    )
    assert sum(computed) <= len(trees) * PAGE_TOKENS


def test_any_part_of_the_pages_may_be_known(tiny_llama):
    predictor, _ = predictor_for(tiny_llama)
    model, trees = predictor._model, long_trees(5, seed=1)
    requests = [*roots(trees), *((tree, prefix_anchors(tree)) for tree in trees)]
    expected = score_histories(model, requests, 8192)
    rng = np.random.default_rng(2)
    for share in (0.0, 0.2, 0.5, 0.8):
        pages = pages_for(model)
        score_histories(model, roots(trees), 8192, pages, keep=True)
        for digest in [digest for digest in pages._pages if rng.random() < share]:
            pages._free.append(pages._pages.pop(digest))
        for keep in (True, False):  # the second reads what the first kept
            actual = score_histories(model, requests, 8192, pages, keep)
            np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)


def test_a_common_opening_is_kept_once_and_known_to_later_packs(tiny_llama):
    predictor, _ = predictor_for(tiny_llama)
    trees = long_trees(3)
    pages = pages_for(predictor._model)
    for tree in trees:
        score_histories(predictor._model, roots([tree]), 8192, pages, keep=True)
    sizes = [len(tree.prompt.token_ids) // PAGE_TOKENS for tree in trees]
    assert len(pages) == sum(sizes) - (len(trees) - 1)


@pytest.mark.parametrize("change", ["update", "load"])
def test_nothing_is_used_across_versions(tiny_llama, change, tmp_path):
    predictor, _ = predictor_for(tiny_llama)
    trees = long_trees(4)
    before = copy.deepcopy(predictor._model.state_dict())
    prompts = [tree.prompt for tree in trees]
    if change == "load":
        predictor.snapshot()(tmp_path / "predictor")
        with torch.no_grad():
            for parameter in predictor._model.backbone.parameters():
                parameter.mul_(1.05)
    old = np.concatenate([predictor.score_roots(prompts), *predictor.score_prefixes_many(trees)])
    if change == "update":
        predictor.update(trees, "leaf_mean")
        assert any(not torch.equal(value, before[name]) for name, value in predictor._model.state_dict().items())
    else:
        predictor.load(tmp_path / "predictor")
    requests = [(tree, prefix_anchors(tree)) for tree in trees]
    fresh = score_histories(predictor._model, requests, 8192)
    scores = np.concatenate(predictor.score_prefixes_many(trees))
    np.testing.assert_allclose(scores, fresh, rtol=0, atol=1e-7)
    assert np.abs(scores - old[len(prompts) :]).max() > 1e-5


def test_memory_is_bounded_and_the_least_recently_used_go_first(tiny_llama):
    predictor, _ = predictor_for(tiny_llama)
    model, trees = predictor._model, long_trees(8)
    page_bytes = pages_for(model, 0)
    assert page_bytes.max_pages == 0
    one_page = next(size for size in range(1, 1 << 20, 64) if pages_for(model, size).max_pages == 1)
    pages = pages_for(model, 5 * one_page)
    assert pages.max_pages == 5
    expected = score_histories(model, roots(trees), 8192)
    for tree, score in zip(trees, expected, strict=True):
        actual = score_histories(model, roots([tree]), 8192, pages, keep=True)
        np.testing.assert_allclose(actual, [score], rtol=0, atol=1e-6)
        assert len(pages) <= 5
    requests = [(tree, prefix_anchors(tree)) for tree in trees]
    np.testing.assert_allclose(
        score_histories(model, requests, 8192, pages), score_histories(model, requests, 8192), rtol=0, atol=1e-6
    )
    computed = count_computed(model)
    score_histories(model, roots(trees[-1:]), 8192, pages)
    size = len(trees[-1].prompt.token_ids)
    assert computed == [size - min(5, size // PAGE_TOKENS) * PAGE_TOKENS or 1]


def test_a_failed_forward_keeps_nothing(tiny_llama):
    predictor, _ = predictor_for(tiny_llama)
    model, trees = predictor._model, long_trees(2)
    pages = pages_for(model)
    hook = model.backbone.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        score_histories(model, roots(trees), 8192, pages, keep=True)
    hook.remove()
    assert len(pages) == 0
    score_histories(model, roots(trees), 8192, pages, keep=True)
    expected = score_histories(model, roots(trees), 8192)
    np.testing.assert_allclose(score_histories(model, roots(trees), 8192, pages), expected, rtol=0, atol=1e-6)
