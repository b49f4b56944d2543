"""Attention over pages on a CPU: the same as prompt by prompt in float64, and plans that contradict themselves."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernels.test_prefix_attention import dense, make_inputs, make_layout, random_case

from trace_megatron.ops import PrefixPlan, prefix_attention


def attend(layout, inputs, scale):
    q, k, *_ = inputs
    return prefix_attention(*inputs, PrefixPlan(layout, q.size(1), k.size(1)), scale)


def test_random_shapes():
    generator = torch.Generator().manual_seed(1)
    for index in range(80):
        layout, inputs, scale = random_case(index, generator)
        inputs = [x.float() for x in inputs]
        wanted = dense(layout, *inputs, scale)
        torch.testing.assert_close(attend(layout, inputs, scale).double(), wanted, rtol=0, atol=2e-5)


def test_without_prefixes_no_pool_is_needed():
    generator = torch.Generator().manual_seed(2)
    layout = make_layout([20], [0], generator)
    q, k, v, *pages = make_inputs(layout, 2, 2, 64, generator, torch.float32)
    wanted = dense(layout, q, k, v, *pages, 0.125)
    torch.testing.assert_close(attend(layout, [q, k, v, None, None], 0.125).double(), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_begin": torch.tensor([0, 5])}, r"expected prompt_begin \[3\] from 0 to 8, found \[2\] from \[0\] to"),
        ({"prompt_begin": torch.tensor([0, 9, 8])}, "expected prompt_begin that does not fall"),
        ({"prefix_lengths": torch.tensor([0, -1])}, "prefix_lengths of at least 0"),
        ({"prefix_lengths": torch.tensor([0, 33])}, "expected 3 pages from 0 on, found 1"),
        ({"pages": torch.tensor([-1])}, "expected 1 pages from 0 on, found 1"),
        ({"subtree_end": torch.full((8,), 8).int()}, r"expected subtree_end\[0\] within its prompt, which ends at 5"),
    ],
)
def test_layouts_that_contradict_themselves_are_refused(change, message):
    layout = make_layout([5, 3], [0, 16], torch.Generator().manual_seed(3))
    with pytest.raises(ValueError, match=message):
        PrefixPlan(dataclasses.replace(layout, **change), 4, 2)


def test_tensors_other_than_planned_are_refused():
    generator = torch.Generator().manual_seed(4)
    layout = make_layout([5, 3], [0, 16], generator)
    inputs = make_inputs(layout, 2, 2, 64, generator, torch.float32)
    for place, change, message in [
        (0, lambda x: x[1:], r"expected q \[8, 4, 'D'\]"),
        (1, lambda x: x.double(), "expected k as torch.float32 on cpu like q, found torch.float64"),
        (2, lambda x: x[:, :1], r"v \[8, 1, 64\]"),
        (3, lambda x: None, "expected key_pages and value_pages"),
        (4, lambda x: x.half(), "expected value_pages as torch.float32"),
    ]:
        broken = [change(x) if place == index else x for index, x in enumerate(inputs)]
        with pytest.raises(ValueError, match=message):
            attend(layout, broken, 0.125)
    small = dataclasses.replace(layout, pages=torch.tensor([100]))
    with pytest.raises(ValueError, match="hold page 100"):
        attend(small, inputs, 0.125)
    with pytest.raises(ValueError, match="positive finite scale"):
        attend(layout, inputs, 0.0)
    with pytest.raises(ValueError, match="multiple of key heads, found 3 and 2"):
        PrefixPlan(layout, 3, 2)
    with pytest.raises(ValueError, match=r"below 2\^31, found"):
        PrefixPlan(layout, 2**30, 1).tiles_of(128)
