"""The records that travel between the parts. Frozen; one sentence and the shape under each field.

Legend: T packed tokens, L leaves, N nodes.

A worked example. Prompt "2+3=?" (5 tokens), two bare rollouts of three and two turns, one continuation that starts
after turn 1 of rollout 0::

    RolloutTree(prompt, rollouts=(
        Rollout(anchor=ROOT,         turns=(t1, t2, t3), reward=0.0, ...),    # index 0, bare
        Rollout(anchor=ROOT,         turns=(t1', t2'),   reward=1.0, ...),    # index 1, bare
        Rollout(anchor=Anchor(0, 1), turns=(t2'', t3''), reward=1.0, ...),    # index 2, inherits t1 of rollout 0
    ))

A rollout stores only the turns that were sampled for it; what it inherits is found through its anchor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # environment servers run without it
    import torch


@dataclass(frozen=True, slots=True)
class Task:
    """One problem as an environment hands it out, before it is rendered to tokens."""

    task_id: str
    """Unique and stable in its environment."""
    messages: tuple[Mapping[str, Any], ...]
    """The opening chat messages, e.g. a system and a user message."""
    payload: Mapping[str, Any]
    """What the environment needs to judge it; JSON values, opaque to everyone else."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas (OpenAI's form) of what the policy may call, for the chat template."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task with its rendered prompt."""

    prompt_id: str
    """Unique within one step: seeds, trees and logs refer to it."""
    task: Task
    token_ids: tuple[int, ...]
    """The chat template's ids of ``task.messages`` with the generation prompt."""


class RolloutStatus(StrEnum):
    """How a rollout ended."""

    FINISHED = "finished"
    """The environment said so."""
    TURN_LIMIT = "turn_limit"
    """The last allowed turn was played: an ordinary ending with the last reward."""
    TRUNCATED = "truncated"
    """A token limit cut it; ``rollout.truncated`` says how it counts."""
    ENV_ERROR = "env_error"
    """The environment failed: the rollout is counted, never trained on."""
    ENGINE_ERROR = "engine_error"
    """The engine failed: the rollout is counted, never trained on."""

    @property
    def failed(self) -> bool:
        return self in (RolloutStatus.ENV_ERROR, RolloutStatus.ENGINE_ERROR)


@dataclass(frozen=True, slots=True)
class Turn:
    """One thought-action-observation unit."""

    action_ids: tuple[int, ...]
    """Sampled token ids, the stop token included."""
    action_logprobs: tuple[float, ...]
    """Processed (after temperature and top-p) logprobs of ``action_ids``, as the engine reported them."""
    observation_ids: tuple[int, ...]
    """What the environment answered, with the tokens that open the next turn; empty after the last turn."""
    weight_version: int
    """Of the policy weights that sampled the action; the oldest, where weights were pushed in the middle of it."""


@dataclass(frozen=True, slots=True, order=True)
class Anchor:
    """A place that can receive budget: the history after ``turn`` turns of rollout ``rollout`` of a tree."""

    rollout: int
    """Index in ``RolloutTree.rollouts``; -1 at the root."""
    turn: int
    """Turns of the *whole path* before it, inherited ones included; 0 at the root."""


ROOT = Anchor(-1, 0)


@dataclass(frozen=True, slots=True)
class Rollout:
    """A bare rollout (``anchor == ROOT``) or a continuation of a visited prefix."""

    anchor: Anchor
    turns: tuple[Turn, ...]
    """Own turns only, without the inherited ones."""
    reward: float
    """Outcome in [0, 1]; 0 where the status is a failure."""
    status: RolloutStatus
    trained: bool = True
    """False: outcome unknown or masked. Not in any group, target, weight or loss."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """What the environment wants logged; JSON values."""


@dataclass(frozen=True, slots=True)
class RolloutTree:
    """All rollouts of one prompt in one step."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    """A continuation stands after the rollout that it continues."""
    prefix_probs: tuple[float, ...] = ()
    """[A] the predictor's V(H) of the bare rollouts' prefixes when the continuations were planned; empty: not asked."""


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """A pack: one forest in preorder, every shared token once. ALGORITHMS: two int vectors describe the tree.

    Token i attends to token j if and only if ``j <= i < subtree_end[j]``.
    """

    tokens: torch.Tensor
    """[T] int64."""
    position_ids: torch.Tensor
    """[T] int64, depth on the path, 0 at a root's first token."""
    subtree_end: torch.Tensor
    """[T] int32, one past the last token of the subtree that hangs below token j's node."""
    predecessor: torch.Tensor
    """[T] int32, position whose hidden state predicts token i; -1 at a root's first token and at padding."""
    positive_mass: torch.Tensor
    """[T] float64, sum over leaves through the token of weight * max(advantage, 0); 0 where there is no loss."""
    negative_mass: torch.Tensor
    """[T] float64, sum over leaves through the token of weight * max(-advantage, 0)."""
    weight: torch.Tensor
    """[T] float64, sum over leaves through the token of weight; > 0 exactly on the policy's own trained tokens."""
    rollout_logprobs: torch.Tensor
    """[T] float32, the engine's logprob of each action token, else 0."""
    old_logprobs: torch.Tensor
    """[T] float32, denominator of the ratio: the rollout's (bypass) or the trainer's (decoupled)."""
    reference_logprobs: torch.Tensor
    """[T] float32, the reference model's, 0 without a KL term."""
    num_unpacked_tokens: int
    """Tokens that the same leaves would take one by one."""

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, shape and dtype of one tensor of a model, in HF terms."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class TrainStats:
    """What one optimizer step reports, reduced over all ranks."""

    loss: float
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    clip_share: float
    """Weighted share of trained tokens whose ratio was clipped with effect."""
    ratio_mean: float
    """Weighted mean of exp(trainer - engine logprob) over trained tokens: 1 when both sides agree."""
    ratio_tail: float
    """Largest |trainer - engine logprob| over trained tokens."""
    mismatch_kl: float
    """Weighted mean of the k3 estimate of KL(engine || trainer)."""
    reference_kl: float
    """Weighted mean of the k3 estimate of KL(policy || reference); 0 without a KL term."""
    entropy: float
    """Weighted mean entropy of the policy at trained tokens, nats."""
    num_tokens: int
    """Packed tokens, padding and dummies excluded."""
    num_unpacked_tokens: int
    visited_blocks: int
    """Blocks of 128 x 128 attention scores in which any row sees any key."""
    dense_blocks: int
    """The same of causal attention over whole packs."""
    tokens_per_s: float
    """Packed tokens by the seconds of the optimizer step: forward, backward and update."""
    flop_utilisation: float | None
    """Model FLOPs by seconds, ranks and peak (docs/training.md); None where the peak is unknown."""
    peak_memory_gib: list[float]
    """By rank: of the device's allocator in this step, on a CPU of the process since its start."""
