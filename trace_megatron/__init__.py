"""trace_megatron: reinforcement learning that spends its rollout budget where outcomes are undecided (TRACE)."""

__version__ = "0.1.0"
