"""Mathematics with a Python interpreter: the policy calls ``python``, sees what its code prints, and ends with a box.

An action with tool calls, or else with fenced ```python code, is run; any other action is the final answer, judged by
its last ``\\boxed{}``. Tasks are problems of the kinds math and choice (trace_megatron/problems.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trace_megatron.envs.choice import choice_equal, extract_choice
from trace_megatron.envs.rewards import extract_boxed, math_equal
from trace_megatron.envs.sandbox.pool import Cell, Execution, Limits, Sandbox
from trace_megatron.errors import UserError
from trace_megatron.problems import Problem, choices_text, read_problems, to_train_on
from trace_megatron.rollout.env import Transition
from trace_megatron.rollout.tool_calls import PYTHON_TOOL, ToolCall, parse_action
from trace_megatron.types import Task

SYSTEM = (
    "Solve the problem step by step. You may run Python code{where}; variables stay between runs, and only what is "
    "printed is shown. Put the final answer in \\boxed{{}}."
)
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": PYTHON_TOOL,
        "description": "Run Python code and show what it prints. NumPy and SymPy are installed.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code to run."}},
            "required": ["code"],
        },
    },
}
_EXAMPLES = (  # problem, thought (of plain-text scaffolds), code, what it prints
    (
        "What is the sum of the first 20 odd numbers?",
        "The first 20 odd numbers are 1, 3, ..., 39. I let Python add them.",
        "print(sum(range(1, 40, 2)))",
        "400",
    ),
    ("What is 14 * 23?", "One multiplication; Python does it without a slip.", "print(14 * 23)", "322"),
    (
        "A book costs 12 dollars. What do 7 books and a pen of 3 dollars cost?",
        "7 books cost 12 * 7 dollars, and the pen adds 3.",
        "print(12 * 7 + 3)",
        "87",
    ),
)
_CHOOSE = "The final answer is the letter of the right choice."
_KINDS = ("math", "choice")
_MAX_CALLS = 8  # of one action; more are answered with an error
_FENCE = re.compile(r"```(?:python|py)[ \t]*\n(.*?)```", re.S)


@dataclass(frozen=True, slots=True)
class PythonState:
    """One problem in play; a value, so that several continuations may step from it."""

    answers: tuple[str, ...]
    """Accepted forms of the answer; of a multiple choice, its letter."""
    choices: tuple[str, ...] = ()
    """Of a multiple choice."""
    cells: tuple[Cell, ...] = ()
    """The code that has run."""
    num_errors: int = 0
    num_unrepeated: int = 0
    """Runs before which the earlier code printed something else than at first: it depends on time or on chance."""


class PythonTool:
    """Environment over problems in files, with a sandboxed interpreter for each rollout."""

    def __init__(
        self,
        train: str | Sequence[str] = (),
        validation: str | Sequence[str] = (),
        system: str = "",
        tool_call: bool = True,
        fenced_code: bool = True,
        num_examples: int = 0,
        timeout_s: float = 10.0,
        memory_mib: int = 1024,
        output_characters: int = 4000,
        workers: int = 0,
        sandbox: str = "bubblewrap",
    ) -> None:
        """``train``, ``validation``: paths of JSON Lines files; a problem of both is kept for validation.

        ``system``: the system message, instead of ``SYSTEM``. ``tool_call``: offer the tool to the chat template;
        ``fenced_code``: run fenced code where no tool is called; ``num_examples``: solved problems shown as earlier
        turns, three at most; small models need them to keep to the form.
        ``timeout_s`` (of processor time), ``memory_mib``, ``output_characters``: limits of one run. ``workers``: runs
        at once, 0 for one on each core. ``sandbox``: "bubblewrap", or "unsafe" where the policy may reach the
        machine's files and network. Raises UserError on bad input, and where bubblewrap does not work.
        """
        if sandbox not in ("bubblewrap", "unsafe"):
            raise UserError(f"expected env.params.sandbox to be bubblewrap or unsafe, found '{sandbox}'")
        limits = {"timeout_s": timeout_s, "memory_mib": memory_mib, "output_characters": output_characters}
        for name, limit in limits.items():
            if limit <= 0:
                raise UserError(f"expected env.params.{name} above 0, found {limit}")
        if not 0 <= num_examples <= len(_EXAMPLES):
            raise UserError(f"expected env.params.num_examples from 0 to {len(_EXAMPLES)}, found {num_examples}")
        if not (tool_call or fenced_code):
            raise UserError(
                "expected env.params.tool_call or fenced_code to be true, found both false: nothing could run"
            )
        self._tools = (TOOL,) if tool_call else ()
        self._fenced_code = fenced_code
        system = system or SYSTEM.format(where="" if tool_call else " in ```python blocks")
        self._opening = ({"role": "system", "content": system}, *_examples(tool_call, num_examples))
        held_out = read_problems(validation, "env.params.validation", _KINDS)
        training = to_train_on(read_problems(train, "env.params.train", _KINDS), held_out)
        self._tasks = {"train": list(map(self._task, training)), "validation": list(map(self._task, held_out))}
        self.max_concurrency = workers or os.cpu_count() or 1
        settings = Limits(timeout_s, memory_mib << 20, output_bytes=output_characters)
        self._sandbox = Sandbox(settings, self.max_concurrency, unsafe=sandbox == "unsafe")

    def tasks(self, split: str) -> Sequence[Task]:
        """The split's problems, in the order of the files."""
        if split not in self._tasks:
            raise UserError(f"expected a split of {', '.join(self._tasks)}, found '{split}'")
        return self._tasks[split]

    async def reset(self, task: Task) -> PythonState:
        """A fresh interpreter."""
        return PythonState(tuple(task.payload["answers"]), tuple(task.payload.get("choices", ())))

    async def step(self, state: PythonState, action: str) -> Transition:
        """Run the action's code, or judge its answer."""
        parsed = parse_action(action)
        if parsed.calls or parsed.errors:
            return await self._call(state, parsed.calls, parsed.errors)
        snippets = _FENCE.findall(parsed.content or "") if self._fenced_code else []
        if snippets:
            state, text = await self._run(state, "\n".join(snippets))
            return _observed(state, [_output_message(text)])
        text = parsed.content or ""
        if state.choices:
            answer = extract_choice(text, state.choices)
            right = choice_equal(text, state.answers[0], state.choices)
        else:
            answer = extract_boxed(text)
            right = answer is not None and await asyncio.to_thread(_is_right, text, state.answers)
        return Transition(state, (), float(right), True, _info(state) | {"answer": answer})

    async def close(self) -> None:
        """End the interpreters."""
        await self._sandbox.close()

    async def _call(self, state: PythonState, calls: Sequence[ToolCall], errors: Sequence[str]) -> Transition:
        answers = []
        for number, call in enumerate(calls):
            code = _code(call)
            if call.name != PYTHON_TOOL:
                text = f"Error: expected a call of {PYTHON_TOOL}, found '{call.name}'"
            elif code is None:
                text = 'Error: expected the arguments {"code": "..."}'
            elif number >= _MAX_CALLS:
                text = f"Error: expected at most {_MAX_CALLS} calls at once, found {len(calls)}"
            else:
                state, text = await self._run(state, code)
                answers.append(_tool_message(text))
                continue
            state = replace(state, num_errors=state.num_errors + 1)
            answers.append(_tool_message(text))
        answers += [_tool_message(f"Error: {error}") for error in errors]
        return _observed(replace(state, num_errors=state.num_errors + len(errors)), answers)

    async def _run(self, state: PythonState, code: str) -> tuple[PythonState, str]:
        run: Execution = await self._sandbox.run(state.cells, code)
        text = run.output.rstrip("\n")
        if run.error:
            text += ("\n" if text else "") + f"Error: {run.error}"
        state = replace(
            state,
            cells=run.cells,
            num_errors=state.num_errors + bool(run.error),
            num_unrepeated=state.num_unrepeated + (not run.repeated),
        )
        return state, text or "(nothing was printed)"

    def _task(self, problem: Problem) -> Task:
        payload = {"answers": list(problem.answers)}
        question = problem.question
        if problem.choices:
            payload["choices"] = list(problem.choices)
            question += f"\n\n{choices_text(problem.choices)}\n\n{_CHOOSE}"
        messages = (*self._opening, {"role": "user", "content": question})
        return Task(problem.problem_id, messages, payload, self._tools)


def _examples(tool_call: bool, number: int) -> Iterator[Mapping[str, str]]:
    """Solved problems, in the form that the policy is offered."""
    for problem, thought, code, answer in _EXAMPLES[:number]:
        action, observation = f"```python\n{code}\n```", _output_message(answer)
        if tool_call:
            arguments = json.dumps({"name": PYTHON_TOOL, "arguments": {"code": code}})
            action, observation = f"<tool_call>\n{arguments}\n</tool_call>", _tool_message(answer)
        yield {"role": "user", "content": problem}
        yield {"role": "assistant", "content": action, "thought": thought}
        yield observation
        yield {"role": "assistant", "content": f"The answer is \\boxed{{{answer}}}."}


def _is_right(text: str, accepted: Sequence[str]) -> bool:
    return any(math_equal(text, form) for form in accepted)


def _code(call: ToolCall) -> str | None:
    """The code of a call; models also give it as the arguments themselves."""
    code = call.arguments.get("code") if isinstance(call.arguments, dict) else call.arguments
    return code if isinstance(code, str) else None


def _tool_message(text: str) -> dict[str, str]:
    return {"role": "tool", "name": PYTHON_TOOL, "content": text}


def _output_message(text: str) -> dict[str, str]:
    return {"role": "user", "content": f"```output\n{text}\n```"}


def _observed(state: PythonState, messages: Sequence[Mapping[str, str]]) -> Transition:
    return Transition(state, tuple(messages), 0.0, False, _info(state))


def _info(state: PythonState) -> dict[str, Any]:
    return {
        "num_cells": len(state.cells),
        "num_errors": state.num_errors,
        "num_unrepeated": state.num_unrepeated,
    }
