"""The ops of csrc/cuda, checks and launches, with their kernels on the CPU: all of the CUDA path but the device."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from ops.forests import random_forest

from trace_megatron.ops.reference import allocate as allocate_reference
from trace_megatron.ops.reference import block_mask as block_mask_reference
from trace_megatron.ops.reference import value_head as value_head_reference

from .simt import build

TORCH = Path(torch.__file__).parent


@functools.cache
def ops():
    includes = [f"-I{TORCH}/include", f"-I{TORCH}/include/torch/csrc/api/include"]
    libraries = [
        f"-L{TORCH}/lib",
        "-ltorch_cpu",
        "-lc10",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    library = build(Path(__file__).parent / "binding.cpp", *includes, *libraries)
    torch.ops.load_library(library)
    ctypes.CDLL(str(library)).simt_trust_unknown(1)
    return torch.ops.trace_megatron_simt


def test_allocation():
    generator = torch.Generator().manual_seed(1)
    budgets, offsets = torch.tensor([9, 4, 0]), torch.tensor([0, 5, 11, 12])
    for dtype in (torch.float32, torch.float64):
        probs = torch.rand(12, generator=generator, dtype=dtype)
        for cap, exact in [(None, True), (4, True), (3, False)]:
            wanted = allocate_reference.allocate_roots(probs, budgets, offsets, cap, exact)
            assert torch.equal(ops().allocate_roots(probs, budgets, offsets, cap, exact), wanted)
        wanted = allocate_reference.allocate_prefixes(probs, budgets, offsets)
        assert torch.equal(ops().allocate_prefixes(probs, budgets, offsets), wanted)
    assert ops().allocate_prefixes(torch.tensor([0.5, 2.0]), torch.tensor([3]), torch.tensor([0, 2])).tolist() == [
        -1,
        -1,
    ]
    assert ops().allocate_prefixes(torch.zeros(0), torch.zeros(0).long(), torch.tensor([0])).numel() == 0
    table = torch.rand(5, 7, generator=generator, dtype=torch.float64)
    for exact in (True, False):
        wanted = allocate_reference.allocate_table(table, 12, exact)
        assert torch.equal(ops().allocate_table(table, 12, exact), wanted)


def test_block_masks():
    for num_tokens in (0, 1, 300):
        end = random_forest(num_tokens, torch.Generator().manual_seed(2))
        wanted = block_mask_reference.tree_block_mask(end, 16)
        actual = ops().tree_block_mask(end, 16)
        assert all(torch.equal(a, w) for a, w in zip(actual, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [True, False])
def test_value_head(dtype, with_bias):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(12, 40, generator=generator).to(dtype).requires_grad_()
    index = torch.tensor([0, 11, 3, 3])
    weights = [x.to(dtype).requires_grad_() for x in torch.rand(2, 40, generator=generator)]
    bias = torch.tensor([0.25], dtype=dtype).requires_grad_() if with_bias else None
    wanted = value_head_reference.value_head(hidden, index, *weights, bias, 1e-3)
    inputs = [x.detach() if x is not None else None for x in (hidden, index, *weights, bias)]
    probs = ops().value_head_forward(*inputs, 1e-3)
    torch.testing.assert_close(probs, wanted.float(), rtol=0, atol=1e-6)
    grad = torch.randn(4, generator=generator)
    leaves = [hidden, *weights] + ([bias] if with_bias else [])
    gradients = torch.autograd.grad(wanted, leaves, grad.to(wanted.dtype))
    actual = ops().value_head_backward(grad, probs, *inputs, 1e-3)
    for a, w in zip(actual, gradients, strict=False):
        assert a.dtype == w.dtype or a is actual[3]
        torch.testing.assert_close(a.float(), w.float(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-5)


def test_wrong_arguments_are_named_before_any_launch():
    half, one, pair = torch.tensor([0.5, 0.25]), torch.tensor([2]), torch.tensor([0, 2])
    hidden, index, weights, end = torch.ones(3, 8), torch.tensor([0]), torch.ones(8), torch.tensor([1]).int()
    misplaced = torch.from_numpy(np.frombuffer(bytearray(9), dtype=np.float32, count=2, offset=1))
    table, blocks, roots = ops().allocate_table, ops().tree_block_mask, ops().allocate_roots

    def prefixes(probs, budgets=one, offsets=pair):
        return ops().allocate_prefixes(probs, budgets, offsets)

    def head(hidden=hidden, index=index, norm_weight=weights, bias=None):
        return ops().value_head_forward(hidden, index, norm_weight, weights, bias, 1e-6)

    for call, message in [
        (lambda: prefixes(half.half()), "repeat_probs as a vector of float32 or float64, found Half"),
        (lambda: prefixes(half[None]), r"as a vector .* found Float \[1, 2\]"),
        (lambda: prefixes(torch.rand(4)[::2]), r"repeat_probs without gaps, found sizes \[2\] and strides \[2\]"),
        (lambda: prefixes(misplaced), r"repeat_probs at a multiple of 4 bytes, found [123] bytes beyond one"),
        (lambda: prefixes(half, one.int()), r"budgets as Long \[1\] on cpu, found Int \[1\] on cpu"),
        (lambda: prefixes(half, one, pair[:1]), r"offsets as Long \[2\] on cpu, found Long \[1\]"),
        (lambda: roots(half, one, pair, -1, True), "max_rollouts from 0 on, found -1"),
        (lambda: table(torch.rand(2, 3), 2, True), r"\[P, cap \+ 1\] as float64, found Float \[2, 3\]"),
        (lambda: table(torch.rand(2, 0).double(), 2, True), r"found Double \[2, 0\]"),
        (lambda: table(torch.rand(2, 3).double(), -1, True), "budget from 0 to 2147483646, found -1"),
        (lambda: table(torch.rand(2, 3).double(), 20477, True), r"of at most 20479, found 20477 \+ 3.*to the cpu"),
        (lambda: table(torch.rand(0, 3).double(), 2, True), "spend exactly, found 2"),
        (lambda: blocks(end.long(), 16), r"subtree_end as Int \[1\] on cpu, found Long"),
        (lambda: blocks(end, 0), "positive block size, found 0"),
        (lambda: blocks(end, 2**40), "at most 2147483647 tokens in a block, found 1099511627776"),
        (lambda: head(hidden[0]), r"hidden \[T, C\] as float32 or bfloat16, found Float \[8\]"),
        (lambda: head(hidden.double()), "found Double"),
        (lambda: head(hidden.T), "hidden without gaps"),
        (lambda: head(index=index.int()), r"index as Long \[1\]"),
        (lambda: head(norm_weight=weights[:5]), r"floats \[8\] on cpu, found Float \[5\]"),
        (lambda: head(bias=weights), r"one bias on cpu, found \[8\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
