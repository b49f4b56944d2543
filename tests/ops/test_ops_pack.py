"""Packing of segments against their paths, and cutting against what a cut must hold."""

from __future__ import annotations

import pytest
import torch

from trace_megatron.ops import check_subtree_end, cut_tree, native, pack_tree
from trace_megatron.ops.reference import pack as reference

from .forests import random_int

BUILDS = [False, pytest.param(True, marks=pytest.mark.skipif(not native.AVAILABLE, reason="not built"))]


def random_segments(num_segments, generator, *, empty=False):
    sizes = torch.randint(0 if empty else 1, 9, (num_segments,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    parents = torch.tensor([random_int(-1, n, generator) for n in range(num_segments)], dtype=torch.int64)
    return torch.randint(0, 1000, (int(offsets[-1]),), generator=generator), offsets, parents


def path_of(segment, parents):
    return [*path_of(int(parents[segment]), parents), segment] if segment >= 0 else []


def tips_of(parents):
    return torch.tensor(sorted(set(range(parents.numel())) - set(parents.tolist())), dtype=torch.int64)


def history(pack, position):
    """Tokens that the token at a position sees, itself included, with their predecessors' chain checked."""
    seen = [j for j in range(position + 1) if position < pack.subtree_end[j]]
    assert [int(pack.position_ids[j]) for j in seen] == list(range(len(seen)))
    assert [int(pack.predecessor[j]) for j in seen] == [-1, *seen[:-1]]
    return [int(pack.tokens[j]) for j in seen]


@pytest.mark.parametrize("built", BUILDS)
@pytest.mark.parametrize("empty", [False, True])
def test_every_history_is_the_path_of_its_segment(built, empty, monkeypatch):
    monkeypatch.setattr(native, "AVAILABLE", built)
    generator = torch.Generator().manual_seed(1)
    for index in range(30):
        tokens, offsets, parents = random_segments(random_int(1, 15, generator), generator, empty=empty)
        leaves = None if index % 2 else tips_of(parents)[:2]
        pack = pack_tree(tokens, offsets, parents, leaves)
        check_subtree_end(pack.subtree_end, pack.tokens.numel())
        kept = set(range(parents.numel())) if leaves is None else {s for x in leaves for s in path_of(int(x), parents)}
        assert pack.tokens.numel() == sum(int(offsets[s + 1] - offsets[s]) for s in kept)
        for segment, last in enumerate(pack.last_position.tolist()):
            if segment not in kept:
                assert last == -1
                continue
            path = path_of(segment, parents)
            wanted = torch.cat([tokens[offsets[s] : offsets[s + 1]] for s in path]).tolist()
            assert (history(pack, last) if last >= 0 else []) == wanted


@pytest.mark.skipif(not native.AVAILABLE, reason="not built")
def test_native_equals_reference():
    generator = torch.Generator().manual_seed(2)
    for index in range(60):
        tokens, offsets, parents = random_segments(random_int(1, 40, generator), generator, empty=index % 3 == 0)
        leaves = None if index % 2 else tips_of(parents)[::2].contiguous()
        actual = torch.ops.trace_megatron.pack_tree(tokens, offsets, parents, leaves)
        for a, w in zip(actual, reference.pack_tree(tokens, offsets, parents, leaves), strict=True):
            assert a.dtype == w.dtype and torch.equal(a, w)
        tips = tips_of(parents)[torch.randperm(tips_of(parents).numel(), generator=generator)]
        arguments = (offsets, parents, tips, random_int(1, 60, generator), random_int(1, 4, generator))
        actual = torch.ops.trace_megatron.cut_tree(*arguments)
        assert all(torch.equal(a, w) for a, w in zip(actual, reference.cut_tree(*arguments), strict=True)), arguments


@pytest.mark.parametrize("built", BUILDS)
def test_a_cut_keeps_to_the_limit_and_deals_out_equal_numbers(built, monkeypatch):
    monkeypatch.setattr(native, "AVAILABLE", built)
    generator = torch.Generator().manual_seed(3)
    for _ in range(30):
        tokens, offsets, parents = random_segments(random_int(1, 30, generator), generator)
        leaves, limit, num_ranks = tips_of(parents), random_int(1, 60, generator), random_int(1, 4, generator)
        cut = cut_tree(offsets, parents, leaves, limit, num_ranks)
        num_bins = cut.rank_of_bin.numel()
        assert torch.equal(
            torch.bincount(cut.rank_of_bin, minlength=num_ranks), torch.full((num_ranks,), num_bins // num_ranks)
        )
        for index in range(num_bins):
            members = leaves[cut.bin_of_leaf == index]
            size = pack_tree(tokens, offsets, parents, members).tokens.numel()
            assert size <= limit or members.numel() == 1
        assert cut.bin_of_leaf.numel() == leaves.numel() and int(cut.bin_of_leaf.max()) < num_bins


@pytest.mark.parametrize("built", BUILDS)
def test_ranks_are_balanced_by_attention_not_by_tokens(built, monkeypatch):
    """Two chains of 1,280 tokens visit 55 blocks each, two trees of ten branches 10 each: one of each kind a rank."""
    monkeypatch.setattr(native, "AVAILABLE", built)
    chains = [(1280, -1)] * 2
    bushes = [(0, -1), *[(128, 2)] * 10, (0, -1), *[(128, 13)] * 10]
    sizes, parents = zip(*chains, *bushes, strict=True)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(sizes).cumsum(0)])
    parents = torch.tensor(parents)
    cut = cut_tree(offsets, parents, tips_of(parents), 1280, 2)
    ranks = cut.rank_of_bin[cut.bin_of_leaf]  # per leaf: chain, chain, ten of a bush, ten of the other
    assert ranks[0] != ranks[1]
    assert set(ranks[2:12].tolist()) != set(ranks[12:].tolist())


@pytest.mark.parametrize("built", BUILDS)
def test_wrong_segments_are_named(built, monkeypatch):
    monkeypatch.setattr(native, "AVAILABLE", built)
    tokens, offsets, parents = torch.arange(4), torch.tensor([0, 2, 4]), torch.tensor([-1, 0])
    with pytest.raises(ValueError, match=r"parents\[1\] as -1 or an earlier segment, found 1"):
        pack_tree(tokens, offsets, torch.tensor([-1, 1]))
    with pytest.raises(ValueError, match="expected offsets from 0 to 4"):
        pack_tree(tokens, torch.tensor([0, 2, 5]), parents)
    with pytest.raises(ValueError, match="do not fall, found 2 after 3 at place 2"):
        pack_tree(tokens, torch.tensor([0, 3, 2, 4]), torch.tensor([-1, 0, 0]))
    with pytest.raises(ValueError, match="one parent for each of 2 segments, found 1"):
        pack_tree(tokens, offsets, parents[:1])
    with pytest.raises(ValueError, match=r"leaves within \[0, 2\), found 2 at place 1"):
        pack_tree(tokens, offsets, parents, torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="positive limit and ranks, found 0 and 1"):
        cut_tree(offsets, parents, torch.tensor([1]), 0)


@pytest.mark.skipif(not native.AVAILABLE, reason="not built")
def test_native_checks_beyond_the_references():
    with pytest.raises(ValueError, match="tokens as a vector of Long"):
        pack_tree(torch.arange(2, dtype=torch.int32), torch.tensor([0, 2]), torch.tensor([-1]))
    with pytest.raises(ValueError, match="without gaps"):
        pack_tree(torch.arange(4)[::2], torch.tensor([0, 2]), torch.tensor([-1]))
    with pytest.raises(ValueError, match="at most 2147483647 tokens, found 2147483648"):
        cut_tree(torch.tensor([0, 2**31]), torch.tensor([-1]), torch.tensor([0]), 10)


@pytest.mark.skipif(not native.AVAILABLE, reason="not built")
def test_registrations():
    tokens, offsets, parents = random_segments(6, torch.Generator().manual_seed(4))
    torch.library.opcheck(torch.ops.trace_megatron.pack_tree.default, (tokens, offsets, parents, tips_of(parents)))
    torch.library.opcheck(torch.ops.trace_megatron.cut_tree.default, (offsets, parents, tips_of(parents), 10, 2))
