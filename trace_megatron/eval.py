"""`trace-megatron eval`: accuracy of an HF folder on held-out prompts, with the run's own rollouts and verifier."""

from __future__ import annotations

import asyncio

from trace_megatron.checks import check_engine
from trace_megatron.config import Config
from trace_megatron.log import progress, say
from trace_megatron.sampling import open_sampling
from trace_megatron.validate import Accuracy


def evaluate_policy(config: Config) -> Accuracy:
    """Sample ``validation.samples`` episodes for ``validation.prompts`` held-out prompts from ``policy.model``.

    Raises UserError on bad input.
    """
    check_engine(config)
    with asyncio.Runner() as loop, open_sampling(config, loop) as sampling, progress("episodes") as report:
        accuracy = loop.run(sampling.validate(report.update))
    say(
        f"{config.policy.model}: accuracy {accuracy.accuracy:.1%} ± {accuracy.standard_error:.1%} (standard error over"
        f" {accuracy.num_prompts} prompts x {accuracy.num_samples} samples), reward {accuracy.reward:.3f},"
        f" {accuracy.turns_mean:.2f} turns, {accuracy.truncated_share:.1%} truncated,"
        f" {accuracy.failed_share:.1%} failed"
    )
    return accuracy
