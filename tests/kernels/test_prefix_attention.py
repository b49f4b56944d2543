"""The attention kernel's own source on the CPU, and its twin in ops, against one dense softmax in float64."""

from __future__ import annotations

import functools

import pytest
import torch
from ops.forests import random_forest, random_int

from trace_megatron.ops import PrefixLayout, PrefixPlan, prefix_plan
from trace_megatron.ops.prefix_plan import PAGE_TOKENS

from .simt import ROOT, Kernel, KernelFault

HALF_UNIT = 2.0**-8  # of bfloat16, at most, relative; of the output, and of the weights that a row of values meets


@functools.cache
def kernel() -> Kernel:
    return Kernel("prefix_attention.cu")


def make_layout(sizes, lengths, generator, turn=3) -> PrefixLayout:
    """``sizes`` new tokens and ``lengths`` known ones per prompt; prompts share pages where chance wants it."""
    begin = torch.tensor([0, *sizes]).cumsum(0)
    ends = [random_forest(size, generator, turn) + first for size, first in zip(sizes, begin.tolist(), strict=False)]
    num_pages = sum(-(-length // PAGE_TOKENS) for length in lengths)
    pages = torch.randint(0, num_pages + 2, (num_pages,), generator=generator)
    return PrefixLayout(begin, torch.tensor(lengths), pages, torch.cat(ends).int() if ends else torch.empty(0).int())


def make_inputs(layout, groups, repeats, dim, generator, dtype=torch.bfloat16):
    num_tokens = layout.subtree_end.numel()
    num_slots = PAGE_TOKENS * (int(layout.pages.max()) + 1 if layout.pages.numel() else 1)
    shapes = ((num_tokens, groups * repeats, dim), *[(num_tokens, groups, dim)] * 2, *[(num_slots, groups, dim)] * 2)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def dense(layout, q, k, v, key_pages, value_pages, scale) -> torch.Tensor:
    """Prompt by prompt in float64."""
    out, page = [], 0
    for p, length in enumerate(layout.prefix_lengths.tolist()):
        new = slice(int(layout.prompt_begin[p]), int(layout.prompt_begin[p + 1]))
        count = -(-length // PAGE_TOKENS)
        slots = (layout.pages[page : page + count, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()[:length]
        page += count
        keys, values = torch.cat([key_pages[slots], k[new]]).double(), torch.cat([value_pages[slots], v[new]]).double()
        i = torch.arange(new.start, new.stop)
        seen = (i <= i[:, None]) & (i[:, None] < layout.subtree_end[new])
        seen = torch.cat([torch.ones(i.numel(), length, dtype=torch.bool), seen], 1)
        repeats = q.size(1) // k.size(1)
        scores = torch.einsum("qhd,khd->hqk", q[new].double(), keys.repeat_interleave(repeats, 1)) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(repeats, 1)))
    return torch.cat(out) if out else q.double()


def _memory(x):
    """All that lies in x's memory, from its first element on."""
    assert x.storage_offset() == 0
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,))


def run(layout, inputs, scale, *, rows=None, seed=0, drop=""):
    q, k, v, key_pages, value_pages = inputs
    plan = PrefixPlan(layout, q.size(1), k.size(1))
    tiles = plan.tiles if rows is None else plan.tiles_of(rows)
    fields = {
        "q": _memory(q),
        "k": _memory(k),
        "v": _memory(v),
        "key_pages": key_pages,
        "value_pages": value_pages,
        "out": (tuple(q.shape), torch.bfloat16),
        "subtree_end": tiles.subtree_end,
        "page_table": tiles.page_table,
        "items": tiles.items,
        "key_tiles": tiles.key_tiles,
        "num_tokens": q.size(0),
        "num_groups": k.size(1),
        "heads_per_group": q.size(1) // k.size(1),
        "head_dim": q.size(2),
        "num_items": tiles.items.size(0),
        "rows": tiles.rows,
        "scale": scale,
        "slot_stride": key_pages.stride(0),
    }
    for name, x in (("q", q), ("k", k), ("v", v)):
        fields |= {f"{name}_token_stride": x.stride(0), f"{name}_head_stride": x.stride(1)}
    return kernel().run("launch_prefix_attention", "PrefixAttentionParams", fields, seed=seed, drop=drop)["out"]


def check(layout, inputs, scale, **options):
    actual, wanted = run(layout, inputs, scale, **options), dense(layout, *inputs, scale)
    errors = (actual.double() - wanted).abs() - HALF_UNIT * (wanted.abs() + 1.0)
    assert not errors.numel() or float(errors.max()) <= 0.0, f"q {list(inputs[0].shape)}: {float(errors.max())} above"
    return actual


def random_case(index, generator):
    """Small and ragged; every tenth with prefixes of several tiles."""
    num_prompts = random_int(1, 4, generator)
    most = 12 if num_prompts > 1 else 80
    sizes = [random_int(0, most, generator) for _ in range(num_prompts)]
    long = 200 if index % 10 == 0 else 40
    lengths = [random_int(0, long, generator) * random_int(0, 2, generator) for _ in range(num_prompts)]
    layout = make_layout(sizes, lengths, generator, turn=(1, 3, 20)[index % 3])
    groups, repeats = random_int(1, 3, generator), 1 + index % 8
    if sum(sizes) * repeats > 100:
        groups = 1
    dim = 128 if index % 4 == 3 else 64
    return layout, make_inputs(layout, groups, repeats, dim, generator), dim**-0.5


def test_random_shapes():
    generator = torch.Generator().manual_seed(1)
    for index in range(150):
        check(*random_case(index, generator), seed=index)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("rows", [64, 128])
def test_every_size_of_block(dim, rows):
    generator = torch.Generator().manual_seed(dim + rows)
    layout = make_layout([150, 0, 3], [0, 33, 70], generator, turn=20)
    check(layout, make_inputs(layout, 1, 2, dim, generator), dim**-0.5, rows=rows)


@pytest.mark.parametrize(
    ("sizes", "lengths"),
    [
        ([], []),
        ([0], [0]),
        ([0, 0], [16, 5]),
        ([1], [0]),
        ([1], [1]),
        ([1, 1, 1], [15, 16, 17]),
        ([2, 64, 1], [64, 65, 0]),
        ([1], [1000]),
    ],
)
def test_ends_of_sizes(sizes, lengths):
    generator = torch.Generator().manual_seed(3)
    layout = make_layout(sizes, lengths, generator)
    for rows in (64, 128):
        check(layout, make_inputs(layout, 2, 3, 64, generator), 0.125, rows=rows)


def test_equal_calls_give_equal_bits_whatever_the_order_of_threads():
    generator = torch.Generator().manual_seed(4)
    layout = make_layout([70, 9], [40, 0], generator)
    inputs = make_inputs(layout, 1, 3, 64, generator)
    first = run(layout, inputs, 0.125)
    assert all(torch.equal(run(layout, inputs, 0.125, seed=seed), first) for seed in range(1, 6))


def test_large_scores_overflow_nothing():
    generator = torch.Generator().manual_seed(5)
    layout = make_layout([40], [20], generator)
    q, *rest = make_inputs(layout, 1, 2, 64, generator)
    check(layout, [100.0 * q, *rest], 1.0)


def test_inputs_with_gaps():
    generator = torch.Generator().manual_seed(6)
    layout = make_layout([37], [18], generator)
    q, k, v, *pages = make_inputs(layout, 2, 2, 64, generator)
    spread = [torch.cat([x, x], 1)[:, : x.size(1)] for x in (q, k)]
    spread.append(v.transpose(0, 1).contiguous().transpose(0, 1))
    assert not any(x.is_contiguous() for x in spread)
    assert torch.equal(run(layout, [*spread, *pages], 0.125), run(layout, [q, k, v, *pages], 0.125))


def test_tiles_that_nobody_sees_are_left_out():
    generator = torch.Generator().manual_seed(7)
    branches = 8
    ends = [64 * (1 + i // 64) for i in range(64 * branches)]  # roots of one tile each: nothing is shared
    chain = [64 * branches] * (64 * branches)
    products = []
    for end in (ends, chain):
        layout = PrefixLayout(
            torch.tensor([0, 64 * branches]), torch.tensor([0]), torch.zeros(0).long(), torch.tensor(end).int()
        )
        check(layout, make_inputs(layout, 1, 1, 64, generator), 0.125, rows=64)
        products.append(kernel().counts.tensor_products)
    per_tile = 4 * 8 * 4 * 2  # warps, columns, steps, both products
    assert products == [branches * per_tile, branches * (branches + 1) // 2 * per_tile]


def test_every_synchronisation_is_needed():
    generator = torch.Generator().manual_seed(8)
    layout = make_layout([100], [70], generator, turn=200)
    inputs = make_inputs(layout, 1, 1, 64, generator)
    run(layout, inputs, 0.125)
    syncs = [line for line in kernel().syncs() if line.startswith("prefix_attention.cu")]
    assert len(syncs) == 4  # two barriers, the wait for copies, and the warp's before it writes
    for seed in range(40):
        with pytest.raises(KernelFault, match=r"race with thread|not written before|cp\.async"):
            run(layout, inputs, 0.125, seed=seed, drop=syncs[seed % 4])


def test_unknown_sizes_are_refused_before_the_launch():
    layout = make_layout([3], [0], torch.Generator().manual_seed(9))
    with pytest.raises(ValueError, match="CUDA error 1"):
        run(layout, make_inputs(layout, 1, 1, 32, torch.Generator()), 0.125)


def test_header_and_plan_agree():
    text = (ROOT / "csrc/kernels/prefix_attention.h").read_text()
    assert f"kPageTokens = {PAGE_TOKENS};" in text and f"kAttentionKeys = {prefix_plan.KEY_TILE};" in text
