"""Logprob and entropy of chosen tokens from hidden states, vocabulary-parallel, without the logits of a whole pack.

E edges (a hidden row and the token it is asked about), H hidden size, V rows of this rank's shard of the vocabulary.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

LOGITS_PER_CHUNK = 1 << 26
"""Logits alive at once, in float32 256 MiB: 441 rows of 152k, which fill a GPU."""
CPU_LOGITS_PER_CHUNK = 1 << 24
"""64 MiB: SmolLM2 trains 20 % faster by the clock on two threads than with 256 MiB. Fresh pages cost more there than
adding up the gradient of the weight, once a chunk."""


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
            logits = _logits(hidden[rows], weight[:num_real], temperature)
            highest = _highest(logits, group)
            logits -= highest[:, None]
            chosen, owned = _owned_columns(columns[rows], num_real)
            # A label of another rank adds 0 here; so does every label on a rank that holds padding alone.
            label_logits = logits.gather(1, chosen[:, None])[:, 0] * owned if num_real else torch.zeros_like(highest)
            exponentials = logits.exp()
            sums = torch.stack((exponentials.sum(1), (exponentials * logits).sum(1), label_logits))
            if group is not None:
                dist.all_reduce(sums, group=group)
            log_sums = sums[0].log()
            logprobs[rows] = sums[2] - log_sums
            entropies[rows] = log_sums - sums[1] / sums[0]
            log_normalizers[rows] = highest + log_sums
        ctx.save_for_backward(hidden, weight, columns, log_normalizers)
        ctx.temperature, ctx.num_real, ctx.group = temperature, num_real, group
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, grad_logprobs, _grad_entropies):
        hidden, weight, columns, log_normalizers = ctx.saved_tensors
        num_real, real_weight = ctx.num_real, weight[: ctx.num_real]
        grad_hidden = torch.empty_like(hidden)
        # One sum over the chunks, in full precision.
        grad_weight = torch.zeros_like(weight, dtype=log_normalizers.dtype) if ctx.needs_input_grad[1] else None
        for rows in _chunks(hidden, weight):
            logits = _logits(hidden[rows], real_weight, ctx.temperature)
            # d logprob / d logits = (one-hot of the label - softmax) / temperature
            scale = grad_logprobs[rows] / ctx.temperature
            grad_logits = logits.sub_(log_normalizers[rows, None]).exp_().mul_(-scale[:, None])
            if num_real:
                chosen, owned = _owned_columns(columns[rows], num_real)
                grad_logits.scatter_add_(1, chosen[:, None], (scale * owned)[:, None])
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[rows] = grad_logits @ real_weight
            if grad_weight is not None:
                grad_weight[:num_real] += grad_logits.t() @ hidden[rows]
        if ctx.group is not None:
            dist.all_reduce(grad_hidden, group=ctx.group)
        grad_weight = grad_weight.to(weight.dtype) if grad_weight is not None else None
        return grad_hidden, grad_weight, None, None, None, None


def _chunks(hidden: torch.Tensor, weight: torch.Tensor) -> list[slice]:
    num_rows = hidden.size(0)
    logits = CPU_LOGITS_PER_CHUNK if hidden.device.type == "cpu" else LOGITS_PER_CHUNK
    size = max(logits // weight.size(0), 1)
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = hidden @ weight.t()
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature)


def _highest(logits: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    highest = logits.amax(1) if logits.size(1) else logits.new_full((logits.size(0),), -torch.inf)
    if group is not None:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    return highest


def _owned_columns(columns: torch.Tensor, num_real: int) -> tuple[torch.Tensor, torch.Tensor]:
    owned = (columns >= 0) & (columns < num_real)
    return columns.clamp(0, max(num_real - 1, 0)), owned
