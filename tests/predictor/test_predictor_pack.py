"""Every history is read back from the pack through its attention alone; every shared token stands there once."""

import numpy as np
import pytest
from example_trees import make_prompt, make_rollout, make_turn, random_trees

from trace_megatron.algorithm.tree import history_ids, prefix_anchors
from trace_megatron.ops import check_subtree_end
from trace_megatron.predictor.pack import pack_histories
from trace_megatron.types import ROOT, Anchor, RolloutTree


def visible_histories(batch) -> dict[int, list[int]]:
    """Row -> the tokens that the history's last token sees."""
    found = {}
    for row, last in zip(batch.rows.tolist(), batch.last_positions.tolist(), strict=True):
        seen = [j for j in range(last + 1) if last < batch.subtree_end[j]]
        assert batch.position_ids[seen].tolist() == list(range(len(seen)))
        assert row not in found
        found[row] = batch.tokens[seen].tolist()
    return found


@pytest.mark.parametrize("tokens_per_batch", [10_000, 100, 30, 1])
def test_every_history_is_read_back(tokens_per_batch):
    rng = np.random.default_rng(0)
    trees = random_trees(0, 12) * 2  # twins of whole trees
    requests = []
    for tree in trees:
        anchors = [ROOT, *prefix_anchors(tree)]
        requests.append((tree, [anchors[index] for index in rng.permutation(len(anchors))]))
    batches = pack_histories(requests, tokens_per_batch)
    histories = {}
    for batch in batches:
        check_subtree_end(batch.subtree_end, batch.num_tokens)
        histories |= visible_histories(batch)
    expected = [list(history_ids(tree, anchor)) for tree, anchors in requests for anchor in anchors]
    assert [histories[row] for row in range(len(expected))] == expected
    longest = max(len(history) for history in expected)
    assert all(batch.num_tokens <= max(tokens_per_batch, longest) for batch in batches)


def test_a_pack_holds_each_distinct_beginning_once():
    requests = [(tree, [ROOT, *prefix_anchors(tree)]) for tree in random_trees(1, 12) * 2]
    (batch,) = pack_histories(requests, 10_000)
    histories = [history_ids(tree, anchor) for tree, anchors in requests for anchor in anchors]
    beginnings = {history[: size + 1] for history in histories for size in range(len(history))}
    assert batch.num_tokens == len(beginnings) < sum(map(len, histories)) / 2


def test_a_pack_by_hand():
    tree = RolloutTree(
        make_prompt([1, 2]),
        (
            make_rollout([make_turn([4], [5]), make_turn([6])], 0.0),
            make_rollout([make_turn([3]), make_turn([6], [7]), make_turn([8])], 1.0),
        ),
    )
    (batch,) = pack_histories([(tree, [Anchor(0, 1), Anchor(1, 2), ROOT, Anchor(1, 1)])], 100)
    assert batch.tokens.tolist() == [1, 2, 3, 6, 7, 4, 5]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 2, 3]
    assert batch.subtree_end.tolist() == [7, 7, 5, 5, 5, 7, 7]
    assert dict(zip(batch.rows.tolist(), batch.last_positions.tolist(), strict=True)) == {0: 6, 1: 4, 2: 1, 3: 2}


def test_shared_beginnings_are_found_whatever_the_ids():
    """Ids of one to three bytes: neighbours in the pack must be those that share most."""
    rng = np.random.default_rng(0)
    ids = [7, 255, 256, 65_535, 65_536, 150_000]
    prompts = [make_prompt(rng.choice(ids, rng.integers(1, 7)).tolist(), str(index)) for index in range(300)]
    (batch,) = pack_histories([(RolloutTree(prompt, ()), [ROOT]) for prompt in prompts], 10_000)
    beginnings = {prompt.token_ids[: size + 1] for prompt in prompts for size in range(len(prompt.token_ids))}
    assert batch.num_tokens == len(beginnings)
    histories = visible_histories(batch)
    assert [histories[row] for row in range(300)] == [list(prompt.token_ids) for prompt in prompts]


def test_histories_that_nobody_visited_are_refused():
    tree = RolloutTree(make_prompt([1, 2]), (make_rollout([make_turn([3])], 0.0),))
    with pytest.raises(ValueError, match="expected a visited history"):
        pack_histories([(tree, [Anchor(0, 2)])], 100)
    with pytest.raises(ValueError, match="expected at least one token"):
        pack_histories([(RolloutTree(make_prompt([]), ()), [ROOT])], 100)
    assert pack_histories([], 100) == pack_histories([(tree, [])], 100) == []
