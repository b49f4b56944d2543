"""The policy's model with its optimizer on this rank: one clipped step over packs, in Megatron-Core's schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel

from trace_megatron.config import LossConfig, OptimizerConfig
from trace_megatron.policy.forward import EdgeForward, EdgeScores, run_schedule
from trace_megatron.policy.loss_step import StepSums, pack_loss, reduce_sums
from trace_megatron.policy.optimizer import build_optimizer
from trace_megatron.policy.parallel import Ranks
from trace_megatron.policy.schedule import learning_rate
from trace_megatron.types import TreeBatch


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer step did; the same on all ranks."""

    sums: StepSums
    grad_norm: float
    """Before clipping."""
    learning_rate: float


class Trainer:
    """Owns the parameters, their gradients and the optimizer's state of this rank."""

    def __init__(
        self,
        model_chunks: Sequence[GPTModel],
        forward: EdgeForward,
        optimizer: OptimizerConfig,
        loss: LossConfig,
        total_steps: int,
        ranks: Ranks,
    ):
        self.model_chunks = list(model_chunks)
        self.step = 0
        """Optimizer steps done."""
        self._forward, self._optimizer_config, self._loss = forward, optimizer, loss
        self._total_steps, self._ranks = total_steps, ranks
        # A single replica has nothing to shard, and gloo would copy its whole gradient on the way to itself.
        sharded = optimizer.distributed and (torch.cuda.is_available() or _num_replicas() > 1)
        self._replicas = [_wrap(chunk, sharded) for chunk in self.model_chunks]
        self.optimizer = build_optimizer(self._replicas, replace(optimizer, distributed=sharded))
        for chunk in self.model_chunks:
            chunk.config.finalize_model_grads_func = _finalize

    def train_step(self, batches: Sequence[TreeBatch]) -> Update:
        """One optimizer step on this rank's micro-batches; all replicas bring equally many."""
        sums = self.accumulate(batches)
        rate = learning_rate(self.step, self._optimizer_config, self._total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        _, grad_norm, _ = self.optimizer.step()
        self.step += 1
        return Update(sums, float(grad_norm), rate)

    def accumulate(self, batches: Sequence[TreeBatch]) -> StepSums:
        """Put the gradient of the whole batch into ``main_grad``, reduced over replicas; return the statistics."""
        for replica in self._replicas:
            replica.zero_grad_buffer()
            replica.train()
        self.optimizer.zero_grad()

        def evaluate(batch: TreeBatch, scores: EdgeScores) -> tuple[torch.Tensor, torch.Tensor, StepSums]:
            loss, sums = pack_loss(batch, scores, self._loss)
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), sums

        packs = run_schedule(self._replicas, batches, self._forward, evaluate, forward_only=False)
        return reduce_sums(packs, self._ranks.reports, self._ranks.command_group)

    def offload(self) -> None:
        """Free the gradients, and move the optimizer's states and main weights to host memory; weights stay."""
        for replica in self._replicas:
            replica.offload_grad_buffers()
        self.optimizer.offload_to_cpu()

    def onload(self) -> None:
        """Undo ``offload``."""
        for replica in self._replicas:
            replica.restore_grad_buffers()
        self.optimizer.restore_from_cpu()

    def logprobs(self, batches: Sequence[TreeBatch]) -> list[torch.Tensor]:
        """As ``pack_logprobs``, of the policy."""
        return pack_logprobs(self._replicas, batches, self._forward)


@torch.no_grad()
def pack_logprobs(
    model_chunks: Sequence[torch.nn.Module], batches: Sequence[TreeBatch], forward: EdgeForward
) -> list[torch.Tensor]:
    """[T] float32 per batch on the last stage, 0 at tokens that are not trained or that another context-parallel rank
    predicts; nothing on the other stages."""

    def evaluate(batch: TreeBatch, scores: EdgeScores) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logprobs = torch.zeros(batch.num_tokens)
        logprobs[scores.positions.cpu()] = scores.logprobs.float().cpu()
        nothing = scores.logprobs.new_zeros(())
        return nothing, torch.zeros((), dtype=torch.int, device=nothing.device), logprobs

    for chunk in model_chunks:
        chunk.eval()
    return run_schedule(model_chunks, batches, forward, evaluate, forward_only=True)


def _wrap(chunk: GPTModel, distributed_optimizer: bool) -> DistributedDataParallel:
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=distributed_optimizer,
        check_for_nan_in_grad=True,
    )
    return DistributedDataParallel(chunk.config, config, chunk)


def _num_replicas() -> int:
    return parallel_state.get_data_parallel_world_size(with_context_parallel=True)


def _finalize(model_chunks: list[torch.nn.Module], _num_tokens: torch.Tensor, **options) -> None:
    """Add up gradients over ranks. Megatron would then divide by the token count of all ranks: the packs' weights are
    normalised over the whole batch already."""
    finalize_model_grads(model_chunks, None, **options)
