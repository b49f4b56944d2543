"""The environment protocol. States are values: a fork is a second step from the same state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trace_megatron.types import Task


@dataclass(frozen=True, slots=True)
class Transition:
    """What one action led to."""

    state: Any
    """The state after the action; the one before stays valid, so that a continuation can start from it."""
    observation: tuple[Mapping[str, Any], ...]
    """Chat messages that answer the action; empty when done."""
    reward: float
    """Outcome in [0, 1] if the episode ended here. The last transition's reward is the rollout's."""
    done: bool
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON values for the log."""


class Environment(Protocol):
    """A family of tasks with its verifier. ``split`` is "train" or "validation"; the two share no task.

    It may have an attribute ``max_concurrency``: the number of calls that it can serve at once.
    """

    def tasks(self, split: str) -> Sequence[Task]:
        """The split's tasks; may be lazy. Empty only if the user asked for something that has none."""
        ...

    async def reset(self, task: Task) -> Any:
        """The state before the first action."""
        ...

    async def step(self, state: Any, action: str) -> Transition:
        """Apply the action's text. Must not change ``state``. An exception becomes an ENV_ERROR rollout."""
        ...

    async def close(self) -> None:
        """Free what the environment holds (servers, sandboxes)."""
        ...
