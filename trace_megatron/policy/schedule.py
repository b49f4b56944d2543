"""The learning rate of every step: a pure function of the step, so that a resumed run needs the step alone."""

from __future__ import annotations

import math

from trace_megatron.config import OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Rate of 0-based ``step``: linear warm-up that reaches the peak at step ``warmup_steps - 1``, then the schedule.

    ``cosine`` and ``linear`` arrive at ``min_learning_rate`` with the last of ``total_steps`` and stay there.
    """
    peak, floor = config.learning_rate, config.min_learning_rate
    # The first step already moves the weights: a step of reinforcement learning is too dear to be spent at rate 0.
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return peak
    decay_steps = max(total_steps - 1 - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / decay_steps, 1.0)
    share = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return floor + (peak - floor) * share
