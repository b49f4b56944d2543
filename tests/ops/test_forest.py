"""The forest check against its definition, on every vector of five tokens."""

from __future__ import annotations

import itertools

import pytest
import torch

from trace_megatron.ops import check_subtree_end, native


def native_check(subtree_end, num_tokens):
    torch.ops.trace_megatron.tree_block_mask(subtree_end, 128)


NATIVE = pytest.param(native_check, marks=pytest.mark.skipif(not native.AVAILABLE, reason="not built"), id="native")


@pytest.mark.parametrize("check", [check_subtree_end, NATIVE])
def test_exactly_the_nested_vectors_pass(check):
    size, accepted = 5, 0
    for values in itertools.product(range(size + 2), repeat=size):
        nested = all(j < values[j] <= size for j in range(size)) and all(
            values[i] <= values[j] for j in range(size) for i in range(j, min(values[j], size))
        )
        try:
            check(torch.tensor(values, dtype=torch.int32), size)
            valid = True
        except ValueError:
            valid = False
        assert valid == nested, values
        accepted += valid
    assert accepted == 42  # forests in preorder with 5 nodes: the fifth Catalan number
