"""A packed step equals its trajectories trained one by one, however it is packed and cut."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import numpy as np
import pytest
import torch

from trace_megatron.algorithm.advantage import tree_advantages
from trace_megatron.algorithm.loss import clipped_edges, k3_kl, tree_policy_loss
from trace_megatron.algorithm.pack import (
    pack_micro_batches,
    pack_trees,
    pad_batch,
    trained_edges,
    with_old_logprobs,
)
from trace_megatron.algorithm.tree import build_structure, rollout_turns
from trace_megatron.config import MethodConfig
from trace_megatron.ops import check_subtree_end
from trace_megatron.types import ROOT, Anchor

from .tiny_model import TinyModel
from .trees import make_rollout, make_tree, outcome_tree, random_tree, with_logprobs

LOW, HIGH, KL = 0.2, 0.28, 0.05
AGGREGATIONS = ["seq-mean-token-mean", "token-mean", "seq-mean-token-sum"]


def forest(kind: str) -> list:
    rng = random.Random(kind)
    turns = [(3, 2), (2, 1), (3, 0)]
    bare = make_rollout(ROOT, turns, 0.0, rng)
    if kind == "one leaf":
        return [make_tree(bare, name="q"), outcome_tree((ROOT, 1, 1.0), (ROOT, 2, 0.0))]
    if kind == "chain":  # the whole tree is one path: its beginning was sampled by a rollout that is not trained
        unknown = dataclasses.replace(bare, trained=False)
        return [make_tree(unknown, make_rollout(Anchor(0, 2), turns, 1.0, rng)), make_tree(bare, name="q")]
    if kind == "many leaves on one root":
        return [make_tree(*(make_rollout(ROOT, [(1 + j % 3, 0)], float(j % 2), rng) for j in range(9)))]
    if kind == "prefix of one token":
        short = make_rollout(ROOT, [(1, 0), (1, 0), (2, 0)], 0.0, rng)
        return [make_tree(short, make_rollout(Anchor(0, 1), [(1, 0)], 1.0, rng), prompt_ids=(5,))]
    if kind == "roots that begin with equal ids":
        twin = dataclasses.replace(bare, reward=1.0)
        tree = make_tree(bare, twin, make_rollout(Anchor(1, 1), turns, 0.0, rng))
        return [tree, dataclasses.replace(tree, prompt=make_tree(name="q").prompt)]
    if kind == "both signs below shared tokens":
        tree = make_tree(
            bare,
            make_rollout(Anchor(0, 1), [(4, 2), (2, 0)], 1.0, rng),
            make_rollout(Anchor(0, 1), [(1, 0)], 0.0, rng),
            make_rollout(Anchor(0, 2), [(2, 3), (5, 0)], 1.0, rng),
            make_rollout(ROOT, turns, 1.0, rng),
        )
        return [tree]
    assert kind == "random"
    return [random_tree(rng, name=f"p{j}", rewards=[0.0, 0.3, 1.0]) for j in range(6)]


KINDS = [
    "one leaf",
    "chain",
    "many leaves on one root",
    "prefix of one token",
    "roots that begin with equal ids",
    "both signs below shared tokens",
    "random",
]


def trajectory(tree, leaf):
    """One path as plain lists: token ids, whether each was sampled, its stored logprob."""
    ids, sampled, stored = list(tree.prompt.token_ids), [False] * len(tree.prompt.token_ids), []
    stored += [0.0] * len(ids)
    turns = rollout_turns(tree, leaf)
    for turn in turns:
        observation = turn.observation_ids if turn is not turns[-1] else ()
        ids += turn.action_ids + observation
        sampled += [True] * len(turn.action_ids) + [False] * len(observation)
        stored += turn.action_logprobs + (0.0,) * len(observation)
    return torch.tensor(ids), torch.tensor(sampled), torch.tensor(stored, dtype=torch.float32).double()


def causal_logprobs(model, ids):
    """[T - 1] logprobs of ids[1:], the trajectory alone."""
    length = len(ids)
    hidden = model(ids, torch.arange(length), torch.full((length,), length, dtype=torch.int32))
    return model.edge_logprobs(hidden, torch.arange(length - 1), ids[1:])


def near_policy(model, trees, spread: float, seed: int = 0):
    """The trees with stored logprobs around the model's own, so that ratios fall on both sides of the clip bounds."""
    rng, result = random.Random(seed), []
    for tree in trees:
        known = {}
        for index, rollout in enumerate(tree.rollouts):
            with torch.no_grad():
                ids, sampled, _ = trajectory(tree, index)
                values = causal_logprobs(model, ids)[sampled[1:]].tolist()
            for own in reversed(range(len(rollout.turns))):
                size = len(rollout.turns[own].action_ids)
                known[index, own] = [value - rng.uniform(-spread, spread) for value in values[-size:]]
                values = values[:-size]
        result.append(with_logprobs(tree, lambda index, own, known=known: known[index, own]))
    return result


def one_by_one(model, trees, method, aggregation, dual_clip, edges=None):
    """Loss of the trajectories, each in its own forward, with textbook PPO; ``edges`` collects logprobs by token."""
    leaves = [(tree, leaf) for tree in trees for leaf, r in enumerate(tree.rollouts) if r.trained]
    lengths = {(id(tree), leaf): int(trajectory(tree, leaf)[1].sum()) for tree, leaf in leaves}
    total = torch.zeros((), dtype=torch.float64)
    for tree in trees:
        advantages, s = tree_advantages(tree, method), build_structure(tree)
        for row, (leaf, path) in enumerate(zip(s.leaves, s.paths, strict=True)):
            ids, sampled, stored = trajectory(tree, leaf)
            length = lengths[id(tree), leaf]
            weight = {
                "seq-mean-token-mean": 1 / len(leaves) / length,
                "token-mean": 1 / sum(lengths.values()),
                "seq-mean-token-sum": 1 / len(leaves),
            }[aggregation]
            logprobs = causal_logprobs(model, ids)[sampled[1:]]
            owners = [node for node in path[1:] for _ in s.turns[node].action_ids]
            advantage = torch.tensor(advantages[row, owners])
            ratio = torch.exp(logprobs - stored[sampled])
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)
            if dual_clip:
                gain = torch.where(advantage < 0, torch.maximum(gain, dual_clip * advantage), gain)
            total = total + weight * (KL * k3_kl(logprobs, stored[sampled] - 0.1) - gain).sum()
            if edges is not None:
                edges.append((tree.prompt.prompt_id, owners, logprobs.detach()))
    return total


def packed_loss(model, batch, dual_clip):
    """The same loss from a pack."""
    edges = trained_edges(batch)
    hidden = model(batch.tokens, batch.position_ids, batch.subtree_end)
    logprobs = model.edge_logprobs(hidden, batch.predecessor[edges].long(), batch.tokens[edges])
    old = batch.old_logprobs[edges].double()
    masses = batch.positive_mass[edges], batch.negative_mass[edges]
    loss = tree_policy_loss(logprobs, old, *masses, LOW, HIGH, dual_clip)
    clipped = clipped_edges(logprobs, old, *masses, LOW, HIGH, dual_clip)
    return (loss + KL * batch.weight[edges] * k3_kl(logprobs, old - 0.1)).sum(), logprobs.detach(), clipped


def gradients(model, loss):
    return [g.clone() for g in torch.autograd.grad(loss, list(model.parameters()))]


def assert_same_gradients(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-8)
        assert float((a - b).abs().max()) <= 1e-10 * max(float(b.abs().max()), 1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("advantage", "dual_clip", "aggregation"),
    [
        ("tree_rpo", 0.0, "seq-mean-token-mean"),
        ("tree_grpo", 1.5, "token-mean"),
        ("grpo", 1.5, "seq-mean-token-sum"),
    ],
)
def test_packed_equals_one_by_one(kind, advantage, dual_clip, aggregation):
    model = TinyModel()
    trees = near_policy(model, forest(kind), spread=0.8)
    method = MethodConfig(advantage=advantage, singleton="reward")
    edges: list = []
    expected = one_by_one(model, trees, method, aggregation, dual_clip, edges)
    wanted = gradients(model, expected)
    advantages = [tree_advantages(tree, method) for tree in trees]
    for packed in (True, False):
        batch = pack_trees(trees, advantages, aggregation=aggregation, packed=packed)
        check_subtree_end(batch.subtree_end, batch.num_tokens)
        loss, logprobs, clipped = packed_loss(model, batch, dual_clip)
        assert abs((loss - expected).item()) <= 1e-12
        assert_same_gradients(gradients(model, loss), wanted)
        if advantage == "tree_grpo" and kind not in ("one leaf", "chain"):
            assert clipped.any() and not clipped.all()
        if not packed:
            torch.testing.assert_close(logprobs, torch.cat([e[2] for e in edges]), rtol=0, atol=1e-10)
            assert batch.num_tokens == batch.num_unpacked_tokens
    if kind in ("both signs below shared tokens", "random"):
        batch = pack_trees(trees, advantages)
        assert batch.num_tokens < batch.num_unpacked_tokens
        if advantage != "tree_rpo":  # where one node has one advantage for all leaves, only one mass is used
            assert ((batch.positive_mass > 0) & (batch.negative_mass > 0)).any()


@pytest.mark.parametrize("kind", KINDS)
def test_packed_logprobs_equal_the_trajectories(kind):
    """Every leaf's logprobs, token by token: the packed ones are found through the tree's own node order."""
    model = TinyModel(1)
    trees = forest(kind)
    method = MethodConfig(advantage="grpo")
    edges: list = []
    one_by_one(model, trees, method, "token-mean", 0.0, edges)
    batch = pack_trees(trees, [tree_advantages(tree, method) for tree in trees])
    with torch.no_grad():
        _, logprobs, _ = packed_loss(model, batch, 0.0)
    expected: dict = {}
    for prompt_id, owners, values in edges:
        place: Counter = Counter()
        for owner, value in zip(owners, values.tolist(), strict=True):
            key = (prompt_id, owner, place[owner])
            place[owner] += 1
            assert expected.setdefault(key, value) == pytest.approx(value, abs=1e-10)  # one value for all leaves
    assert len(expected) == len(logprobs)
    assert sorted(expected.values()) == pytest.approx(sorted(logprobs.tolist()), abs=1e-10)


def test_layout_of_the_worked_example():
    """Prompt 1 2 3; bare 0 in two turns; its continuation after turn 1; bare 1. The fork is after the observation."""
    rng = random.Random(0)
    tree = make_tree(
        make_rollout(ROOT, [(2, 1), (1, 2)], 0.0, rng),  # what follows the last action is left out
        make_rollout(Anchor(0, 1), [(2, 0)], 1.0, rng),
        make_rollout(ROOT, [(1, 0)], 1.0, rng),
    )
    s = build_structure(tree)
    advantages = np.zeros((3, s.num_nodes))
    advantages[0, [1, 2]], advantages[1, [1, 3]], advantages[2, 4] = -2.0, 1.0, 3.0
    batch = pack_trees([tree], [advantages])
    t = [turn for rollout in tree.rollouts for turn in rollout.turns]
    assert batch.tokens.tolist() == [
        *(1, 2, 3), *t[0].action_ids, *t[0].observation_ids, *t[1].action_ids, *t[2].action_ids, *t[3].action_ids
    ]  # fmt: skip
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 6, 7, 3]
    assert batch.subtree_end.tolist() == [10, 10, 10, 9, 9, 9, 7, 9, 9, 10]
    assert batch.predecessor.tolist() == [-1, 0, 1, 2, 3, 4, 5, 5, 7, 2]
    weights = [1 / 9, 1 / 12, 1 / 3]  # one third of a leaf over its 3, 4 and 1 action tokens
    shared = sum(weights[:2])
    np.testing.assert_allclose(
        batch.weight, [0, 0, 0, shared, shared, 0, weights[0], weights[1], weights[1], weights[2]], rtol=1e-15
    )
    np.testing.assert_allclose(batch.positive_mass, [0, 0, 0, 1 / 12, 1 / 12, 0, 0, 1 / 12, 1 / 12, 1], rtol=1e-15)
    np.testing.assert_allclose(batch.negative_mass, [0, 0, 0, 2 / 9, 2 / 9, 0, 2 / 9, 0, 0, 0], rtol=1e-15)
    assert batch.num_unpacked_tokens == 7 + 8 + 4
    assert batch.rollout_logprobs.tolist()[3:5] == pytest.approx(t[0].action_logprobs)
    assert torch.equal(batch.old_logprobs, batch.rollout_logprobs) and not batch.reference_logprobs.any()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_cuts_over_micro_batches_and_ranks_add_up(aggregation):
    model = TinyModel(2)
    trees = near_policy(model, forest("random") + forest("both signs below shared tokens"), spread=0.8)
    advantages = [tree_advantages(tree, MethodConfig(advantage="tree_grpo")) for tree in trees]
    whole = pack_trees(trees, advantages, aggregation=aggregation)
    loss, _, _ = packed_loss(model, whole, 1.5)
    wanted = gradients(model, loss)
    longest = max(len(trajectory(tree, leaf)[0]) for tree in trees for leaf in build_structure(tree).leaves)
    layouts = [(40, 2)] if aggregation != AGGREGATIONS[0] else [(10_000, 3), (40, 1), (40, 2), (longest, 3), (1, 1)]
    for limit, num_ranks in layouts:
        ranks = pack_micro_batches(
            trees, advantages, tokens_per_micro_batch=limit, num_ranks=num_ranks, aggregation=aggregation
        )
        assert len(ranks) == num_ranks and len({len(rank) for rank in ranks}) == 1
        packs = [pack for rank in ranks for pack in rank]
        assert sum(pack.num_unpacked_tokens for pack in packs) == whole.num_unpacked_tokens
        assert sum(float(p.weight.sum()) for p in packs) == pytest.approx(float(whole.weight.sum()), abs=1e-12)
        total, summed = 0.0, [torch.zeros_like(g) for g in wanted]
        for pack in packs:
            check_subtree_end(pack.subtree_end, pack.num_tokens)
            assert pack.num_tokens <= limit or int((pack.subtree_end == pack.num_tokens).sum()) == pack.num_tokens
            part, _, _ = packed_loss(model, pad_batch(pack, 4), 1.5)
            total += part.item()
            if part.requires_grad and pack.weight.any():
                summed = [a + b for a, b in zip(summed, gradients(model, part), strict=True)]
        assert abs(total - loss.item()) <= 1e-12
        assert_same_gradients(summed, wanted)


def test_each_leaf_lands_in_exactly_one_pack():
    trees = forest("random")
    advantages = [np.zeros((len(s.leaves), s.num_nodes)) for s in map(build_structure, trees)]
    ranks = pack_micro_batches(
        trees, advantages, tokens_per_micro_batch=30, num_ranks=2, aggregation="seq-mean-token-sum"
    )
    num_leaves = sum(array.shape[0] for array in advantages)
    shares = [float(pack.weight[ends].sum()) for rank in ranks for pack in rank for ends in [leaf_ends(pack)]]
    assert sum(shares) * num_leaves == pytest.approx(num_leaves)
    assert all(share * num_leaves == pytest.approx(round(share * num_leaves)) for share in shares)


def leaf_ends(pack):
    """Tokens that end a path: nothing hangs below them but themselves."""
    position = torch.arange(pack.num_tokens)
    return (pack.subtree_end == position + 1) & (pack.weight > 0)


def test_ranks_are_balanced_and_dummies_weigh_nothing():
    rng = random.Random(4)
    trees = [make_tree(*(make_rollout(ROOT, [(5, 0)], 0.0, rng) for _ in range(4)), name=str(j)) for j in range(8)]
    advantages = [np.zeros((4, 5))] * 8  # 23 tokens each
    loads = [
        sum(pack.num_tokens for pack in rank)
        for rank in pack_micro_batches(trees, advantages, tokens_per_micro_batch=50, num_ranks=4)
    ]
    assert loads == [46] * 4
    ranks = pack_micro_batches(trees[:1], advantages[:1], tokens_per_micro_batch=50, num_ranks=3)
    assert [[pack.num_tokens for pack in rank] for rank in ranks] == [[23], [1], [1]]
    dummy = ranks[1][0]
    assert not dummy.weight.any() and trained_edges(dummy).numel() == 0 and dummy.num_unpacked_tokens == 0
    assert dummy.subtree_end.tolist() == [1] and dummy.predecessor.tolist() == [-1]
    nothing = pack_micro_batches([], [], tokens_per_micro_batch=50, num_ranks=2)
    assert [[pack.num_tokens for pack in rank] for rank in nothing] == [[1], [1]]
    failed = outcome_tree((ROOT, 2, 0.0, False))
    assert not pack_trees([failed], [np.zeros((0, 3))]).weight.any()


def test_padding_attends_only_to_itself():
    batch = pack_trees(trees := forest("both signs below shared tokens"), [tree_advantages(trees[0], MethodConfig())])
    padded = pad_batch(batch, 64)
    assert padded.num_tokens % 64 == 0 and pad_batch(padded, 64) is padded
    check_subtree_end(padded.subtree_end, padded.num_tokens)
    size = batch.num_tokens
    assert padded.subtree_end[size:].tolist() == list(range(size + 1, padded.num_tokens + 1))
    assert (padded.predecessor[size:] == -1).all()
    for field in dataclasses.fields(batch):
        before, after = getattr(batch, field.name), getattr(padded, field.name)
        if isinstance(before, torch.Tensor):
            assert before.dtype == after.dtype and torch.equal(before, after[:size])
    assert not padded.weight[size:].any()


def test_decoupled_old_logprobs_scale_both_masses():
    trees = forest("both signs below shared tokens")
    batch = pack_trees(trees, [tree_advantages(trees[0], MethodConfig())])
    trainer = (batch.rollout_logprobs + torch.linspace(-1, 2, batch.num_tokens)).requires_grad_()
    garbage = torch.where(batch.weight > 0, trainer, torch.nan)  # a trainer need not fill the other positions
    decoupled = with_old_logprobs(batch, garbage, importance_cap=2.0)
    trained = trained_edges(batch)
    importance = torch.exp((trainer - batch.rollout_logprobs).detach().double()).clamp(max=2.0)[trained]
    assert (importance == 2.0).any() and (importance < 1.0).any()
    for name in ("positive_mass", "negative_mass"):
        scaled = getattr(decoupled, name)
        torch.testing.assert_close(scaled[trained], getattr(batch, name)[trained] * importance, rtol=1e-6, atol=0)
        assert torch.isfinite(scaled).all() and not scaled.requires_grad
    assert torch.equal(decoupled.old_logprobs[trained], trainer.detach()[trained])
    assert torch.isfinite(decoupled.old_logprobs).all() and torch.equal(decoupled.weight, batch.weight)
    assert torch.equal(decoupled.rollout_logprobs, batch.rollout_logprobs)


def test_bad_input_is_named():
    trees = forest("chain")
    good = [tree_advantages(tree, MethodConfig()) for tree in trees]
    with pytest.raises(ValueError, match="one advantage array per tree"):
        pack_trees(trees, good[:1])
    with pytest.raises(ValueError, match="prompt p: expected finite advantages"):
        pack_trees(trees, [good[0] * np.nan, good[1]])
    with pytest.raises(ValueError, match="prompt p: expected finite advantages"):
        pack_trees(trees, [good[0][:, 1:], good[1]])
    with pytest.raises(ValueError, match=r"token-mean.*found 'mean'"):
        pack_trees(trees, good, aggregation="mean")
    with pytest.raises(ValueError, match="positive limit"):
        pack_micro_batches(trees, good, tokens_per_micro_batch=0)
    broken = with_logprobs(
        trees[1], lambda index, own: [float("nan")] * len(trees[1].rollouts[index].turns[own].action_ids)
    )
    with pytest.raises(ValueError, match="prompt q: expected finite action logprobs"):
        pack_trees([broken], good[1:])
