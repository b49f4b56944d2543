"""Native CPU ops beside what else does the same work on this machine, in one run.

    python tools/bench/bench_ops.py [attention packing allocation] [--threads 2] [--repeats 9]

Peers: torch's SDPA (with a dense boolean mask, and causal) for tree attention, FlexAttention's create_block_mask and
the Python references for packing, a dynamic program in Numba for the allocation. The two sides take turns; every time
is a median. Attention runs on --threads, everything else on one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention

from trace_megatron import ops
from trace_megatron.ops import native
from trace_megatron.ops.reference import allocate as allocate_reference
from trace_megatron.ops.reference import block_mask as block_mask_reference
from trace_megatron.ops.reference import pack as pack_reference

NUM_TOKENS = 4096
BLOCK = 128
HEADS = [(8, 8, 64), (9, 3, 64), (8, 2, 128)]  # query heads, key heads, head dim
DP_CAP = 32  # rollouts of one prompt that the dynamic program looks at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["attention", "packing", "allocation"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    if not native.AVAILABLE:
        raise SystemExit("error: the native ops are not built: TRACE_BUILD=cpu pip install --no-build-isolation -e .")
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    for part in options.parts:
        torch.set_num_threads(options.threads if part == "attention" else 1)
        {"attention": attention, "packing": packing, "allocation": allocation}[part](options.repeats)


def medians(repeats: int, **calls: Callable[[], object]) -> dict[str, float]:
    """Seconds of each call; the calls take turns, so that what disturbs the machine disturbs all of them."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def attention(repeats: int) -> None:
    """Forward and backward. Share: visited blocks of all blocks; the target is 1.3 x share, on a chain 1.15."""
    print(f"\ntree attention, {NUM_TOKENS} tokens, {torch.get_num_threads()} threads, forward + backward")
    print(
        f"{'tree':>8} {'H,G,D':>10} {'dtype':>9} {'ours':>8} {'SDPA':>8} {'ratio':>6} {'share':>6} {'ratio/share':>11}"
    )
    for name, end in {"chain": chain(), "one tree": branching(1), "16 trees": branching(16)}.items():
        for heads, groups, dim in HEADS:
            for dtype in (torch.float32, torch.bfloat16):
                compare_attention(name, end, heads, groups, dim, dtype, repeats)


def compare_attention(name, end, heads, groups, dim, dtype, repeats) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(NUM_TOKENS, n, dim, generator=generator).to(dtype) for n in (heads, groups, groups))
    grad = torch.randn(q.shape, generator=generator).to(dtype)
    plain = [x.transpose(0, 1).repeat_interleave(heads // x.size(1), 0)[None].contiguous() for x in (q, k, v)]
    plain_grad = grad.transpose(0, 1)[None].contiguous()
    inputs, peers = ([x.requires_grad_() for x in xs] for xs in ((q, k, v), plain))
    position = torch.arange(NUM_TOKENS)
    mask = (position <= position[:, None]) & (position[:, None] < end)
    options = {"is_causal": True} if name == "chain" else {"attn_mask": mask}

    def ours():
        out = ops.tree_attention(*inputs, end, dim**-0.5)
        return out, *torch.autograd.grad(out, inputs, grad)

    def sdpa():
        out = scaled_dot_product_attention(*peers, **options)
        return out, *torch.autograd.grad(out, peers, plain_grad)

    difference = (ours()[0].transpose(0, 1) - sdpa()[0][0]).abs().max()
    assert difference < (1e-4 if dtype == torch.float32 else 3e-2), difference
    seconds = medians(repeats, ours=ours, sdpa=sdpa)
    ratio = seconds["ours"] / seconds["sdpa"]
    share = 1.0 if name == "chain" else visited_share(end)
    print(
        f"{name:>8} {heads:>3},{groups:>2},{dim:>3} {str(dtype)[6:]:>9} {seconds['ours'] * 1e3:>6.0f}ms"
        f" {seconds['sdpa'] * 1e3:>6.0f}ms {ratio:>6.2f} {share:>6.2f} {ratio / share:>11.2f}",
        flush=True,
    )


def chain() -> torch.Tensor:
    return torch.full((NUM_TOKENS,), NUM_TOKENS, dtype=torch.int32)


def branching(num_trees: int) -> torch.Tensor:
    """subtree_end of trees of a prompt, four bare rollouts of four turns and a continuation of each, one turn long."""
    size = NUM_TOKENS // num_trees
    turn = size // 24
    prompt = size - 20 * turn
    sizes, parents = [], []
    for _ in range(num_trees):
        root = len(sizes)
        sizes += [prompt, *[turn] * 20]
        parents.append(-1)
        for rollout in range(4):
            first = root + 1 + 5 * rollout
            parents += [root, first, first + 1, first + 2, first + 1]  # the last one continues the second turn
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(sizes).cumsum(0)])
    return ops.pack_tree(torch.zeros(NUM_TOKENS, dtype=torch.int64), offsets, torch.tensor(parents)).subtree_end


def visited_share(end: torch.Tensor) -> float:
    mask = ops.tree_block_mask(end, BLOCK)
    visited = int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())
    return visited / (-(-NUM_TOKENS // BLOCK)) ** 2


def packing(repeats: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, offsets, parents = random_trees(1_000_000, generator)
    seconds = medians(
        repeats,
        ours=lambda: ops.pack_tree(tokens, offsets, parents),
        python=lambda: pack_reference.pack_tree(tokens, offsets, parents, None),
    )
    rate, speedup = tokens.numel() / seconds["ours"] / 1e6, seconds["python"] / seconds["ours"]
    print(f"\npack_tree, {tokens.numel()} tokens: {rate:.0f} million tokens/s, {speedup:.0f}x the Python reference")
    leaves = torch.tensor(sorted(set(range(parents.numel())) - set(parents.tolist())))
    seconds = medians(repeats, ours=lambda: ops.cut_tree(offsets, parents, leaves, 16384, 8))
    print(f"cut_tree, {leaves.numel()} leaves into bins of 16,384 tokens: {seconds['ours'] * 1e3:.1f} ms")

    small = ops.pack_tree(tokens[: offsets[200]], offsets[:201], parents[:200]).subtree_end[:8192].clamp(max=8192)
    mask_mod = ops.tree_block_mask(small).mask_mod
    length = small.numel()
    seconds = medians(
        repeats,
        ours=lambda: ops.tree_block_mask(small),
        torch=lambda: create_block_mask(mask_mod, 1, 1, length, length, "cpu"),
    )
    print(
        f"tree_block_mask, {length} tokens: {seconds['ours'] * 1e3:.2f} ms, {seconds['torch'] / seconds['ours']:.0f}x "
        "faster than create_block_mask"
    )
    large = ops.pack_tree(*random_trees(140_000, generator)).subtree_end[:131072].clamp(max=131072)
    for name, end in {"forest": large, "chain": torch.full((131072,), 131072, dtype=torch.int32)}.items():
        seconds = medians(
            repeats,
            ours=lambda end=end: ops.tree_block_mask(end),
            reference=lambda end=end: block_mask_reference.tree_block_mask(end, BLOCK),
        )
        print(
            f"tree_block_mask, 131072 tokens, {name}: {seconds['ours'] * 1e3:.1f} ms "
            f"(torch reference {seconds['reference'] * 1e3:.0f} ms)"
        )


def random_trees(num_tokens: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Trees of 24 segments of 50 to 350 tokens."""
    num_segments = num_tokens // 200
    sizes = torch.randint(50, 350, (num_segments,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    place = torch.arange(num_segments)
    first = place // 24 * 24
    parents = first + (torch.rand(num_segments, generator=generator) * (place - first)).long()
    parents = torch.where(place == first, -1, parents)
    return torch.randint(0, 50000, (int(offsets[-1]),), generator=generator), offsets, parents


def allocation(repeats: int) -> None:
    solve = numba_solver()
    print()
    for num_prompts, budget in ((512, 1024), (4096, 8192)):
        probs = torch.rand(num_prompts, generator=torch.Generator().manual_seed(0))
        budgets = torch.tensor([budget])
        values = root_values(probs.double().numpy())
        fewer = repeats if num_prompts < 1000 else 3
        fast = medians(
            repeats,
            ours=lambda probs=probs, budgets=budgets: ops.allocate_roots(probs, budgets),
            python=lambda probs=probs, budgets=budgets: allocate_reference.allocate_roots(
                probs, budgets, torch.tensor([0, probs.numel()]), None, True
            ),
        )
        slow = medians(fewer, numba=lambda values=values, budget=budget: solve(values, budget))
        counts, best = ops.allocate_roots(probs, budgets).numpy(), solve(values, budget)
        reached = values[np.arange(num_prompts), counts].sum()
        assert abs(reached - best) < 1e-9 * best, (reached, best)
        print(
            f"allocate_roots, {num_prompts} prompts x {budget} rollouts: {fast['ours'] * 1e3:.3f} ms, Python reference "
            f"{fast['python'] / fast['ours']:.0f}x, Numba dynamic program (m <= {DP_CAP}, same optimum) "
            f"{slow['numba'] / fast['ours']:.0f}x as long"
        )
        table = torch.from_numpy(values)
        own = medians(fewer, ours=lambda table=table, budget=budget: ops.allocate_table(table, budget))
        print(f"allocate_table, the same: {own['ours'] * 1e3:.1f} ms, Numba {slow['numba'] / own['ours']:.1f}x as long")
    probs = torch.rand(64 * 20, generator=torch.Generator().manual_seed(1))
    offsets, budgets = torch.arange(0, 64 * 20 + 1, 20), torch.full((64,), 8)
    seconds = medians(repeats, ours=lambda: ops.allocate_prefixes(probs, budgets, offsets))
    print(f"allocate_prefixes, 64 prompts x 20 prefixes, 8 continuations each: {seconds['ours'] * 1e3:.3f} ms")


def root_values(v: np.ndarray) -> np.ndarray:
    m = np.arange(DP_CAP + 1)
    u = np.minimum(v, 1.0 - v)[:, None]
    values = -np.expm1(m * np.log1p(-u)) - u**m
    values[:, 0], values[:, 1] = 0.0, -np.inf
    return values


def numba_solver() -> Callable[[np.ndarray, int], float]:
    """The multiple-choice knapsack's dynamic program as one would write it: choices kept for the traceback."""
    import numba

    @numba.njit(fastmath=False)
    def solve(values, budget):
        num_rows, width = values.shape
        best = np.full(budget + 1, -np.inf)
        best[0] = 0.0
        choices = np.zeros((num_rows, budget + 1), dtype=np.int16)
        for row in range(num_rows):
            for spend in range(budget, -1, -1):
                top, choice = -np.inf, 0
                for count in range(min(width - 1, spend) + 1):
                    total = best[spend - count] + values[row, count]
                    if total > top:
                        top, choice = total, count
                best[spend] = top
                choices[row, spend] = choice
        return best[budget]

    return solve


if __name__ == "__main__":
    main()
