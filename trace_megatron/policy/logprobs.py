"""Logprob and entropy of chosen tokens from hidden states, vocabulary-parallel, without the logits of a whole pack.

E edges (a hidden row and the token it is asked about), H hidden size, V rows of this rank's shard of the vocabulary.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from trace_megatron.ops import softmax_gradient, softmax_statistics

LOGITS_PER_CHUNK = 1 << 26
"""Logits alive at once, in float32 256 MiB: 441 rows of 152k, which fill a GPU."""
CPU_LOGITS_PER_CHUNK = 1 << 25
"""682 rows of 49k, in bfloat16 64 MiB: most packs of a small model are one chunk, whose product is the gradient of the
weight already; adding up such gradients costs more than computing them."""


def edge_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log_softmax(hidden weight^T / temperature)[label] and the distribution's entropy in nats, each [E].

    hidden [E, H]; weight [V, H], the shard of rank ``group.rank()``, with equal shards on all ranks; labels int64 [E].
    Rows of the padded vocabulary (global index >= ``vocab_size``) take no part. Results are float32 (float64 for
    float64 inputs). Differentiable in hidden and weight through the logprob alone. ``hidden`` is the same on all
    ranks of ``group`` and so is its gradient.
    """
    return _EdgeLogprobs.apply(hidden, weight, labels, temperature, vocab_size, group)


class _EdgeLogprobs(torch.autograd.Function):
    """Chunks of rows; the backward pass recomputes a chunk's logits instead of storing them."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, temperature, vocab_size, group):
        start = weight.size(0) * (group.rank() if group is not None else 0)
        num_real = min(max(vocab_size - start, 0), weight.size(0))
        columns = labels - start
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropies, log_normalizers = (hidden.new_empty(hidden.size(0), dtype=dtype) for _ in range(3))
        for rows in _chunks(hidden, weight):
            logits = _logits(hidden[rows], weight[:num_real])
            highest, *sums = softmax_statistics(logits, columns[rows], 1.0 / temperature)
            highest, sums = _over_shards(highest, torch.stack(sums), group)
            log_sums = sums[0].log()
            log_normalizers[rows] = highest + log_sums
            logprobs[rows] = sums[2] - log_normalizers[rows]
            entropies[rows] = log_sums - sums[1] / sums[0]
        ctx.save_for_backward(hidden, weight, columns, log_normalizers)
        ctx.temperature, ctx.num_real, ctx.group = temperature, num_real, group
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, grad_logprobs, _grad_entropies):
        hidden, weight, columns, log_normalizers = ctx.saved_tensors
        real_weight = weight[: ctx.num_real]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        for rows in _chunks(hidden, weight):
            logits = _logits(hidden[rows], real_weight)
            slopes = grad_logprobs[rows] / ctx.temperature
            # d logprob / d logits = (one-hot of the label - softmax) / temperature
            grad_logits = softmax_gradient(logits, columns[rows], log_normalizers[rows], slopes, 1.0 / ctx.temperature)
            torch.mm(grad_logits, real_weight, out=grad_hidden[rows])
            if not ctx.needs_input_grad[1]:
                continue
            product = grad_logits.t() @ hidden[rows]
            if grad_weight is None:
                grad_weight = product
            else:  # the sum over several chunks is taken in full precision
                grad_weight = grad_weight.to(log_normalizers.dtype).add_(product)
        if ctx.group is not None:
            dist.all_reduce(grad_hidden, group=ctx.group)
        if grad_weight is None:
            grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        elif ctx.num_real < weight.size(0):
            grad_weight = torch.cat((grad_weight, grad_weight.new_zeros(weight.size(0) - ctx.num_real, weight.size(1))))
        grad_weight = grad_weight.to(weight.dtype) if grad_weight is not None else None
        return grad_hidden, grad_weight, None, None, None, None


def _over_shards(
    highest: torch.Tensor, sums: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Statistics [E], [3, E] of the whole vocabulary from those of the ranks' shards."""
    if group is None:
        return highest, sums
    mine = highest
    highest = mine.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    total, weighted, label = sums
    drop = mine - highest
    sums = torch.stack((drop.exp() * total, drop.exp() * (weighted + drop * total), label))
    dist.all_reduce(sums, group=group)
    return highest, sums


def _chunks(hidden: torch.Tensor, weight: torch.Tensor) -> list[slice]:
    num_rows = hidden.size(0)
    logits = CPU_LOGITS_PER_CHUNK if hidden.device.type == "cpu" else LOGITS_PER_CHUNK
    size = max(logits // weight.size(0), 1)
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def _logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return hidden @ weight.t()
