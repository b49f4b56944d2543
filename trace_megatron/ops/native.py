"""The compiled ops, where they were built. Without them every op runs on its reference, after one warning."""

from __future__ import annotations

import warnings

import torch

NAMES = (
    "tree_attention_forward",
    "tree_attention_backward",
    "pack_tree",
    "cut_tree",
    "tree_block_mask",
    "allocate_roots",
    "allocate_prefixes",
    "allocate_table",
    "value_head_forward",
    "value_head_backward",
    "softmax_statistics",
    "softmax_gradient_",
    "rms_norm_forward",
    "rms_norm_backward",
    "swiglu_forward",
    "swiglu_backward",
)
"""Ops that an extension of this version registers under ``torch.ops.trace_megatron``."""


def _load() -> bool:
    try:
        from trace_megatron.ops import _native  # noqa: F401
    except ImportError as error:
        _warn(f"are not built ({error})")
        return False
    if not all(hasattr(torch.ops.trace_megatron, name) for name in NAMES):
        _warn("were built from other sources than these")
        return False
    return True


def _warn(found: str) -> None:
    warnings.warn(
        f"the native CPU ops {found}: their slower torch references run instead. "
        "With a C++20 compiler, TRACE_BUILD=cpu pip install --no-build-isolation -e . builds them",
        RuntimeWarning,
        stacklevel=2,
    )


AVAILABLE = _load()


def has(op: str, device: torch.device) -> bool:
    """Whether the compiled op runs on this kind of device. On others its reference does."""
    if not AVAILABLE:
        return False
    key = {"cpu": "CPU", "meta": "Meta", "cuda": "CUDA"}.get(device.type)
    return key is not None and torch._C._dispatch_has_kernel_for_dispatch_key(f"trace_megatron::{op}", key)
