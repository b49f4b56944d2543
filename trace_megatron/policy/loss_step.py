"""Loss and statistics of one pack, and how the packs' sums become the statistics of a step. E trained edges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trace_megatron.algorithm.loss import clipped_edges, k3_kl, tree_policy_loss
from trace_megatron.config import LossConfig
from trace_megatron.policy.forward import EdgeScores
from trace_megatron.types import TreeBatch

_SUMS = ("loss", "weight", "clipped", "ratio", "mismatch_kl", "reference_kl", "entropy")


@dataclass(frozen=True, slots=True)
class StepSums:
    """Weighted sums over the trained tokens of some packs; they add up over packs and ranks."""

    sums: torch.Tensor
    """[7] float64, in the order of ``_SUMS``."""
    tail: torch.Tensor
    """[1] float64, largest |trainer - engine logprob|."""

    def mean(self, name: str) -> float:
        """Weighted mean over the trained tokens; 0 without any."""
        weight = self.total("weight")
        return self.total(name) / weight if weight > 0 else 0.0

    def total(self, name: str) -> float:
        return float(self.sums[_SUMS.index(name)])


def pack_loss(batch: TreeBatch, scores: EdgeScores, config: LossConfig) -> tuple[torch.Tensor, StepSums]:
    """The pack's share of the step's loss, which is the sum over packs, and its statistics.

    Every trained edge adds the clipped loss of its two masses and, with ``kl_coef``, its weight times k3(policy ||
    reference). The masses' normalisers are global, so nothing is divided here.
    """
    edges, logprobs = scores.positions.cpu(), scores.logprobs

    def at_edges(values: torch.Tensor) -> torch.Tensor:
        return values[edges].to(logprobs.device, logprobs.dtype)

    weight = at_edges(batch.weight)
    masses = at_edges(batch.positive_mass), at_edges(batch.negative_mass)
    clip = config.clip_low, config.clip_high, config.dual_clip
    old_logprobs, rollout_logprobs = at_edges(batch.old_logprobs), at_edges(batch.rollout_logprobs)
    edge_loss = tree_policy_loss(logprobs, old_logprobs, *masses, *clip)
    reference_kl = torch.zeros_like(logprobs)
    if config.kl_coef:
        reference_kl = k3_kl(logprobs, at_edges(batch.reference_logprobs))
        edge_loss = edge_loss + config.kl_coef * weight * reference_kl
    with torch.no_grad():
        ratio = torch.exp(logprobs - rollout_logprobs)
        clipped = clipped_edges(logprobs, old_logprobs, *masses, *clip)
        columns = (clipped, ratio, k3_kl(rollout_logprobs, logprobs), reference_kl, scores.entropies)
        sums = [edge_loss.double().sum(), weight.double().sum()]
        sums += [(weight.double() * column.double()).sum() for column in columns]
        tail = (logprobs - rollout_logprobs).abs().double()
        tail = torch.cat((tail, tail.new_zeros(1))).amax(keepdim=True)
    return edge_loss.sum(), StepSums(torch.stack(sums).cpu(), tail.cpu())


def reduce_sums(packs: Sequence[StepSums], reports: bool, group: dist.ProcessGroup) -> StepSums:
    """Add the packs of the ranks that report, each of them its own edges; the same result on every rank."""
    sums, tail = torch.zeros(len(_SUMS), dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for pack in packs if reports else ():
        sums += pack.sums
        tail = torch.maximum(tail, pack.tail)
    dist.all_reduce(sums, group=group)
    dist.all_reduce(tail, op=dist.ReduceOp.MAX, group=group)
    if not math.isfinite(float(sums[0])):
        raise FloatingPointError(f"expected a finite loss, found {float(sums[0])}: the weights are left as they were")
    return StepSums(sums, tail)
