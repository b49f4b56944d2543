"""Forests, layouts and the attention over them, written out: what results are compared with.

Legend: T new tokens, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

import torch

from trace_megatron.ops import PAGE_TOKENS, PrefixLayout


def random_forest(num_tokens: int, turn: int, generator: torch.Generator) -> torch.Tensor:
    """subtree_end [T] int32: every ``turn``-th token hangs below a random token of the path before it."""
    ends, path = [num_tokens] * num_tokens, []
    for token in range(num_tokens):
        if token % turn == 0:
            keep = random_int(0, len(path) + 1, generator)
            for closed in path[keep:]:
                ends[closed] = token
            del path[keep:]
        path.append(token)
    return torch.tensor(ends, dtype=torch.int32)


def random_int(low: int, high: int, generator: torch.Generator) -> int:
    return int(torch.randint(low, high, (), generator=generator))


def random_layout(generator: torch.Generator, most_tokens: int) -> PrefixLayout:
    """One to four prompts, some without prefix, some without tokens."""
    num_prompts = random_int(1, 5, generator)
    sizes = [random_int(0, most_tokens, generator) for _ in range(num_prompts)]
    lengths = [random_int(0, most_tokens, generator) * random_int(0, 2, generator) for _ in range(num_prompts)]
    turn = (1, 3, 50)[random_int(0, 3, generator)]
    return layout_of([random_forest(size, turn, generator) for size in sizes], lengths, generator)


def layout_of(forests: list[torch.Tensor], lengths: list[int], generator: torch.Generator) -> PrefixLayout:
    """Each prompt's forest and prefix; pages lie in random order."""
    begin = torch.tensor([0, *(forest.numel() for forest in forests)]).cumsum(0)
    num_pages = sum(-(-length // PAGE_TOKENS) for length in lengths)
    ends = [forest + first for forest, first in zip(forests, begin.tolist(), strict=False)]
    pages = torch.randperm(num_pages, generator=generator)
    return PrefixLayout(begin, torch.tensor(lengths), pages, torch.cat(ends).int())


def rollout_forest(shared: int, branches: int, length: int) -> torch.Tensor:
    """A chain of ``shared`` tokens that ``branches`` chains of ``length`` continue."""
    total = shared + branches * length
    ends = [shared + length * (branch + 1) for branch in range(branches) for _ in range(length)]
    return torch.tensor([total] * shared + ends, dtype=torch.int32)


def num_pairs(layout: PrefixLayout) -> int:
    """(token, key) pairs that are seen."""
    own = int((layout.subtree_end.long() - torch.arange(layout.subtree_end.numel())).sum())
    return own + int((layout.prompt_begin.diff() * layout.prefix_lengths).sum())


def attention_inputs(layout, heads, groups, dim, dtype, device, generator):
    """q [T, H, D], k, v [T, G, D], key and value pages [slots, G, D]."""
    num_tokens, num_slots = layout.subtree_end.numel(), max(layout.pages.numel(), 1) * PAGE_TOKENS
    shapes = ((num_tokens, heads, dim), *[(num_tokens, groups, dim)] * 2, *[(num_slots, groups, dim)] * 2)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def dense_attention(layout, q, k, v, key_pages, value_pages, scale) -> torch.Tensor:
    """[T, H, D] float64, prompt by prompt."""
    out, page, repeats = [], 0, q.size(1) // k.size(1)
    for p, length in enumerate(layout.prefix_lengths.tolist()):
        new = slice(int(layout.prompt_begin[p]), int(layout.prompt_begin[p + 1]))
        count = -(-length // PAGE_TOKENS)
        slots = layout.pages[page : page + count, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)
        page, slots = page + count, slots.flatten()[:length].to(q.device)
        keys, values = (
            torch.cat([pool[slots], rows[new]]).double().repeat_interleave(repeats, 1)
            for pool, rows in ((key_pages, k), (value_pages, v))
        )
        i = torch.arange(new.start, new.stop)
        seen = (i <= i[:, None]) & (i[:, None] < layout.subtree_end[new])
        seen = torch.cat([torch.ones(i.numel(), length, dtype=torch.bool), seen], 1).to(q.device)
        scores = torch.einsum("qhd,khd->hqk", q[new].double(), keys) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(out)
