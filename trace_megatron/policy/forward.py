"""One pack through a GPTModel: hidden states between pipeline stages, scores of the trained edges at the last one.

T packed tokens, E trained edges, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.utils import unwrap_model

from trace_megatron.algorithm.pack import pack_trees, pad_batch, trained_edges
from trace_megatron.policy.logprobs import edge_logprobs
from trace_megatron.policy.tree_attention import TreeSequence
from trace_megatron.types import TreeBatch


@dataclass(frozen=True, slots=True)
class EdgeScores:
    """What the policy says of the trained tokens of one pack, on the model's device."""

    positions: torch.Tensor
    """[E] int64, index of each predicted token in the pack."""
    logprobs: torch.Tensor
    """[E], at the sampling temperature; carries the gradient."""
    entropies: torch.Tensor
    """[E] nats, without gradient."""


@dataclass(frozen=True, slots=True)
class EdgeForward:
    """How a model is asked for the scores of a pack."""

    temperature: float
    vocab_size: int
    """Without the padding that makes it divisible."""
    device: torch.device

    def __call__(self, model: torch.nn.Module, batch: TreeBatch) -> torch.Tensor | EdgeScores:
        """This stage's share: hidden states [T, 1, H] for the next stage, or the scores on the last one."""
        core = unwrap_model(model)
        sequence_parallel = core.config.sequence_parallel
        padded = pad_batch(batch, core.config.tensor_model_parallel_size if sequence_parallel else 1)
        tokens, positions = padded.tokens.to(self.device), padded.position_ids.to(self.device)
        tree = TreeSequence(subtree_end=padded.subtree_end.to(self.device), position_ids=positions)
        with _hidden_states_only(core) as is_last_stage:
            hidden = model(tokens[None], positions[None], None, packed_seq_params=tree)
        if not is_last_stage:
            return hidden
        if sequence_parallel:
            # The gradient that comes back is whole on every rank already: summing it again would multiply it.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return self._scores(core, hidden[:, 0], batch)

    def _scores(self, model: GPTModel, hidden: torch.Tensor, batch: TreeBatch) -> EdgeScores:
        edges = trained_edges(batch)
        rows = batch.predecessor[edges].to(self.device, torch.int64)
        tied = model.share_embeddings_and_output_weights
        logprobs, entropies = edge_logprobs(
            hidden.index_select(0, rows),
            model.shared_embedding_or_output_weight() if tied else model.output_layer.weight,
            batch.tokens[edges].to(self.device),
            temperature=self.temperature,
            vocab_size=self.vocab_size,
            group=model.pg_collection.tp if model.config.tensor_model_parallel_size > 1 else None,
        )
        return EdgeScores(edges.to(self.device), logprobs, entropies)


def run_schedule(
    model_chunks: Sequence[torch.nn.Module],
    batches: Sequence[TreeBatch],
    forward: EdgeForward,
    evaluate: Callable[[TreeBatch, EdgeScores], tuple[torch.Tensor, torch.Tensor, Any]],
    *,
    forward_only: bool,
) -> list[Any]:
    """Run Megatron's schedule over this rank's micro-batches.

    ``evaluate`` is called on the last stage and returns (loss, token count, result). Returns the results in the
    order of ``batches`` on the last stage, nothing on the others. The interleaved schedule takes a multiple of the
    number of stages: packs of one padding token make it up.
    """
    num_real, num_chunks = len(batches), len(model_chunks)
    if num_chunks > 1:
        num_stages = unwrap_model(model_chunks[0]).config.pipeline_model_parallel_size
        batches = [*batches, *[pack_trees((), ())] * (-num_real % num_stages)]

    def step(iterator: Iterator[TreeBatch], model: torch.nn.Module):
        batch = next(iterator)
        output = forward(model, batch)
        if isinstance(output, torch.Tensor):
            return output, None
        return output.logprobs, lambda _: evaluate(batch, output)

    results = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(batches) for _ in model_chunks] if num_chunks > 1 else iter(batches),
        model=list(model_chunks),
        num_microbatches=len(batches),
        seq_length=max(batch.num_tokens for batch in batches),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return results[:num_real]


@contextmanager
def _hidden_states_only(model: GPTModel) -> Iterator[bool]:
    """Keep the last stage from projecting every row on the vocabulary; yields whether this is the last stage."""
    is_last_stage = model.post_process
    model.post_process = False
    try:
        yield is_last_stage
    finally:
        model.post_process = is_last_stage
