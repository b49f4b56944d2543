"""Times against floors, and of FlexAttention, SDPA and variable-length flash attention on the same tokens.

Legend: T new tokens, H query heads, G key/value heads, D head dim, B branches of a prompt.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass

import torch
from torch.nn import functional

from trace_megatron import ops
from trace_megatron.ops import PAGE_TOKENS
from trace_megatron.ops.prefix_attention import kernel_takes

from .floors import Peak, floor_ms, measure_ms
from .results import Check, Outcome
from .shapes import attention_inputs, layout_of, num_pairs, rollout_forest

_SLOWER = 1.1  # ops.prefix_attention takes the kernel wherever it can: more than this over FlexAttention is a failure


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Prompts alike: ``known`` tokens of pages, then ``shared`` new ones and ``branches`` of ``length`` each."""

    prompts: int
    known: int
    shared: int
    branches: int
    length: int
    heads: int = 32
    groups: int = 8
    dim: int = 128

    def __str__(self) -> str:
        tree = f"{self.shared} + {self.branches} x {self.length} new"
        return f"{self.prompts} x ({self.known} known, {tree}), {self.heads}/{self.groups} heads of {self.dim}"


SCORES = AttentionCase(16, 512, 0, 8, 64)
ROOTS = AttentionCase(32, 0, 256, 0, 0)
TREE = AttentionCase(2, 0, 1024, 8, 384)
LONG = AttentionCase(1, 16384, 0, 8, 16)
SMALL_HEADS = AttentionCase(16, 512, 0, 8, 64, heads=9, groups=3, dim=64)


def timing_checks(device: torch.device, peak: Peak | None, small: bool) -> list[Check]:
    """``small``: sizes that a CPU does in a moment."""
    cases = {"scores": SCORES, "roots": ROOTS, "tree": TREE, "long": LONG, "small heads": SMALL_HEADS}
    if small:
        cases = {"scores": AttentionCase(2, 32, 0, 2, 8, 4, 2, 64), "tree": AttentionCase(1, 0, 32, 2, 16, 4, 2, 64)}
    checks = [
        Check(f"time: prefix_attention, {name}", functools.partial(time_prefix_attention, device, peak, case))
        for name, case in cases.items()
    ]
    tree = cases["tree"]
    for pass_name, backward in (("forward", False), ("both passes", True)):
        if not small or not backward:
            run = functools.partial(time_tree_attention, device, peak, tree, backward)
            checks.append(Check(f"time: tree_attention, {pass_name}", run))
    size = 100 if small else 10_000
    for name, run in {
        "allocate_prefixes": time_allocate_prefixes,
        "allocate_roots": time_allocate_roots,
        "tree_block_mask": time_block_mask,
        "value_head": time_value_head,
    }.items():
        checks.append(Check(f"time: {name}", functools.partial(run, device, peak, size)))
    return checks


def _case_inputs(case: AttentionCase, device: torch.device):
    generator = torch.Generator().manual_seed(0)
    forest = rollout_forest(case.shared, case.branches, case.length)
    layout = layout_of([forest] * case.prompts, [case.known] * case.prompts, generator)
    inputs = attention_inputs(layout, case.heads, case.groups, case.dim, torch.bfloat16, device, generator)
    return layout, inputs


def _attention_floor(case: AttentionCase, layout, peak: Peak | None, passes: float = 1.0) -> float | None:
    num_tokens, known = layout.subtree_end.numel(), layout.pages.numel() * PAGE_TOKENS
    num_bytes = 2 * case.dim * (2 * num_tokens * (case.heads + case.groups) + 2 * known * case.groups)
    return floor_ms(passes * num_bytes, passes * 4 * num_pairs(layout) * case.heads * case.dim, peak)


def time_prefix_attention(device: torch.device, peak: Peak | None, case: AttentionCase) -> Outcome:
    layout, inputs = _case_inputs(case, device)
    plan = ops.PrefixPlan(layout, case.heads, case.groups, device)
    took = measure_ms(lambda: ops.prefix_attention(*inputs, plan, case.dim**-0.5), device)
    detail = [str(case), "the kernel" if kernel_takes(inputs[0]) else "packed, no kernel"]
    if device.type == "cuda":
        flex = _time_flex(device, case, inputs, plan)
        detail.append(f"FlexAttention on the whole pack {flex:.3f} ms")
        if kernel_takes(inputs[0]) and took > _SLOWER * flex:
            raise AssertionError(f"{took:.3f} ms, {'; '.join(detail)}: FlexAttention should score here")
    return Outcome("; ".join(detail), took, _attention_floor(case, layout, peak))


def _time_flex(device: torch.device, case: AttentionCase, inputs, plan) -> float:
    """What would run instead: known tokens gathered among the new ones, queries at their rows."""
    packed, (q, k, v, key_pages, value_pages) = plan.packed, inputs
    keys, values = (
        k.new_empty(packed.subtree_end.numel(), *k.shape[1:]).index_copy_(0, packed.query_index.long(), new)
        for new in (k, v)
    )

    def run():
        keys[packed.prefix_index], values[packed.prefix_index] = key_pages[packed.slots], value_pages[packed.slots]
        query_index = packed.query_index if plan.has_prefixes else None
        ops.tree_attention(q, keys, values, packed.subtree_end, case.dim**-0.5, query_index)

    return measure_ms(run, device)


def time_tree_attention(device: torch.device, peak: Peak | None, case: AttentionCase, backward: bool) -> Outcome:
    layout, inputs = _case_inputs(case, device)
    q, k, v = (x.requires_grad_(backward) for x in inputs[:3])
    ends = layout.subtree_end.to(device)

    def run(attend, *tensors):
        out = attend(*tensors)
        if backward:
            torch.autograd.grad(out, tensors, torch.ones_like(out))

    scale = case.dim**-0.5
    took = measure_ms(lambda: run(lambda q, k, v: ops.tree_attention(q, k, v, ends, scale), q, k, v), device)
    flat = _unpack(case, q, k, v)
    sdpa = measure_ms(lambda: run(_sdpa, *flat), device)
    detail = [str(case), f"SDPA of {flat[0].size(0)} histories unpacked {sdpa:.3f} ms"]
    detail.append(_time_varlen(device, case, flat, run))
    return Outcome("; ".join(detail), took, _attention_floor(case, layout, peak, 3.5 if backward else 1.0))


def _unpack(case: AttentionCase, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """[T, heads, D] -> [prompts * B, heads, shared + length, D]: each history by itself."""
    flat = []
    for x in tensors:
        by_prompt = x.detach().unflatten(0, (case.prompts, -1))
        shared, own = by_prompt[:, : case.shared], by_prompt[:, case.shared :].unflatten(1, (case.branches, -1))
        whole = torch.cat([shared[:, None].expand(-1, case.branches, -1, -1, -1), own], 2)
        flat.append(whole.flatten(0, 1).transpose(1, 2).contiguous().requires_grad_(x.requires_grad))
    return flat


def _sdpa(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) != k.size(1))


def _time_varlen(device: torch.device, case: AttentionCase, flat, run) -> str:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return "no varlen_attn in this torch"
    if device.type != "cuda" or "is_causal" not in inspect.signature(varlen_attn).parameters:
        return "varlen_attn left out"
    histories, length = flat[0].size(0), flat[0].size(2)
    starts = torch.arange(histories + 1, device=device, dtype=torch.int32) * length
    rows = [x.repeat_interleave(case.heads // x.size(1), 1).transpose(1, 2).flatten(0, 1) for x in flat]
    rows = [x.detach().contiguous().requires_grad_(flat[0].requires_grad) for x in rows]
    try:
        took = measure_ms(
            lambda: run(lambda q, k, v: varlen_attn(q, k, v, starts, starts, length, length, is_causal=True), *rows),
            device,
        )
    except RuntimeError as error:
        return f"varlen_attn does not run here: {' '.join(str(error).split())[:120]}"
    return f"varlen flash unpacked {took:.3f} ms"


def time_allocate_prefixes(device: torch.device, peak: Peak | None, size: int) -> Outcome:
    probs = torch.rand(size, device=device)
    offsets = torch.arange(0, size + 1, max(size // 170, 1), device=device)
    offsets[-1] = size
    budgets = torch.full((offsets.numel() - 1,), 12, device=device)
    took = measure_ms(lambda: ops.allocate_prefixes(probs, budgets, offsets), device)
    return Outcome(f"{size} prefixes of {budgets.numel()} prompts", took, floor_ms(12 * size, 0, peak))


def time_allocate_roots(device: torch.device, peak: Peak | None, size: int) -> Outcome:
    probs, budget = torch.rand(size, device=device), torch.tensor([2 * size], device=device)
    took = measure_ms(lambda: ops.allocate_roots(probs, budget), device)
    return Outcome(f"{size} prompts, {2 * size} units", took, floor_ms(12 * size, 0, peak))


def time_block_mask(device: torch.device, peak: Peak | None, size: int) -> Outcome:
    ends = torch.cat([rollout_forest(64, 4, 16) + 128 * i for i in range(4 * size // 128 + 1)]).int().to(device)
    blocks = -(-ends.numel() // 128)
    took = measure_ms(lambda: ops.tree_block_mask(ends), device)
    return Outcome(f"{ends.numel()} tokens", took, floor_ms(4 * ends.numel() + 16 * blocks * blocks, 0, peak))


def time_value_head(device: torch.device, peak: Peak | None, size: int) -> Outcome:
    hidden = torch.randn(size, 2048, device=device, dtype=torch.bfloat16)
    rows = torch.arange(0, size, 4, device=device)
    weights = torch.randn(2, 2048, device=device)
    took = measure_ms(lambda: ops.value_head(hidden, rows, *weights), device)
    return Outcome(f"{rows.numel()} rows of 2048", took, floor_ms(4096 * rows.numel(), 0, peak))
