"""BFCL v4 multi-turn function calling: the tools, the conversations and the verdict of the package bfcl-eval.

A user speaks several times. After each time the policy acts in steps: an action with tool calls is answered by their
results, an action without one hands the word back to the user. After the user's last turn the official checker
compares states and results with the ground truth: reward 1 or 0. As in the official runner, a block that is no readable
call counts as no call, and the conversation ends with the step after the 20th of one turn.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trace_megatron.errors import UserError
from trace_megatron.rollout.env import Transition
from trace_megatron.rollout.tool_calls import parse_tool_calls
from trace_megatron.types import Task

try:
    from bfcl_eval.constants.default_prompts import MAXIMUM_STEP_LIMIT

    from trace_megatron.envs.bfcl_backend import Call, build_call, execute, judge
    from trace_megatron.envs.bfcl_data import CLASSES, SUBSETS, Entry, Message, load_entries, split_entries
    from trace_megatron.envs.bfcl_replay import ground_truth_actions
except ImportError as error:
    raise UserError(
        f"expected the packages bfcl-eval and mpmath for env.name=bfcl, found no {error.name}: "
        "pip install --no-deps bfcl-eval==2026.3.23, and pip install mpmath"
    ) from error

Step = tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class BFCLState:
    """A conversation so far: what was called. The back-ends' state follows from it, so a fork needs no copy."""

    entry_id: str
    finished_turns: tuple[tuple[Step, ...], ...] = ()
    """[turn][step][call]."""
    steps: tuple[Step, ...] = ()
    """Of the turn in play."""

    @property
    def history(self) -> list[Call]:
        """All calls in their order."""
        return [call for turn in (*self.finished_turns, self.steps) for step in turn for call in step]


class BFCL:
    """Environment over the four multi-turn subsets."""

    def __init__(
        self,
        subsets: Sequence[str] = SUBSETS,
        classes: Sequence[str] = CLASSES,
        seed: int = 0,
        worked_example: bool = False,
        **unknown: Any,
    ) -> None:
        """``classes``: only conversations all of whose tools belong to these back-ends; ``seed``: of the 80/20 split.

        ``worked_example``: one turn of a training conversation with the same tools is shown as earlier messages; small
        models do not call a tool without one, and official figures are without. Raises UserError for unknown names.
        """
        if unknown:
            known = ("subsets", "classes", "seed", "worked_example")
            raise _unknown_name("parameter of env.params", next(iter(unknown)), known)
        for what, names, known in (("BFCL subset", subsets, SUBSETS), ("BFCL tool class", classes, CLASSES)):
            for name in names:
                if name not in known:
                    raise _unknown_name(what, str(name), known)
        self._subsets, self._classes, self._seed = tuple(subsets), tuple(classes), seed
        self._examples = split_entries("train", ("base",), self._classes, seed) if worked_example else []

    def tasks(self, split: str) -> Sequence[Task]:
        """Conversations of one side of the split; both sides hold every subset, but no scenario is on both."""
        return [
            Task(
                entry.entry_id,
                (*self._worked_example(entry), *entry.user_turns[0]),
                {"entry_id": entry.entry_id},
                tools=entry.tools,
            )
            for entry in split_entries(split, self._subsets, self._classes, self._seed)
        ]

    def _worked_example(self, entry: Entry) -> tuple[Message, ...]:
        """The first turn of another training conversation whose calls the entry's own tools allow."""
        shown = {tool["function"]["name"] for tool in entry.tools}
        for other in self._examples:
            if other.classes != entry.classes or other.scenario == entry.scenario:
                continue
            actions = ground_truth_actions(other)
            actions = actions[: actions.index("Done.") + 1]
            calls = [
                build_call(other, call.name, call.arguments)
                for action in actions
                for call in parse_tool_calls(action)[1]
            ]
            if calls and {call.name for call in calls} <= shown:
                results = [result for _, result in execute(other, (), calls)]
                return (*other.user_turns[0], *_transcript(actions, results))
        return ()

    async def reset(self, task: Task) -> BFCLState:
        return BFCLState(task.payload["entry_id"])

    async def step(self, state: BFCLState, action: str) -> Transition:
        """Run the action's calls, or let the user speak. The reward comes with the last transition."""
        entry = load_entries()[state.entry_id]
        calls = tuple(build_call(entry, call.name, call.arguments) for call in parse_tool_calls(action)[1])
        if not calls:
            state = _next_turn(state)
            num_turns = len(state.finished_turns)
            if num_turns == len(entry.user_turns):
                return _end(entry, state)
            return Transition(state, entry.user_turns[num_turns], 0.0, False, _info(entry, state))
        done = execute(entry, state.history, calls)
        state = dataclasses.replace(state, steps=(*state.steps, tuple(call for call, _ in done)))
        if len(state.steps) > MAXIMUM_STEP_LIMIT:
            return _end(entry, _next_turn(state))
        observation = tuple({"role": "tool", "name": call.name, "content": result} for call, result in done)
        return Transition(state, observation, 0.0, False, _info(entry, state))

    async def close(self) -> None:
        """Nothing is held."""


def _next_turn(state: BFCLState) -> BFCLState:
    return BFCLState(state.entry_id, (*state.finished_turns, state.steps))


def _end(entry: Entry, state: BFCLState) -> Transition:
    verdict = judge(entry, state.finished_turns)
    return Transition(state, (), float(verdict["valid"]), True, {**_info(entry, state), **verdict})


def _transcript(actions: Sequence[str], results: Sequence[str]) -> Iterator[Message]:
    """Actions of one call each with their results in between."""
    for action, result in itertools.zip_longest(actions, results):
        yield {"role": "assistant", "content": action}
        if result is not None:
            yield {"role": "tool", "content": result}


def _info(entry: Entry, state: BFCLState) -> dict[str, Any]:
    return {"subset": entry.subset, "user_turns": len(state.finished_turns), "calls": len(state.history)}


def _unknown_name(what: str, name: str, known: Sequence[str]) -> UserError:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return UserError(f"unknown {what} '{name}': did you mean '{nearest[0]}'?")
