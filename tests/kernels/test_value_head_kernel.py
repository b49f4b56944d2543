"""The value head's kernels against the formula in float64, values and gradients."""

from __future__ import annotations

import functools

import pytest
import torch

from .simt import Kernel

EPS = 1e-3


@functools.cache
def kernel(name: str) -> Kernel:
    return Kernel(f"{name}.cu")


def by_dtype(hidden, suffix=""):
    """The two fields of which one is null."""
    is_float = (hidden[1] if isinstance(hidden, tuple) else hidden.dtype) == torch.float32
    return {f"float{suffix}": hidden if is_float else None, f"bf16{suffix}": None if is_float else hidden}


def sizes(hidden, index):
    return {"num_tokens": hidden.size(0), "num_channels": hidden.size(1), "num_anchors": index.numel(), "eps": EPS}


def value_head(hidden, index, norm_weight, weight, bias, seed=0):
    fields = by_dtype(hidden, "_hidden") | sizes(hidden, index)
    fields |= {"index": index, "norm_weight": norm_weight, "weight": weight, "bias": bias}
    fields |= {"probs": (index.shape, torch.float32)}
    return kernel("value_head").run("launch_value_head", "ValueHeadParams", fields, seed=seed)["probs"]


def value_head_backward(grad_probs, probs, hidden, index, norm_weight, weight, seed=0):
    channels, anchors = hidden.size(1), index.numel()
    fields = by_dtype(hidden, "_hidden") | by_dtype(torch.zeros_like(hidden), "_grad_hidden") | sizes(hidden, index)
    fields |= {"index": index, "norm_weight": norm_weight, "weight": weight, "probs": probs, "grad_probs": grad_probs}
    fields |= {"scales": ((3, anchors), torch.float32), "partial_sums": ((-(-anchors // 64), channels), torch.float32)}
    fields |= {name: ((channels,), torch.float32) for name in ("grad_norm_weight", "grad_weight")}
    fields |= {"grad_bias": ((1,), torch.float32)}
    out = kernel("value_head_backward").run("launch_value_head_backward", "ValueHeadBackwardParams", fields, seed=seed)
    grad_hidden = out.get("float_grad_hidden", out.get("bf16_grad_hidden"))
    return grad_hidden, out["grad_norm_weight"], out["grad_weight"], out["grad_bias"]


def exact_head(hidden, index, norm_weight, weight, bias):
    x = hidden[index]
    logits = (x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * norm_weight * weight).sum(-1)
    return torch.sigmoid(logits if bias is None else logits + bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_at_ragged_shapes(dtype):
    generator = torch.Generator().manual_seed(1)
    for case in range(50):
        tokens, channels, anchors = (int(torch.randint(1, n, (), generator=generator)) for n in (30, 300, 40))
        channels = 8 * channels if case % 3 == 0 else channels
        anchors = (anchors, 0, 1, 200)[case % 4] if case < 16 else anchors
        hidden = torch.randn(tokens, channels, generator=generator).to(dtype) * (1.0, 1e-4, 1e3)[case % 3]
        index = torch.randint(0, tokens, (anchors,), generator=generator)
        norm_weight, weight = torch.rand(2, channels, generator=generator) + 0.5
        weight = (weight - 1.0) / channels**0.5
        bias = torch.randn(1, generator=generator) if case % 2 else None
        leaves = [hidden, norm_weight, weight] + ([bias] if bias is not None else [])
        exact = [x.double().requires_grad_() for x in leaves]
        wanted = exact_head(exact[0], index, *exact[1:3], exact[3] if bias is not None else None)
        probs = value_head(hidden, index, norm_weight, weight, bias, seed=case)
        torch.testing.assert_close(probs.double(), wanted, rtol=0, atol=1e-6)
        grad = torch.randn(index.shape, generator=generator)
        actual = value_head_backward(grad, probs, hidden, index, norm_weight, weight, seed=case)
        again = value_head_backward(grad, probs, hidden, index, norm_weight, weight, seed=case + 1)
        assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))  # whatever the order of threads
        gradients = torch.autograd.grad(wanted, exact, grad.double())
        for a, w in zip(actual, gradients, strict=False):  # no fourth gradient without a bias
            relative = 8e-3 if a.dtype == torch.bfloat16 else 2e-5
            largest = float(w.abs().max()) if w.numel() else 0.0
            cancelled = 1e-7 * float(grad.abs().sum()) if w.numel() == 1 else 1e-30  # the bias: a sum of both signs
            torch.testing.assert_close(a.double(), w, rtol=0, atol=relative * largest + cancelled)


def test_rows_that_are_none_give_nan_and_no_gradient():
    hidden, weights = torch.ones(3, 8), torch.ones(8)
    index = torch.tensor([0, 3, -1, 2, 2**62])
    probs = value_head(hidden, index, weights, weights, None)
    assert probs.isnan().tolist() == [False, True, True, False, True]
    grads = value_head_backward(torch.ones(5), probs, hidden, index, weights, weights)
    assert all(bool(grad.isfinite().all()) for grad in grads)
    wanted = value_head_backward(torch.ones(2), probs[[0, 3]], hidden, index[[0, 3]], weights, weights)
    assert all(torch.equal(a, w) for a, w in zip(grads, wanted, strict=True))


def test_extreme_logits_saturate():
    hidden = torch.tensor([[1.0, 1.0]])
    for sign, wanted in ((1e3, 1.0), (-1e3, 0.0)):
        weight = torch.full((2,), sign)
        assert value_head(hidden, torch.tensor([0]), torch.ones(2), weight, None).item() == wanted


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_bytes_are_those_on_paper(dtype, width):
    tokens, channels = 16, 256
    hidden, weights = torch.ones(tokens, channels, dtype=dtype), torch.ones(channels)
    value_head(hidden, torch.arange(tokens), weights, weights, None)
    counts = kernel("value_head").counts
    weight_bytes = 2 * 4 * channels  # read anew by each warp here, from L1 on a GPU
    assert counts.bytes_read - tokens * weight_bytes == tokens * (width * channels + 32 * 8)  # every lane its index
    assert counts.bytes_written == 4 * tokens
