"""Questions that take several searches to answer: a policy calls the tool ``search`` and then says its answer.

An action with tool calls is answered by passages. An action without one is the answer: what stands between the last
<answer> and </answer>, else behind the last "Answer:", else its last line. The reward is ``rewards.qa_reward``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trace_megatron.envs.rewards import qa_reward
from trace_megatron.errors import UserError
from trace_megatron.problems import Problem, read_problems, to_train_on
from trace_megatron.retrieval.client import RetrievalClient
from trace_megatron.retrieval.index import read_description
from trace_megatron.retrieval.local import LocalServer
from trace_megatron.retrieval.passages import Passage
from trace_megatron.rollout.env import Transition
from trace_megatron.rollout.tool_calls import ToolCall, parse_action
from trace_megatron.types import Task

_SYSTEM = (
    "Answer the question. Look up what you need with the tool `search`; several searches may be necessary, one for "
    "each fact. Then give the final answer, as short as possible and nothing else, between <answer> and </answer>."
)

SEARCH_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Find passages of an encyclopedia.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What to look for."}},
            "required": ["query"],
        },
    },
}


def _search_turn(thought: str, query: str, passage: str) -> tuple[Mapping[str, Any], ...]:
    call = json.dumps({"name": "search", "arguments": {"query": query}})
    return (
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>", "thought": thought},
        {"role": "tool", "name": "search", "content": passage},
    )


# Solved questions in the form that is asked for; passages as `_passage_text` writes them, thoughts for plain text.
_EXAMPLES: tuple[tuple[Mapping[str, Any], ...], ...] = (
    (
        {"role": "user", "content": "Into which sea flows the river on which Vienna lies?"},
        *_search_turn(
            "I need the river on which Vienna lies.",
            "Vienna river",
            "[1] Vienna\nVienna, the capital of Austria, lies on the Danube.",
        ),
        *_search_turn(
            "It is the Danube. Now the sea that it reaches.",
            "Danube mouth",
            "[1] Danube\nThe Danube rises in Germany and ends in the Black Sea.",
        ),
        {"role": "assistant", "content": "<answer>Black Sea</answer>"},
    ),
    (
        {"role": "user", "content": "Do the Nile and the Amazon flow on the same continent?"},
        *_search_turn(
            "I need the continent of each river, the Nile's first.",
            "Nile continent",
            "[1] Nile\nThe Nile flows northwards through north-eastern Africa.",
        ),
        *_search_turn(
            "The Nile is in Africa. Now the Amazon.",
            "Amazon continent",
            "[1] Amazon River\nThe Amazon is the largest river of South America.",
        ),
        {"role": "assistant", "content": "<answer>no</answer>"},
    ),
    (
        {"role": "user", "content": "What is the currency of the country whose capital is Tokyo?"},
        *_search_turn(
            "I need the country whose capital is Tokyo.", "Tokyo capital", "[1] Tokyo\nTokyo is the capital of Japan."
        ),
        *_search_turn(
            "It is Japan. Now its currency.",
            "Japan currency",
            "[1] Economy of Japan\nThe currency of Japan is the yen.",
        ),
        {"role": "assistant", "content": "<answer>yen</answer>"},
    ),
)

_ANSWER_TAG = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.S | re.I)
_MAX_CALLS = 8  # of one action
_QUOTES = "*`\"' "


@dataclass(frozen=True, slots=True)
class RetrievalState:
    """A question in play; a value, so that several continuations may step from it."""

    answers: tuple[str, ...]
    """Any of them is right."""
    num_searches: int = 0


class Retrieval:
    """Environment over question files and an index of passages."""

    def __init__(
        self,
        train: str | Sequence[str] = (),
        validation: str | Sequence[str] = (),
        index: str = "",
        url: str = "",
        num_passages: int = 3,
        max_passage_chars: int = 1200,
        timeout_s: float = 30.0,
        num_examples: int = 0,
        **unknown: Any,
    ) -> None:
        """``train``, ``validation``: files of problems of kind qa (trace_megatron/problems.py).

        ``index``: a folder, for which a server is started here; ``url``: or a server that runs already.
        ``num_passages`` of a search, each cut after ``max_passage_chars``. ``num_examples``: solved questions
        shown as earlier turns, at most 3; small models do not call a tool without them. Raises UserError on bad input.
        """
        if unknown:
            known = ("train", "validation", "index", "url", "num_passages", "max_passage_chars", "timeout_s")
            known += ("num_examples",)
            name = next(iter(unknown))
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise UserError(f"unknown parameter of env.params '{name}': did you mean '{nearest[0]}'?")
        if bool(index) == bool(url):
            raise UserError("expected either env.params.index or env.params.url, found " + ("both" if url else "none"))
        if num_passages < 1 or max_passage_chars < 1 or timeout_s <= 0:
            raise UserError("expected positive env.params num_passages, max_passage_chars and timeout_s")
        if not 0 <= num_examples <= len(_EXAMPLES):
            raise UserError(f"expected env.params.num_examples from 0 to {len(_EXAMPLES)}, found {num_examples}")
        example = [message for messages in _EXAMPLES[:num_examples] for message in messages]
        held_out = read_problems(validation, "env.params.validation", ("qa",))
        training = to_train_on(read_problems(train, "env.params.train", ("qa",)), held_out)
        self._tasks = {
            split: [_task(problem, example) for problem in problems]
            for split, problems in (("train", training), ("validation", held_out))
        }
        self._num_passages, self._max_passage_chars = num_passages, max_passage_chars
        if index:
            read_description(index)
        self._connection = _Connection(index, url, timeout_s)

    def tasks(self, split: str) -> Sequence[Task]:
        """The questions of a split's files."""
        if split not in self._tasks:
            raise UserError(f"expected a split of {', '.join(self._tasks)}, found '{split}'")
        return self._tasks[split]

    async def reset(self, task: Task) -> RetrievalState:
        await self._connection.open()
        return RetrievalState(tuple(task.payload["answers"]))

    async def step(self, state: RetrievalState, action: str) -> Transition:
        """Search, or judge the answer. Raises RetrievalError where the server does not answer."""
        parsed = parse_action(action)
        if not parsed.calls and not parsed.errors:
            answer = extract_answer(parsed.content or "")
            reward = qa_reward(answer, state.answers)
            return Transition(state, (), reward, True, {"answer": answer, "searches": state.num_searches})
        calls = parsed.calls[:_MAX_CALLS]
        contents = await asyncio.gather(*(self._answer(call) for call in calls))
        names = [call.name for call in calls] + ["search"] * len(parsed.errors)
        observation = tuple(
            {"role": "tool", "name": name, "content": content}
            for name, content in zip(names, (*contents, *map(_error_text, parsed.errors)), strict=True)
        )
        state = dataclasses.replace(state, num_searches=state.num_searches + len(calls))
        return Transition(state, observation, 0.0, False, {"searches": state.num_searches})

    async def close(self) -> None:
        """End the connections, and the server if it was started here."""
        await self._connection.close()

    async def _answer(self, call: ToolCall) -> str:
        query = call.arguments.get("query") if isinstance(call.arguments, Mapping) else None
        if call.name != "search":
            return _error_text(f"expected the tool search, found {call.name}")
        if not isinstance(query, str) or not query.strip():
            return _error_text('expected the arguments {"query": "<text>"}')
        client = await self._connection.open()
        passages = await client.search(query, self._num_passages)
        return (
            "\n\n".join(
                _passage_text(number, passage, self._max_passage_chars)
                for number, passage in enumerate(passages, start=1)
            )
            or "No passage was found."
        )


def extract_answer(text: str) -> str:
    """The answer in the text of a final action."""
    if tagged := _ANSWER_TAG.findall(text):
        return tagged[-1].strip()
    _, found, rest = text.rpartition("Answer:")
    lines = (rest if found else text).strip().splitlines() or [""]
    return lines[0 if found else -1].strip(_QUOTES)


class _Connection:
    """A client, and for an index folder the server behind it; opened by the first rollout that needs it."""

    def __init__(self, index: str, url: str, timeout_s: float) -> None:
        self._server = LocalServer(index) if index else None
        self._url, self._timeout_s = url, timeout_s
        self._opening: asyncio.Task[RetrievalClient] | None = None

    async def open(self) -> RetrievalClient:
        """The one client. A server is started once: who gives up waiting leaves it starting, and a failure stays."""
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._start())
        return await asyncio.shield(self._opening)

    async def close(self) -> None:
        if self._opening:
            self._opening.cancel()
            (opened,) = await asyncio.gather(self._opening, return_exceptions=True)
            if isinstance(opened, RetrievalClient):
                await opened.close()
        if self._server:
            await self._server.stop()

    async def _start(self) -> RetrievalClient:
        if self._server is None:
            return RetrievalClient(self._url, timeout_s=self._timeout_s)
        url = await self._server.start()
        return RetrievalClient(url, timeout_s=self._timeout_s, explain=self._server.failure)


def _task(problem: Problem, example: Sequence[Mapping[str, Any]]) -> Task:
    messages = ({"role": "system", "content": _SYSTEM}, *example, {"role": "user", "content": problem.question})
    payload = {"question": problem.question, "answers": list(problem.answers)}
    return Task(problem.problem_id, messages, payload, tools=(SEARCH_TOOL,))


def _passage_text(number: int, passage: Passage, max_chars: int) -> str:
    text = passage.text if len(passage.text) <= max_chars else passage.text[:max_chars].rsplit(" ", 1)[0] + " ..."
    return f"[{number}] {passage.title}\n{text}" if passage.title else f"[{number}] {text}"


def _error_text(message: str) -> str:
    return f"Error: {message}"
