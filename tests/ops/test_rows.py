"""The native row ops of every instruction set against their references in float64."""

import pytest
import torch

from trace_megatron import ops
from trace_megatron.ops.reference import rows as reference

SIZES = (1, 15, 64, 1100)


@pytest.fixture(params=["generic", "avx2", "avx512"], autouse=True)
def instruction_set(request, monkeypatch):
    monkeypatch.setenv("TRACE_CPU_ISA", request.param)
    try:
        ops.swiglu(torch.zeros(1, 2))
    except ValueError:
        pytest.skip("not on this processor")


def close(found, expected, dtype):
    assert found.dtype == dtype
    bound = 2**-8 if dtype is torch.bfloat16 else 1e-5  # of logits up to 60, rounded
    scale = float(expected.detach().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=bound * max(scale, 1.0))


def example(*shape, dtype, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax(dtype):
    for size, temperature in ((0, 1.0), *((size, t) for size in SIZES for t in (1.0, 0.3))):
        logits = example(7, size, dtype=dtype, scale=6.0)
        labels = torch.tensor([-1, 0, size - 1, size, size // 2, 0, 10**9])
        slopes = torch.linspace(-1, 2, 7)
        found = ops.softmax_statistics(logits, labels, 1 / temperature)
        expected = reference.softmax_statistics(logits.double(), labels, 1 / temperature)
        for row, want in zip(found, expected, strict=True):
            close(row, want, torch.float32)
        log_normalizers = expected[0] + expected[1].log() if size else expected[0]
        arguments = labels, log_normalizers, slopes.double(), 1 / temperature
        expected = reference.softmax_gradient(logits.double(), *arguments)
        found = ops.softmax_gradient(logits.clone(), labels, log_normalizers.float(), slopes, 1 / temperature)
        close(found, expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_activation_with_their_gradients(dtype):
    for size in SIZES:
        x, weight = example(3, 5, 2 * size, dtype=dtype, seed=1), example(2 * size, dtype=dtype, seed=2)
        for op, arguments in ((ops.rms_norm, (weight, 1e-5)), (ops.swiglu, ())):
            inputs = [x, *arguments[:1]]
            mine = [value.clone().requires_grad_() for value in inputs]
            exact = [value.double().requires_grad_() for value in inputs]
            found = op(*mine, *arguments[1:])
            expected = getattr(reference, op.__name__)(*exact, *arguments[1:])
            close(found, expected, dtype)
            slope = example(*found.shape, dtype=dtype, seed=3)
            found.backward(slope)
            expected.backward(slope.double())
            for got, want in zip(mine, exact, strict=True):
                close(got.grad, want.grad, dtype)


def test_a_logit_that_is_no_number_is_not_lost():
    logits = torch.zeros(2, 40)
    logits[1, 17] = torch.nan
    highest, total, *_ = ops.softmax_statistics(logits, torch.tensor([0, 0]), 1.0)
    assert torch.isfinite(total[0]) and torch.isnan(highest[1] + total[1].log())
