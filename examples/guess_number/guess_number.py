"""An environment of your own: the policy guesses a number and is told whether it is larger or smaller."""

import re

from trace_megatron.rollout.env import Transition
from trace_megatron.types import Task


class GuessNumber:
    """Numbers up to ``highest``; every fourth is held out. A state is a value: here, the number looked for."""

    def __init__(self, highest: int = 100) -> None:
        self.highest = highest

    def tasks(self, split: str) -> list[Task]:
        return [
            Task(
                task_id=f"guess-{number}",
                messages=({"role": "user", "content": f"Guess a number from 1 to {self.highest}."},),
                payload={"number": number},
            )
            for number in range(1, self.highest + 1)
            if (number % 4 == 0) == (split == "validation")
        ]

    async def reset(self, task: Task) -> int:
        return task.payload["number"]

    async def step(self, state: int, action: str) -> Transition:
        guesses = re.findall(r"\d+", action)
        if guesses and int(guesses[-1]) == state:
            return Transition(state, observation=(), reward=1.0, done=True)
        hint = "Write a number." if not guesses else "Smaller." if int(guesses[-1]) > state else "Larger."
        return Transition(state, ({"role": "user", "content": hint},), reward=0.0, done=False, info={"hint": hint})

    async def close(self) -> None:
        """Nothing is held."""
