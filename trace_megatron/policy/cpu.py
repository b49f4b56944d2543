"""What Megatron-Core needs where no CUDA device exists: the project's only monkey patches, each with its reason.

With a CUDA device ``install`` does nothing at all. One set for 0.16 (Python 3.11) and 0.19 (3.12): what only one of the
two asks for says so.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

import torch

_installed = False


def install_without_compiler() -> None:
    """Before Megatron-Core is imported: its fused functions stay uncompiled, as after its own `disable_jit_fuser`."""
    # Decorating them imports torch's compiler, two seconds of every rank's start; no layer here calls one on the CPU.
    torch.compile = _but_megatron(torch.compile)


def install() -> None:
    """Let Megatron-Core run on the CPU of this process; to be called before a model or an optimizer is built."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    _install_device()
    _install_experts()
    _install_rng()


def _install_device() -> None:
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.pipeline_parallel import schedules

    # Buffers of the tensor- and pipeline-parallel layers and of DDP are made on `torch.cuda.current_device()`.
    torch.cuda.current_device = lambda: torch.device("cpu")
    # Pipeline communication waits for the device after batched sends; gloo's `wait` has waited already.
    torch.cuda.synchronize = lambda device=None: None
    # 0.19 looks up the current stream, to wait for events that only CUDA graphs leave on parameters.
    torch.cuda.current_stream = lambda device=None: None
    # The tied embedding of the last pipeline stage and resumed optimizer states are moved with `.cuda()`.
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    # Schedules, optimizer and gradient clipping make their counters with `device="cuda"`. Only what these four modules
    # call `torch` changes: wrapped factories in torch itself would escape its device contexts, which transformers uses.
    for module in (clip_grads, optimizer, schedules, utils):
        module.torch = _TorchOnCPU("torch")
    # The optimizers sort parameters by the names "torch.cuda.FloatTensor" and "torch.cuda.BFloat16Tensor".
    torch.Tensor.type = _with_cuda_type_names(torch.Tensor.type)


def _install_experts() -> None:
    from megatron.core.transformer.moe import moe_utils

    # The router asks for this name whether Transformer Engine defined it or not.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _install_rng() -> None:
    from megatron.core.tensor_parallel import random

    # Megatron's own tracker without a device generator: the training one seeds a CUDA generator. Dropout is 0.
    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    # Recompute saves and restores the device generator's state; the CPU generator's is saved beside it anyway.
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0, dtype=torch.uint8)
    random._set_cuda_rng_state = lambda *args, **kwargs: None


class _TorchOnCPU(types.ModuleType):
    """torch, but what is to be made on a CUDA device is made on the CPU."""

    def __getattr__(self, name: str):
        return getattr(torch, name)

    @staticmethod
    def tensor(*args, device=None, **kwargs) -> torch.Tensor:
        return torch.tensor(*args, device="cpu", **kwargs)

    @staticmethod
    def zeros(*args, device=None, **kwargs) -> torch.Tensor:
        return torch.zeros(*args, device="cpu", **kwargs)


def _but_megatron(compile: Callable) -> Callable:
    @functools.wraps(compile)
    def call(model=None, *args, **kwargs):
        of_megatron = str(getattr(model, "__module__", "")).startswith("megatron.core.")  # None of a tensor's methods
        return model if of_megatron else compile(model, *args, **kwargs)

    return call


def _with_cuda_type_names(type_of: Callable) -> Callable:
    @functools.wraps(type_of)
    def call(self, *args, **kwargs):
        result = type_of(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if isinstance(result, str) else result

    return call
