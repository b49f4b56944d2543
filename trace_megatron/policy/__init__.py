"""The policy that is trained: Megatron-Core under one object."""

import warnings

import torch

from trace_megatron.policy import cpu

if not torch.cuda.is_available():
    # Six times at every start; on a CPU there is nothing to install.
    warnings.filterwarnings("ignore", message=r".*(Transformer Engine|Apex)")
    cpu.install_without_compiler()
