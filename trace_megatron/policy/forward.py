"""One pack through a GPTModel: hidden states between pipeline stages, scores of the trained edges at the last one.

T packed tokens, Q of them on this context-parallel rank, E trained edges, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.utils import unwrap_model

from trace_megatron.algorithm.pack import pack_trees, pad_batch, trained_edges
from trace_megatron.policy.context import block_rows, deal_rows
from trace_megatron.policy.logprobs import edge_logprobs
from trace_megatron.policy.tree_attention import TreeSequence
from trace_megatron.types import TreeBatch


@dataclass(frozen=True, slots=True)
class EdgeScores:
    """What the policy says of the trained tokens of one pack that this rank predicts, on the model's device."""

    positions: torch.Tensor
    """[E] int64, index of each predicted token in the pack; under context parallelism each is on one rank."""
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

    def __call__(self, model: torch.nn.Module, batch: TreeBatch, length: int = 1) -> torch.Tensor | EdgeScores:
        """This stage's share: hidden states [Q, 1, H] for the next stage, or the scores on the last one.

        The pack is padded to at least ``length`` tokens.
        """
        core = unwrap_model(model)
        sequence_parallel = core.config.sequence_parallel
        padded, rows, tree = self._place(core, pad_batch(batch, length))
        tokens = padded.tokens[rows].to(self.device)
        with _hidden_states_only(core) as is_last_stage:
            hidden = model(tokens[None], tree.position_ids[None], None, packed_seq_params=tree)
        if not is_last_stage:
            return hidden
        if sequence_parallel:
            # The gradient that comes back is whole on every rank already: summing it again would multiply it.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return self._scores(core, hidden[:, 0], batch, rows)

    def _place(self, model: GPTModel, batch: TreeBatch) -> tuple[TreeBatch, torch.Tensor, TreeSequence]:
        """The pack, padded to what the ranks divide, the rows [Q] that this one holds, and the tree for its layers."""
        num_ranks = model.config.context_parallel_size
        multiple = model.config.tensor_model_parallel_size if model.config.sequence_parallel else 1
        if num_ranks == 1:
            padded = pad_batch(batch, multiple)
            rows, attention = torch.arange(padded.num_tokens), {}
        else:
            block = block_rows(batch.num_tokens, num_ranks, multiple)
            padded = pad_batch(batch, block * num_ranks)
            dealt = deal_rows(padded.position_ids, num_ranks, block)
            rows = dealt[model.pg_collection.cp.rank()]
            order = torch.argsort(dealt.flatten())
            attention = {"rows": rows.to(self.device, torch.int32), "gathered": order.to(self.device)}
        ends, positions = padded.subtree_end.to(self.device), padded.position_ids[rows].to(self.device)
        return padded, rows, TreeSequence(ends, positions, **attention)

    def _scores(self, model: GPTModel, hidden: torch.Tensor, batch: TreeBatch, rows: torch.Tensor) -> EdgeScores:
        """Of the edges whose predecessor is among ``rows``, where ``hidden`` [Q, H] stands."""
        edges = trained_edges(batch)
        place = torch.full((max(batch.num_tokens, int(rows[-1]) + 1),), -1)
        place[rows] = torch.arange(rows.numel())
        edges = edges[place[batch.predecessor[edges].long()] >= 0]
        places = place[batch.predecessor[edges].long()]
        tied = model.share_embeddings_and_output_weights
        logprobs, entropies = edge_logprobs(
            hidden.index_select(0, places.to(self.device)),
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
    length = _common_length(unwrap_model(model_chunks[0]), batches)

    def step(iterator: Iterator[TreeBatch], model: torch.nn.Module):
        batch = next(iterator)
        output = forward(model, batch, length)
        if isinstance(output, torch.Tensor):
            return output, None
        return output.logprobs, lambda _: evaluate(batch, output)

    results = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(batches) for _ in model_chunks] if num_chunks > 1 else iter(batches),
        model=list(model_chunks),
        num_microbatches=len(batches),
        seq_length=length,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return results[:num_real]


def _common_length(model: GPTModel, batches: Sequence[TreeBatch]) -> int:
    """The length that every pack is padded to: where experts gather the tokens of all ranks, that of the longest pack
    of all replicas; else 1."""
    config = model.config
    if config.num_moe_experts is None or config.moe_token_dispatcher_type != "allgather":
        return 1
    longest = torch.tensor(max(batch.num_tokens for batch in batches))
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group_gloo())
    return int(longest)


@contextmanager
def _hidden_states_only(model: GPTModel) -> Iterator[bool]:
    """Keep the last stage from projecting every row on the vocabulary; yields whether this is the last stage."""
    is_last_stage = model.post_process
    model.post_process = False
    try:
        yield is_last_stage
    finally:
        model.post_process = is_last_stage
