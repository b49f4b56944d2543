"""Chunked logprobs and entropies on one rank against plain torch; shards of a vocabulary are in test_layouts.py."""

import pytest
import torch

from trace_megatron.policy import logprobs
from trace_megatron.policy.logprobs import edge_logprobs


def plain(hidden, weight, labels, temperature, vocab_size):
    everything = (hidden @ weight[:vocab_size].t() / temperature).log_softmax(-1)
    return everything.gather(1, labels[:, None])[:, 0], -(everything.exp() * everything).sum(-1)


def example(num_edges, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(num_edges)
    hidden = torch.randn(num_edges, 5, generator=generator, dtype=torch.float64) * scale
    weight = torch.randn(11, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 9, (num_edges,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


@pytest.fixture(autouse=True)
def chunks_of_256_rows(monkeypatch):
    monkeypatch.setattr(logprobs, "CPU_LOGITS_PER_CHUNK", 256 * 11)


@pytest.mark.parametrize("num_edges", [0, 1, 256, 257, 600])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_values_and_gradients_equal_plain_torch(num_edges, temperature):
    hidden, weight, labels = example(num_edges)
    slope = torch.linspace(-1, 2, num_edges, dtype=torch.float64)
    found, entropy = edge_logprobs(hidden, weight, labels, temperature=temperature, vocab_size=9)
    (found * slope).sum().backward()
    gradients = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    expected, expected_entropy = plain(hidden, weight, labels, temperature, 9)
    (expected * slope).sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-12, atol=1e-12)
    for got, want in zip(gradients, (hidden.grad, weight.grad), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    assert not gradients[1][9:].any()  # rows of the padded vocabulary


def test_large_logits_stay_finite():
    hidden, weight, labels = example(40, torch.float32, scale=300.0)
    found, entropy = edge_logprobs(hidden, weight, labels, temperature=0.5, vocab_size=9)
    found.sum().backward()
    expected, _ = plain(hidden.double(), weight.double(), labels, 0.5, 9)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-3)
    assert torch.isfinite(entropy).all() and torch.isfinite(hidden.grad).all()


def test_bfloat16_inputs_give_float32_logprobs():
    hidden, weight, labels = example(300, torch.bfloat16)
    found, entropy = edge_logprobs(hidden, weight, labels, temperature=1.0, vocab_size=9)
    found.sum().backward()
    assert found.dtype == entropy.dtype == torch.float32
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    expected, _ = plain(hidden.double(), weight.double(), labels, 1.0, 9)
    torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=0.05)  # logits were rounded to bfloat16


def test_no_more_than_one_chunk_of_logits_is_alive(monkeypatch):
    sizes = []
    original = logprobs._logits
    monkeypatch.setattr(logprobs, "_logits", lambda h, w: sizes.append(h.size(0)) or original(h, w))
    hidden, weight, labels = example(1000)
    edge_logprobs(hidden, weight, labels, temperature=1.0, vocab_size=11)[0].sum().backward()
    assert sizes == [256, 256, 256, 232] * 2


def test_the_entropy_carries_no_gradient():
    hidden, weight, labels = example(3)
    assert not edge_logprobs(hidden, weight, labels, temperature=1.0, vocab_size=11)[1].requires_grad
