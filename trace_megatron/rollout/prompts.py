"""Prompts in a shuffled, resumable order over an environment's tasks, which may be a lazy sequence of any length."""

from __future__ import annotations

import hashlib

from trace_megatron.errors import UserError
from trace_megatron.rollout.chat import ChatRenderer
from trace_megatron.rollout.env import Environment
from trace_megatron.types import Prompt, Task


class PromptSource:
    """Hands out the tasks of one split, every one once per epoch, each epoch in an order of its own."""

    def __init__(
        self, environment: Environment, renderer: ChatRenderer, split: str, seed: int, max_prompt_tokens: int
    ) -> None:
        """Raises UserError if the split has no task."""
        self._tasks = environment.tasks(split)
        if not len(self._tasks):
            raise UserError(f"expected tasks in the split '{split}', found an empty data set: check env.params")
        self._renderer = renderer
        self._split = split
        self._seed = seed
        self._max_prompt_tokens = max_prompt_tokens
        self._position = 0
        self.num_dropped = 0
        """Prompts longer than ``max_prompt_tokens`` so far."""

    def next(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts; ids are unique over the whole run, even where a small data set wraps round.

        Raises UserError if no prompt of the split is short enough.
        """
        prompts: list[Prompt] = []
        dropped_in_a_row = 0
        while len(prompts) < n:
            epoch, offset = divmod(self._position, len(self._tasks))
            self._position += 1
            task = self._tasks[_shuffled(offset, len(self._tasks), f"{self._seed}:{self._split}:{epoch}")]
            token_ids = self._renderer.prompt_ids(task.messages, task.tools)
            if len(token_ids) <= self._max_prompt_tokens:
                prompts.append(Prompt(_prompt_id(task, epoch), task, token_ids))
                dropped_in_a_row = 0
                continue
            self.num_dropped += 1
            dropped_in_a_row += 1
            if dropped_in_a_row > len(self._tasks):
                raise UserError(
                    f"expected prompts of at most {self._max_prompt_tokens} tokens in the split '{self._split}', "
                    "found none: raise rollout.max_prompt_tokens"
                )
        return prompts

    def state(self) -> dict[str, int]:
        """The data position, JSON values, for a checkpoint."""
        return {
            "position": self._position,
            "num_dropped": self.num_dropped,
            "num_tasks": len(self._tasks),
            "seed": self._seed,
        }

    def load_state(self, state: dict[str, int]) -> None:
        """Go on where ``state`` was taken; raises UserError if it belongs to another data set or seed."""
        for name, value in (("num_tasks", len(self._tasks)), ("seed", self._seed)):
            if state[name] != value:
                raise UserError(
                    f"expected the data of the checkpoint ({name} {state[name]}), found {name} {value}: "
                    "resume with the configuration the run was started with"
                )
        self._position = state["position"]
        self.num_dropped = state["num_dropped"]


def _prompt_id(task: Task, epoch: int) -> str:
    return task.task_id if epoch == 0 else f"{task.task_id}#{epoch}"


def _shuffled(index: int, size: int, key: str) -> int:
    """Image of ``index`` under a keyed permutation of range(size), in constant memory.

    A Feistel network of four rounds permutes the next power of four; images outside the range walk on along their
    cycle until they are inside (Black and Rogaway, CT-RSA 2002: "Ciphers with arbitrary finite domains").
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for round_number in range(4):
            digest = hashlib.blake2b(f"{key}:{round_number}:{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        index = left << half_bits | right
        if index < size:
            return index
