"""Packed histories carry the same tokens, and give the same hidden states, as each history alone."""

from __future__ import annotations

import random

import pytest
import torch

from trace_megatron.algorithm.histories import pack_histories
from trace_megatron.algorithm.tree import history_ids, prefix_anchors
from trace_megatron.ops import check_subtree_end
from trace_megatron.types import ROOT, Anchor

from .tiny_model import TinyModel
from .trees import make_tree, outcome_tree, random_tree


@pytest.mark.parametrize("limit", [None, 60, 25, 1])
def test_hidden_states_equal_each_history_alone(limit):
    rng = random.Random(0)
    trees = [random_tree(rng, name=str(j)) for j in range(8)] + [make_tree(prompt_ids=(4, 4), name="no rollouts")]
    requests = [(tree, [*reversed(prefix_anchors(tree)), ROOT]) for tree in trees]
    requests.insert(3, (trees[0], []))
    model = TinyModel(3)
    batches = pack_histories(requests, limit)
    packed = []
    with torch.no_grad():
        for batch in batches:
            check_subtree_end(batch.subtree_end, batch.num_tokens)
            packed.append(model(batch.tokens, batch.position_ids, batch.subtree_end)[batch.anchor_index])
            whole_path = bool((batch.subtree_end == batch.num_tokens).all())
            assert limit is None or batch.num_tokens <= limit or whole_path
        alone = []
        for tree, anchors in requests:
            for anchor in anchors:
                ids = torch.tensor(history_ids(tree, anchor))
                end = torch.full((len(ids),), len(ids), dtype=torch.int32)
                alone.append(model(ids, torch.arange(len(ids)), end)[-1])
    torch.testing.assert_close(torch.cat(packed), torch.stack(alone), rtol=0, atol=1e-12)
    tokens = sum(batch.num_tokens for batch in batches)
    separate = sum(len(history_ids(tree, anchor)) for tree, anchors in requests for anchor in anchors)
    assert tokens < separate or limit == 1
    assert limit is not None or len(batches) == 1


def test_a_cut_repeats_what_later_anchors_need():
    """Prompt of 3 tokens, turns of 1, at most 6: after a cut an anchor brings its whole path along again."""
    tree = outcome_tree(*[(ROOT, 3, 0.0)] * 3)
    anchors = [Anchor(0, 1), Anchor(1, 1), Anchor(2, 1), Anchor(0, 2), Anchor(1, 2)]
    batches = pack_histories([(tree, anchors)], 6)
    assert [batch.num_tokens for batch in batches] == [6, 5, 5]
    assert [batch.anchor_index.tolist() for batch in batches] == [[3, 4, 5], [4], [4]]


def test_inherited_names_and_unknown_anchors():
    tree = outcome_tree((ROOT, 3, 0.0), (Anchor(0, 1), 2, 1.0))
    (batch,) = pack_histories([(tree, [Anchor(0, 1), Anchor(1, 1), Anchor(1, 2)])])
    assert batch.anchor_index.tolist() == [3, 3, 4] and batch.num_tokens == 5
    assert pack_histories([]) == [] and pack_histories([(tree, [])]) == []
    for anchor in (Anchor(0, 4), Anchor(2, 1), Anchor(0, 0)):
        with pytest.raises(ValueError, match="visited history"):
            pack_histories([(tree, [anchor])])
