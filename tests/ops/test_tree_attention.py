"""Tree attention, native and reference, against one dense softmax in float64."""

from __future__ import annotations

import pytest
import torch

from trace_megatron.ops import native, tree_attention
from trace_megatron.ops.reference import tree_attention as reference

from .forests import attention_inputs, dense_attention, random_forest, random_int

needs_native = pytest.mark.skipif(not native.AVAILABLE, reason="the native ops are not built")
IMPLEMENTATIONS = [pytest.param(tree_attention, marks=needs_native, id="native"), reference.tree_attention]

# of the largest entry; bfloat16: half a unit in the last place of out, and of the probabilities and score gradients
TOLERANCES = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 1.5e-2}
INSTRUCTION_SETS = ["generic", "avx2", "avx512", "avx512_bf16"]
HEAD_DIMS = [32, 64, 80, 96, 128, 256, 5]


def assert_equals_dense(attention, q, k, v, grad, end, scale, query_index=None):
    out = attention(q, k, v, end, scale, query_index)
    q64, k64, v64 = (x.detach().double().requires_grad_() for x in (q, k, v))
    expected = dense_attention(q64, k64, v64, end, scale, query_index)
    actual = [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]
    wanted = [expected.detach(), *torch.autograd.grad(expected, (q64, k64, v64), grad.double())]
    for name, a, w in zip(("out", "grad_q", "grad_k", "grad_v"), actual, wanted, strict=True):
        assert a.dtype == q.dtype
        error = float((a.double() - w).abs().max() / w.abs().max().clamp(min=0.5))
        assert error <= TOLERANCES[q.dtype], f"{name} of {list(q.shape)} x {list(k.shape)}: {error}"


def random_case(index, dtype, generator):
    num_tokens = random_int(1, 300, generator)
    groups, repeats = random_int(1, 4, generator), random_int(1, 6, generator)
    end = random_forest(num_tokens, generator, turn=(1, 3, 20, 60)[index % 4])
    query_index = None
    if index % 3 == 1:
        chosen = torch.rand(num_tokens, generator=generator) < 0.4
        chosen[-1] = True
        query_index = torch.nonzero(chosen).flatten().int()
    num_queries = num_tokens if query_index is None else query_index.numel()
    dim = HEAD_DIMS[index % len(HEAD_DIMS)]
    inputs = attention_inputs(num_tokens, groups * repeats, groups, dim, dtype, generator, num_queries)
    return *inputs, end, dim**-0.5, query_index


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_trees(dtype):
    generator = torch.Generator().manual_seed(5)
    for index in range(150):
        assert_equals_dense(tree_attention, *random_case(index, dtype, generator))


@needs_native
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_every_instruction_set(isa, monkeypatch):
    monkeypatch.setenv("TRACE_CPU_ISA", isa)
    generator = torch.Generator().manual_seed(6)
    for index in range(14):
        for dtype in (torch.float32, torch.bfloat16):
            case = random_case(index, dtype, generator)
            try:
                assert_equals_dense(tree_attention, *case)
            except ValueError as error:
                assert "one that this processor has" in str(error)
                pytest.skip(f"this processor has no {isa}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_reference_on_random_trees(dtype, monkeypatch):
    monkeypatch.setattr(reference, "ROWS", 50)  # several blocks, the last one short
    generator = torch.Generator().manual_seed(7)
    for index in range(12):
        assert_equals_dense(reference.tree_attention, *random_case(index, dtype, generator))


def test_gradcheck_of_the_reference():
    generator = torch.Generator().manual_seed(3)
    q, k, v, _ = attention_inputs(9, 4, 2, 3, torch.float64, generator)
    end = random_forest(9, generator)
    assert torch.autograd.gradcheck(lambda *x: tree_attention(*x, end, 0.7), (q, k, v))


@needs_native
@pytest.mark.filterwarnings("ignore:Input .* requires gradient and is not a double precision")
def test_gradcheck_of_the_native_op():
    generator = torch.Generator().manual_seed(4)
    q, k, v, _ = attention_inputs(9, 4, 2, 3, torch.float32, generator)
    end = random_forest(9, generator)
    check = torch.autograd.gradcheck
    assert check(lambda *x: tree_attention(*x, end, 0.7), (q, k, v), eps=1e-2, atol=1e-3, rtol=1e-2)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unwritten_memory_does_not_matter(dtype):
    """Every empty tensor, outputs and workspaces, is filled with NaN first."""
    generator = torch.Generator().manual_seed(8)
    cases = [random_case(index, dtype, generator) for index in range(8)]

    def results():
        for q, k, v, grad, *rest in cases:
            out = tree_attention(q, k, v, *rest)
            yield from (out, *torch.autograd.grad(out, (q, k, v), grad))

    clean = list(results())
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.empty(3).isnan().all()
        poisoned = list(results())
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
def test_tokens_that_nobody_sees_do_not_matter(attention):
    """Token 1 is a branch of its own: whatever it holds, the others do not change by a bit."""
    end = torch.tensor([4, 2, 4, 4], dtype=torch.int32)
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad = attention_inputs(4, 2, 1, 3, torch.float32, generator)
    grad[1] = 0.0

    def results():
        out = attention(q, k, v, end, 1.0)
        return [x[[0, 2, 3]] for x in (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))]

    clean, alone = results(), attention(q, k, v, end, 1.0)[1]
    with torch.no_grad():
        q[1], k[1], v[1] = 1e15, 1e15, -1e30  # the squares still fit
    poisoned = results()
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))
    assert not torch.equal(attention(q, k, v, end, 1.0)[1], alone)


@needs_native
def test_threads_change_no_bit_of_the_forward_pass_and_runs_repeat():
    generator = torch.Generator().manual_seed(9)
    q, k, v, grad = attention_inputs(700, 6, 3, 32, torch.float32, generator)
    end = random_forest(700, generator, turn=40)
    threads, outs, grads = torch.get_num_threads(), [], []
    try:
        for num_threads in (1, 2, 2, 5):
            torch.set_num_threads(num_threads)
            outs.append(tree_attention(q, k, v, end, 0.2))
            grads.append(torch.autograd.grad(outs[-1], (q, k, v), grad))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert all(torch.equal(a, b) for a, b in zip(grads[1], grads[2], strict=True))
    for other in grads[1:]:
        for a, b in zip(grads[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=3e-6 * float(b.abs().max()))


@needs_native
def test_strides_of_a_fused_projection():
    """q, k and v as slices of one tensor, [T, 1, heads, D] with the batch in the middle."""
    generator = torch.Generator().manual_seed(10)
    mixed = torch.randn(90, 1, 4, 48, generator=generator)
    views = [x[:, 0] for x in mixed.split([16, 16, 16], -1)]
    end = random_forest(90, generator)
    assert not views[1].is_contiguous()
    assert torch.equal(tree_attention(*views, end, 0.3), tree_attention(*(x.contiguous() for x in views), end, 0.3))
    turned = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in views]  # gaps along the head dim
    assert torch.equal(tree_attention(*turned, end, 0.3), tree_attention(*views, end, 0.3))


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
def test_queries_split_over_ranks(attention):
    """Context parallelism: each rank has some queries and all keys; grad_k and grad_v add up."""
    generator = torch.Generator().manual_seed(11)
    q, k, v, grad = attention_inputs(130, 4, 2, 16, torch.float32, generator)
    end = random_forest(130, generator, turn=10)
    whole = attention(q, k, v, end, 0.25)
    expected = torch.autograd.grad(whole, (k, v), grad)
    ranks = [torch.cat([torch.arange(0, 30), torch.arange(100, 130)]), torch.arange(30, 100)]
    sums = [torch.zeros_like(k), torch.zeros_like(v)]
    for places in ranks:
        out = attention(q[places], k, v, end, 0.25, places.int())
        torch.testing.assert_close(out, whole[places], rtol=0, atol=1e-6)
        for total, part in zip(sums, torch.autograd.grad(out, (k, v), grad[places]), strict=True):
            total += part
    for total, wanted in zip(sums, expected, strict=True):
        torch.testing.assert_close(total, wanted, rtol=0, atol=1e-5)


@needs_native
def test_memory_grows_with_tokens_alone():
    """A forest whose dense mask alone would take 40 GB."""
    num_tokens = 200_000
    end = (torch.arange(num_tokens) // 20 * 20 + 20).int()
    x = torch.randn(num_tokens, 1, 8, generator=torch.Generator().manual_seed(12))
    out = tree_attention(x, x, x, end, 1.0)
    expected = torch.nn.functional.scaled_dot_product_attention(*[x.view(-1, 1, 20, 8)] * 3, scale=1.0, is_causal=True)
    torch.testing.assert_close(out.flatten(), expected.flatten(), rtol=0, atol=1e-5)


@needs_native
@pytest.mark.parametrize("with_index", [False, True])
def test_registrations(with_index):
    generator = torch.Generator().manual_seed(13)
    q, k, v, _ = attention_inputs(6, 2, 1, 8, torch.float32, generator)
    end = random_forest(6, generator)
    index = torch.tensor([1, 2, 5], dtype=torch.int32) if with_index else None
    q = q.detach()[:3].requires_grad_() if with_index else q
    torch.library.opcheck(torch.ops.trace_megatron.tree_attention_forward.default, (q, k, v, end, index, 0.5))
    with torch.no_grad():
        out, lse = torch.ops.trace_megatron.tree_attention_forward(q, k, v, end, index, 0.5)
    args = (torch.ones_like(out), q.detach(), k.detach(), v.detach(), end, index, out, lse, 0.5)
    torch.library.opcheck(torch.ops.trace_megatron.tree_attention_backward.default, args)


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("end", "message"),
    [
        (torch.tensor([2, 2]), "int32"),
        (torch.tensor([2, 2, 3], dtype=torch.int32), r"\[2\]"),
        (torch.tensor([2, 3], dtype=torch.int32), r"1 < subtree_end\[1\] <= 2, found 3"),
        (torch.tensor([2, 1], dtype=torch.int32), r"1 < subtree_end\[1\] <= 2, found 1"),
    ],
)
def test_wrong_vectors_are_named(attention, end, message):
    q, k, v, _ = attention_inputs(2, 2, 1, 3, torch.float32, torch.Generator())
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, end, 1.0)


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
def test_crossing_subtrees_are_named(attention):
    q, k, v, _ = attention_inputs(4, 2, 1, 3, torch.float32, torch.Generator())
    with pytest.raises(ValueError, match=r"expected nested subtrees, found subtree \[\d, \d\) crossing"):
        attention(q, k, v, torch.tensor([3, 4, 3, 4], dtype=torch.int32), 1.0)


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
def test_wrong_shapes_are_named(attention):
    end = torch.tensor([2, 2], dtype=torch.int32)
    q, k, v, _ = attention_inputs(2, 3, 2, 3, torch.float32, torch.Generator())
    with pytest.raises(ValueError, match="multiple of key heads, found 3 and 2"):
        attention(q, k, v, end, 1.0)
    with pytest.raises(ValueError, match="one float dtype"):
        attention(q[:, :2], k, v.double(), end, 1.0)
    with pytest.raises(ValueError, match=r"\[T, H, D\]"):
        attention(q, k[:1], v, end, 1.0)
    with pytest.raises(ValueError, match=r"\[T, H, D\]"):
        attention(q[0], k, v, end, 1.0)


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("index", "message"),
    [
        (torch.tensor([0]), "query_index as int32"),
        (torch.tensor([0, 1], dtype=torch.int32), r"int32 \[1\]"),
        (torch.tensor([2], dtype=torch.int32), r"within \[0, 2\), found 2 at place 0"),
        (torch.tensor([-1], dtype=torch.int32), "found -1"),
    ],
)
def test_wrong_query_index_is_named(attention, index, message):
    end = torch.tensor([2, 2], dtype=torch.int32)
    q, k, v, _ = attention_inputs(2, 2, 1, 3, torch.float32, torch.Generator(), num_queries=1)
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, end, 1.0, index)
    two = attention_inputs(2, 2, 1, 3, torch.float32, torch.Generator())
    with pytest.raises(ValueError, match="increasing"):
        attention(*two[:3], end, 1.0, torch.tensor([1, 1], dtype=torch.int32))


@needs_native
def test_native_checks_beyond_the_references():
    op = torch.ops.trace_megatron.tree_attention_forward
    q, k, v, grad = (x.detach() for x in attention_inputs(2, 2, 1, 3, torch.float32, torch.Generator()))
    end = torch.tensor([2, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="float32 or bfloat16, found Half"):
        op(q.half(), k.half(), v.half(), end, None, 1.0)
    with pytest.raises(ValueError, match=r"without gaps, found strides \[2\]"):
        op(q, k, v, torch.tensor([2, 0, 2, 0], dtype=torch.int32)[::2], None, 1.0)
    huge = torch.empty(1, 1, 1).expand(2**31, 1, 1)
    with pytest.raises(ValueError, match="at most 2147483583 tokens, found 2147483648"):
        op(huge, huge, huge, torch.empty(1, dtype=torch.int32).expand(2**31), None, 1.0)
    out, lse = op(q, k, v, end, None, 1.0)
    backward = torch.ops.trace_megatron.tree_attention_backward
    with pytest.raises(ValueError, match=r"grad_out as Float \[2, 2, 3\]"):
        backward(grad[:1], q, k, v, end, None, out, lse, 1.0)
    with pytest.raises(ValueError, match=r"lse as float32 \[2, 2\]"):
        backward(grad, q, k, v, end, None, out, lse[:1], 1.0)


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
def test_no_tokens(attention):
    q, k, v, _ = attention_inputs(0, 2, 1, 3, torch.float32, torch.Generator())
    out = attention(q, k, v, torch.empty(0, dtype=torch.int32), 1.0)
    assert out.shape == (0, 2, 3)
    assert all(x.shape == y.shape for x, y in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v), strict=True))
