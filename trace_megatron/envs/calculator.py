"""Arithmetic with a calculator that takes two numbers at a time: a small multi-turn task, its difficulty spread wide.

The prompt is an expression such as ``(7-3)*(2+(8-5))``. An action ``7-3`` is a call, answered by a ``tool`` message
with the result; an action ``=20`` is the answer and ends the episode, with reward 1 if it is right. An expression of n
operations takes n calls and the answer; one wrong operand anywhere loses it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from trace_megatron.errors import UserError
from trace_megatron.rollout.env import Transition
from trace_megatron.types import Task

_CALL = re.compile(r"(-?\d{1,9})([-+*])(-?\d{1,9})")
_ANSWER = re.compile(r"=(-?\d{1,9})")
_MAX_VALUE = 999
"""Of every intermediate result: longer numbers would be a task of their own."""
_SPLIT_SEED = {"train": 0, "validation": 1}


@dataclass(frozen=True, slots=True)
class Operation:
    """A call that solves one bracket: ``left`` and ``right`` are values."""

    left: int
    operator: str
    right: int

    @property
    def value(self) -> int:
        return compute(self.left, self.operator, self.right)

    def __str__(self) -> str:
        return f"{self.left}{self.operator}{self.right}"


class Calculator:
    """Expressions of ``min_operations`` to ``max_operations`` operations, in equal parts; the splits share none."""

    def __init__(
        self, min_operations: int = 1, max_operations: int = 6, max_number: int = 20, size: int = 40_000, seed: int = 0
    ) -> None:
        """Raises UserError unless 1 <= min_operations <= max_operations <= 12, max_number >= 2 and size >= 1."""
        if not 1 <= min_operations <= max_operations <= 12 or max_number < 2 or size < 1:
            raise UserError(
                "expected env.params with 1 <= min_operations <= max_operations <= 12, max_number >= 2 and size >= 1, "
                f"found {min_operations}, {max_operations}, {max_number} and {size}"
            )
        self._operations = (min_operations, max_operations)
        self._max_number = max_number
        self._size = size
        self._seed = seed

    def tasks(self, split: str) -> Sequence[Task]:
        """The split's tasks: every fourth different expression is held out."""
        if split not in _SPLIT_SEED:
            raise UserError(f"expected a split of {', '.join(_SPLIT_SEED)}, found '{split}'")
        return _Tasks(self, split, self._size)

    def draw(self, split: str, number: int) -> tuple[str, list[Operation]]:
        """Expression and solution of one task; the same numbers give the same task."""
        low, high = self._operations
        rng = random.Random(f"{self._seed} {split} {number}")
        num_operations = low + number % (high - low + 1)
        while True:
            expression, operations = _build(num_operations, self._max_number, rng)
            if (random.Random(expression).random() < 0.25) == (split == "validation"):
                return expression, operations

    async def reset(self, task: Task) -> int:
        return task.payload["answer"]

    async def step(self, state: int, action: str) -> Transition:
        answer = _ANSWER.fullmatch(action.strip())
        if answer:
            return Transition(state, (), float(int(answer[1]) == state), True, {"answer": answer[1]})
        call = _CALL.fullmatch(action.strip())
        result = str(compute(int(call[1]), call[2], int(call[3]))) if call else "error"
        return Transition(state, ({"role": "tool", "content": result},), 0.0, False, {})

    async def close(self) -> None:
        """Nothing is held."""


class _Tasks(Sequence[Task]):
    def __init__(self, environment: Calculator, split: str, size: int) -> None:
        self._environment, self._split, self._size = environment, split, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, number: int) -> Task:
        if not 0 <= number < self._size:
            raise IndexError(number)
        expression, operations = self._environment.draw(self._split, number)
        return Task(
            task_id=f"calculator-{self._split}-{number}",
            messages=({"role": "user", "content": expression},),
            payload={"answer": operations[-1].value, "num_operations": len(operations)},
        )


def compute(left: int, operator: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def _build(num_operations: int, max_number: int, rng: random.Random) -> tuple[str, list[Operation]]:
    """A random expression with its operations, innermost and left first; values stay small."""
    while True:
        text, _, operations = _grow(num_operations, max_number, rng)
        if all(abs(operation.value) <= _MAX_VALUE for operation in operations):
            return text.removeprefix("(").removesuffix(")"), operations


def _grow(num_operations: int, max_number: int, rng: random.Random) -> tuple[str, int, list[Operation]]:
    if num_operations == 0:
        number = rng.randint(1, max_number)
        return str(number), number, []
    before = rng.randint(0, num_operations - 1)
    left_text, left, left_operations = _grow(before, max_number, rng)
    right_text, right, right_operations = _grow(num_operations - 1 - before, max_number, rng)
    operation = Operation(left, rng.choice("++--*"), right)
    operations = [*left_operations, *right_operations, operation]
    return f"({left_text}{operation.operator}{right_text})", operation.value, operations
