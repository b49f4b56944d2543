"""Tree attention against softmax written out row by row in float64, and the forest check against its definition."""

from __future__ import annotations

import itertools

import pytest
import torch

from trace_megatron.ops import check_subtree_end, tree_attention
from trace_megatron.ops.reference import tree_attention as reference


def random_forest(num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Each token hangs below a random token of the path to the one before it, or is a root."""
    end = [num_tokens] * num_tokens
    path: list[int] = []
    for token in range(num_tokens):
        keep = int(torch.randint(0, len(path) + 1, (), generator=generator)) if token % 3 == 0 else len(path)
        for closed in path[keep:]:
            end[closed] = token
        path = [*path[:keep], token]
    return torch.tensor(end, dtype=torch.int32)


def written_out(q, k, v, subtree_end, scale):
    rows = []
    for i in range(q.size(0)):
        seen = [j for j in range(i + 1) if i < subtree_end[j]]
        heads = []
        for head in range(q.size(1)):
            group = head * k.size(1) // q.size(1)
            weights = torch.softmax(scale * k[seen, group] @ q[i, head], 0)
            heads.append(weights @ v[seen, group])
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def inputs(num_tokens, heads, groups, dim, dtype, generator):
    shapes = [(num_tokens, heads, dim), (num_tokens, groups, dim), (num_tokens, groups, dim)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (3, 1)])
def test_equals_softmax_written_out(heads, groups, monkeypatch):
    monkeypatch.setattr(reference, "ROWS", 7)  # several blocks, the last one short
    generator = torch.Generator().manual_seed(heads + groups)
    for num_tokens in (1, 7, 33):
        q, k, v = inputs(num_tokens, heads, groups, 5, torch.float64, generator)
        end = random_forest(num_tokens, generator)
        out = tree_attention(q, k, v, end, 0.4)
        expected = written_out(q, k, v, end, 0.4)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
        grad = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        for actual, wanted in zip(
            torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad), strict=True
        ):
            torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_lower_precisions_over_block_borders(dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    num_tokens = reference.ROWS + 90
    q, k, v = inputs(num_tokens, 4, 2, 8, dtype, generator)
    end = random_forest(num_tokens, generator)
    out = tree_attention(q, k, v, end, 0.35)
    assert out.dtype == dtype
    q64, k64, v64 = (x.detach().double().requires_grad_() for x in (q, k, v))
    position = torch.arange(num_tokens)
    seen = (position[None] <= position[:, None]) & (position[:, None] < end[None])
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q64, k64, v64)), attn_mask=seen, scale=0.35, enable_gqa=True
    )[0].transpose(0, 1)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)
    grad = torch.randn(out.shape, generator=generator).to(dtype)
    for actual, wanted in zip(
        torch.autograd.grad(out, (q, k, v), grad),
        torch.autograd.grad(expected, (q64, k64, v64), grad.double()),
        strict=True,
    ):
        assert actual.dtype == dtype
        scale = float(wanted.abs().max())
        torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=tolerance * scale)


def test_gradcheck():
    generator = torch.Generator().manual_seed(3)
    q, k, v = inputs(9, 4, 2, 3, torch.float64, generator)
    end = random_forest(9, generator)
    assert torch.autograd.gradcheck(lambda *x: tree_attention(*x, end, 0.7), (q, k, v))


def test_tokens_that_nobody_sees_do_not_matter():
    """Token 1 is a branch of its own: whatever it holds, the others do not change by a bit."""
    end = torch.tensor([4, 2, 4, 4], dtype=torch.int32)
    q, k, v = inputs(4, 2, 1, 3, torch.float64, torch.Generator().manual_seed(1))
    clean = tree_attention(q, k, v, end, 1.0).detach()
    with torch.no_grad():
        q[1], k[1], v[1] = 1e30, 1e30, -1e30
    poisoned = tree_attention(q, k, v, end, 1.0).detach()
    assert torch.equal(poisoned[[0, 2, 3]], clean[[0, 2, 3]])
    assert not torch.equal(poisoned[1], clean[1])


def test_forest_check_accepts_exactly_the_nested_vectors():
    size, accepted = 5, 0
    for values in itertools.product(range(size + 2), repeat=size):
        nested = all(j < values[j] <= size for j in range(size)) and all(
            values[i] <= values[j] for j in range(size) for i in range(j, min(values[j], size))
        )
        try:
            check_subtree_end(torch.tensor(values, dtype=torch.int32), size)
            valid = True
        except ValueError:
            valid = False
        assert valid == nested, values
        accepted += valid
    assert accepted == 42  # forests in preorder with 5 nodes: the fifth Catalan number


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (torch.tensor([2, 2]), "int32"),
        (torch.tensor([2, 2, 3], dtype=torch.int32), r"\[2\]"),
        (torch.tensor([2, 3], dtype=torch.int32), "found 3"),
        (torch.tensor([2, 1], dtype=torch.int32), "found 1"),
    ],
)
def test_wrong_vectors_are_named(end, message):
    q, k, v = inputs(2, 2, 1, 3, torch.float32, torch.Generator())
    with pytest.raises(ValueError, match=message):
        tree_attention(q, k, v, end, 1.0)


def test_wrong_shapes_are_named():
    end = torch.tensor([2, 2], dtype=torch.int32)
    q, k, v = inputs(2, 3, 2, 3, torch.float32, torch.Generator())
    with pytest.raises(ValueError, match="multiple"):
        tree_attention(q, k, v, end, 1.0)
    with pytest.raises(ValueError, match="one float dtype"):
        tree_attention(q[:, :2], k, v.double(), end, 1.0)
    with pytest.raises(ValueError, match=r"\[T, H, D\]"):
        tree_attention(q, k[:1], v, end, 1.0)
