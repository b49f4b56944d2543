"""Every op on the device against its reference."""

from __future__ import annotations

import functools

import torch

from trace_megatron import ops
from trace_megatron.ops import native
from trace_megatron.ops.prefix_attention import kernel_takes
from trace_megatron.ops.reference import allocate as allocate_reference
from trace_megatron.ops.reference import block_mask as block_mask_reference
from trace_megatron.ops.reference import tree_attention as attention_reference
from trace_megatron.ops.reference import value_head as value_head_reference

from .results import Check, Outcome
from .shapes import attention_inputs, dense_attention, random_forest, random_int, random_layout

_HALF_UNIT = 2.0**-8  # of bfloat16, relative


def correctness_checks(device: torch.device, rounds: int) -> list[Check]:
    """``rounds`` random shapes of each."""
    checks = {
        "allocate_prefixes": check_prefixes,
        "allocate_roots": check_roots,
        "allocate_table": check_table,
        "tree_block_mask": check_block_mask,
        "value_head": check_value_head,
        "prefix_attention": check_prefix_attention,
        "tree_attention": check_tree_attention,
    }
    return [Check(f"correct: {name}", functools.partial(run, device, rounds)) for name, run in checks.items()]


def _where(op: str, device: torch.device) -> str:
    return "compiled op" if native.has(op, device) else "REFERENCE, the op is not built for this device"


def _segments(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities with ties, and offsets of several segments, empty ones among them."""
    sizes = torch.randint(0, 40, (random_int(1, 30, generator),), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    probs = torch.rand(int(offsets[-1]), generator=generator, dtype=torch.float64)
    return probs.mul(100).round().div(100), offsets


def check_prefixes(device: torch.device, rounds: int) -> Outcome:
    for index in range(rounds):
        generator = torch.Generator().manual_seed(index)
        probs, offsets = _segments(generator)
        budgets = torch.where(offsets.diff() > 0, torch.randint(0, 60, (offsets.numel() - 1,), generator=generator), 0)
        wanted = allocate_reference.allocate_prefixes(probs, budgets, offsets)
        actual = ops.allocate_prefixes(*(x.to(device) for x in (probs, budgets, offsets)))
        assert torch.equal(actual.cpu(), wanted), f"round {index}: counts differ"
    return Outcome(_where("allocate_prefixes", device))


def check_roots(device: torch.device, rounds: int) -> Outcome:
    for index in range(rounds):
        generator = torch.Generator().manual_seed(index)
        probs, offsets = _segments(generator)
        cap, exact = (None, True) if index % 2 else (6, False)
        budgets = torch.where(offsets.diff() > 0, torch.randint(2, 60, (offsets.numel() - 1,), generator=generator), 0)
        wanted = allocate_reference.allocate_roots(probs, budgets, offsets, cap, exact)
        on_device = (x.to(device) for x in (probs, budgets, offsets))
        actual = ops.allocate_roots(*on_device, max_rollouts=cap, exact=exact)
        assert torch.equal(actual.cpu(), wanted), f"round {index}: counts differ"
    return Outcome(_where("allocate_roots", device))


def check_table(device: torch.device, rounds: int) -> Outcome:
    for index in range(rounds):
        generator = torch.Generator().manual_seed(index)
        rows, cap = random_int(1, 20, generator), random_int(1, 9, generator)
        values = torch.rand(rows, cap + 1, generator=generator, dtype=torch.float64).mul(8).round()
        budget = random_int(0, rows * cap + 1, generator)
        wanted = allocate_reference.allocate_table(values, budget, True)
        actual = ops.allocate_table(values.to(device), budget)
        assert torch.equal(actual.cpu(), wanted), f"round {index}: counts differ"
    return Outcome(_where("allocate_table", device))


def check_block_mask(device: torch.device, rounds: int) -> Outcome:
    for index in range(rounds):
        generator = torch.Generator().manual_seed(index)
        ends = random_forest(random_int(1, 3000, generator), (1, 7, 200)[index % 3], generator)
        mask = ops.tree_block_mask(ends.to(device))
        wanted = block_mask_reference.tree_block_mask(ends, 128)
        actual = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
        for a, w in zip(actual, wanted, strict=False):
            assert torch.equal(a.cpu(), w), f"round {index}: block lists differ"
    return Outcome(_where("tree_block_mask", device))


def check_value_head(device: torch.device, rounds: int) -> Outcome:
    worst = 0.0
    for index in range(rounds):
        generator = torch.Generator().manual_seed(index)
        num_tokens, channels = random_int(1, 500, generator), random_int(1, 2000, generator)
        dtype = (torch.float32, torch.bfloat16)[index % 2]
        hidden = torch.randn(num_tokens, channels, generator=generator).to(device, dtype).requires_grad_()
        weights = [torch.randn(channels, generator=generator).to(device).requires_grad_() for _ in range(2)]
        rows = torch.randint(0, num_tokens, (random_int(0, 300, generator),), generator=generator).to(device)
        probs = ops.value_head(hidden, rows, *weights)
        leaves = [x.detach().double().requires_grad_() for x in (hidden, *weights)]
        wanted = value_head_reference.value_head(leaves[0], rows, leaves[1], leaves[2], None, 1e-6)
        assert probs.numel() == 0 or float((probs.double() - wanted).detach().abs().max()) < 1e-4, (
            f"round {index}: values"
        )
        grads = torch.autograd.grad(probs.sum(), (hidden, *weights))
        for a, w in zip(grads, torch.autograd.grad(wanted.sum(), leaves), strict=True):
            worst = max(worst, float((a.double() - w).abs().max() / w.abs().max().clamp(min=1.0)))
    assert worst < 1e-2, f"gradients off by {worst:.1e} of the largest entry"
    return Outcome(f"{_where('value_head_forward', device)}, gradients off by at most {worst:.0e}")


def check_prefix_attention(device: torch.device, rounds: int) -> Outcome:
    kernel = False
    for index in range(rounds):
        generator = torch.Generator().manual_seed(index)
        layout = random_layout(generator, 400 if device.type == "cuda" else 40)
        groups, repeats, dim = random_int(1, 4, generator), 1 + index % 8, (64, 128)[index % 2]
        inputs = attention_inputs(layout, groups * repeats, groups, dim, torch.bfloat16, device, generator)
        if layout.subtree_end.numel() == 0:
            continue
        kernel = kernel or kernel_takes(inputs[0])
        plan = ops.PrefixPlan(layout, groups * repeats, groups, device)
        actual = ops.prefix_attention(*inputs, plan, dim**-0.5)
        again = ops.prefix_attention(*inputs, plan, dim**-0.5)
        assert torch.equal(actual, again), f"round {index}: two equal calls differ"
        wanted = dense_attention(layout, *inputs, dim**-0.5)
        over = float(((actual.double() - wanted).abs() - _HALF_UNIT * (wanted.abs() + 1.0)).max())
        assert over <= 0.0, f"round {index}: q {list(inputs[0].shape)}: {over:.1e} beyond the tolerance"
    return Outcome("the kernel" if kernel else "REFERENCE, the kernel is not built for this device")


def check_tree_attention(device: torch.device, rounds: int) -> Outcome:
    worst = 0.0
    for index in range(rounds):
        generator = torch.Generator().manual_seed(index)
        ends = random_forest(random_int(1, 500, generator), (1, 5, 100)[index % 3], generator)
        rows = torch.nonzero(torch.rand(ends.numel(), generator=generator) < 0.4).flatten().int()
        query_index = rows.to(device) if index % 2 and rows.numel() else None
        num_queries = ends.numel() if query_index is None else rows.numel()
        q = torch.randn(num_queries, 4, 64, generator=generator).to(device).requires_grad_()
        k, v = (torch.randn(ends.numel(), 2, 64, generator=generator).to(device).requires_grad_() for _ in range(2))
        out = ops.tree_attention(q, k, v, ends.to(device), 0.125, query_index)
        leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
        wanted = attention_reference.tree_attention(*leaves, ends.to(device), 0.125, query_index)
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
        pairs = zip((out, *grads), (wanted, *torch.autograd.grad(wanted.square().sum(), leaves)), strict=True)
        worst = max(
            worst,
            *(float((a.double() - w).detach().abs().max() / w.detach().abs().max().clamp(min=0.5)) for a, w in pairs),
        )
    tolerance = 5e-3 if device.type == "cuda" else 1e-4  # products of float32 may run in TF32
    assert worst < tolerance, f"off by {worst:.1e} of the largest entry"
    return Outcome(f"{'FlexAttention' if device.type == 'cuda' else 'native'}, off by at most {worst:.0e}")
