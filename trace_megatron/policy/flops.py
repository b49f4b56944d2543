"""What a training step computes: model FLOPs, blocks of attention, the peak of known devices and peak memory.

L layers, T packed tokens, E trained edges. Formulas in docs/training.md.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence

import torch

from trace_megatron.algorithm.pack import trained_edges
from trace_megatron.ops import tree_block_mask
from trace_megatron.policy.hf_config import HFModelConfig
from trace_megatron.policy.layout import active_layer_weights
from trace_megatron.types import TreeBatch

BLOCK_SIZE = 128

PEAK_TFLOPS = {
    "A100": 312.0,
    "L40S": 362.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H200": 989.0,
    "B200": 2250.0,
}
"""Dense bfloat16 peak by what a device's name contains, first match; from NVIDIA's data sheets (without sparsity)."""


def model_flops(hf: HFModelConfig, batches: Sequence[TreeBatch]) -> float:
    """Of one forward and backward pass over the packs; what recompute repeats is not counted.

    A multiplication with P weights is 2 P a token forward and twice that backward. A token attends to the tokens on
    its path, ``position_ids + 1`` of them. The vocabulary head is applied to trained edges only.
    """
    layer, query = active_layer_weights(hf), hf.num_heads * hf.head_dim
    num_tokens = sum(batch.num_tokens for batch in batches)
    num_edges = sum(trained_edges(batch).numel() for batch in batches)
    num_pairs = sum(int((batch.position_ids + 1).sum()) for batch in batches)
    per_layer = 2 * layer * num_tokens + 4 * query * num_pairs  # scores and weighted values, 2 each
    return 3.0 * (hf.num_layers * per_layer + 2 * hf.vocab_size * hf.hidden_size * num_edges)


def attention_blocks(batches: Sequence[TreeBatch]) -> tuple[int, int]:
    """Blocks of 128 x 128 scores in which any row sees any key, and those of causal attention over whole packs."""
    visited = dense = 0
    for batch in batches:
        mask = tree_block_mask(batch.subtree_end, BLOCK_SIZE)
        visited += int(mask.kv_num_blocks.sum()) + int(mask.full_kv_num_blocks.sum())
        num_blocks = -(-batch.num_tokens // BLOCK_SIZE)
        dense += num_blocks * (num_blocks + 1) // 2
    return visited, dense


def peak_tflops(device: torch.device) -> float | None:
    """Of one rank's device; None where the table does not know it, a CPU among others."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def peak_memory_bytes(device: torch.device) -> int:
    """Since the last call on a CUDA device, of torch's allocator; else of the process since its start."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
