"""The value head against its formula in float64, values and gradients."""

from __future__ import annotations

import pytest
import torch

from trace_megatron.ops import native, value_head
from trace_megatron.ops.reference import value_head as reference

BUILDS = [False, pytest.param(True, marks=pytest.mark.skipif(not native.AVAILABLE, reason="not built"))]


def inputs(dtype, generator, channels=37):
    hidden = torch.randn(12, channels, generator=generator).to(dtype)
    index = torch.tensor([0, 11, 3, 3, 7])  # a row may be asked for twice
    norm_weight, weight = torch.rand(2, channels, generator=generator) + 0.5
    return hidden, index, norm_weight, weight - 1.0, torch.tensor([0.3])


@pytest.mark.parametrize("built", BUILDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_values_and_gradients(built, dtype, tolerance, with_bias, monkeypatch):
    monkeypatch.setattr(native, "AVAILABLE", built)
    generator = torch.Generator().manual_seed(1)
    hidden, index, norm_weight, weight, bias = inputs(dtype, generator)
    leaves = [x.requires_grad_() for x in (hidden, norm_weight, weight, *([bias] if with_bias else []))]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    probs = value_head(hidden, index, norm_weight, weight, bias if with_bias else None, 1e-3)
    x = exact[0][index]
    logits = (x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * exact[1] * exact[2]).sum(-1)
    wanted = torch.sigmoid(logits + exact[3] if with_bias else logits)
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs.double(), wanted, rtol=0, atol=1e-6)
    grad = torch.randn(index.shape, generator=generator)
    for leaf, a, w in zip(
        leaves, torch.autograd.grad(probs, leaves, grad), torch.autograd.grad(wanted, exact, grad.double()), strict=True
    ):
        assert a.dtype == leaf.dtype and a.shape == leaf.shape
        torch.testing.assert_close(a.double(), w, rtol=0, atol=tolerance * float(w.abs().max()))


def test_the_reference_in_float64():
    generator = torch.Generator().manual_seed(2)
    hidden, index, *weights = (x.double() if x.is_floating_point() else x for x in inputs(torch.float32, generator, 5))
    leaves = [x.requires_grad_() for x in (hidden, *weights)]
    assert torch.autograd.gradcheck(lambda h, n, w, b: reference.value_head(h, index, n, w, b, 1e-3), leaves)


@pytest.mark.skipif(not native.AVAILABLE, reason="not built")
def test_wrong_arguments_are_named():
    hidden, index, norm_weight, weight, bias = inputs(torch.float32, torch.Generator().manual_seed(3))
    with pytest.raises(ValueError, match=r"index within \[0, 12\), found 12 at place 1"):
        value_head(hidden, torch.tensor([0, 12]), norm_weight, weight)
    with pytest.raises(ValueError, match=r"floats \[37\]"):
        value_head(hidden, index, norm_weight[:5], weight)
    with pytest.raises(ValueError, match=r"\[T, C\]"):
        value_head(hidden[0], index, norm_weight, weight)
    with pytest.raises(ValueError, match="one bias"):
        value_head(hidden, index, norm_weight, weight, bias.repeat(2))
    with pytest.raises(ValueError, match="index as a vector of Long"):
        value_head(hidden, index.int(), norm_weight, weight)


@pytest.mark.skipif(not native.AVAILABLE, reason="not built")
@pytest.mark.parametrize("with_bias", [True, False])
def test_registrations(with_bias):
    hidden, index, norm_weight, weight, bias = inputs(torch.float32, torch.Generator().manual_seed(4))
    op = torch.ops.trace_megatron
    rest = (index, norm_weight.requires_grad_(), weight.requires_grad_(), bias.requires_grad_() if with_bias else None)
    torch.library.opcheck(op.value_head_forward.default, (hidden.requires_grad_(), *rest, 1e-6))
    saved = [x.detach() if x is not None else None for x in (hidden, *rest)]
    probs = op.value_head_forward(*saved, 1e-6)
    torch.library.opcheck(op.value_head_backward.default, (torch.ones_like(probs), probs, *saved, 1e-6))
