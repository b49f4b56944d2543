"""A plain-text scaffold for base models, which know no chat template: ReAct (arXiv 2210.03629), for evaluation only.

    <the system message, the tools, the form>

    Question: Into which sea flows the river on which Vienna lies?
    Thought: I need the river on which Vienna lies.
    Action: search
    Action Input: {"query": "Vienna river"}
    Observation: [1] Vienna ...
    Thought: It is the Danube. ...
    Final Answer: <answer>Black Sea</answer>

The same environments, tools and verifiers serve both scaffolds: an action is translated to what a chat model would have
written. A base model does not stop by itself after its action, so its text is sampled a few tokens at a time until the
scaffold's next word appears.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trace_megatron.errors import UserError
from trace_megatron.rollout.chat import Message, Tool, eos_token_ids, load_tokenizer
from trace_megatron.rollout.engine import Completion, RolloutEngine, SamplingSettings
from trace_megatron.rollout.tool_calls import parse_action

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_ACTION = -1
"""Stands for the end of an action among the ids; no model sees it."""
CHUNK_TOKENS = 32
"""Sampled before the text is looked at; the engine's prefix cache keeps what was read."""

_STOPS = re.compile(r"\nObservation:|\nQuestion:|(?<=Final Answer:)\s*[^\s\n][^\n]*(\n)")
_ACTION = re.compile(r"^[ \t]*Action:[ \t]*([^\n]+?)[ \t]*\n[ \t]*Action Input:[ \t]*(.*)\Z", re.S | re.M)
_FINAL = "Final Answer:"
_FENCE = re.compile(r"\A```\w*\n?(.*?)\n?(?:```)?\Z", re.S)
_FORM = """Use this form:

Question: the question
Thought: what to do next
{tools}Thought: I know the answer.
Final Answer: the answer, in one line"""
_TOOL_FORM = """Action: the tool to use, one of {names}
Action Input: its arguments, as JSON
Observation: what the tool answers
(Thought, Action, Action Input and Observation as often as needed)
"""

_json = json.JSONDecoder(strict=False)


class ReActRenderer:
    """What ChatRenderer is to chat models."""

    stop_token_ids = (END_OF_ACTION,)

    def __init__(self, tokenizer: PreTrainedTokenizerBase, more_eos_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.eos_token_ids = tuple(dict.fromkeys((*own, *more_eos_ids)))
        """Tokens that end a text; sampled by a base model that thinks it is done."""
        self._only_parameter: dict[str, str] = {}

    @classmethod
    def from_folder(cls, folder: str | Path) -> ReActRenderer:
        """Tokenizer and generation config of an HF folder."""
        if not Path(folder).is_dir():
            raise UserError(f"expected an HF model folder, found nothing at '{folder}'")
        return cls(load_tokenizer(folder), eos_token_ids(folder))

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        """Ids of the instructions and the conversation, up to the model's first thought."""
        for tool in tools:
            required = tool["function"]["parameters"].get("required", [])
            if len(required) == 1:
                self._only_parameter[tool["function"]["name"]] = required[0]
        text = "\n".join(filter(None, map(_message_text, messages[_num_system(messages) :])))
        return tuple(self._tokenizer.encode(f"{_instructions(messages, tools)}\n\n{text.strip()}\nThought:"))

    def observation_ids(
        self,
        messages: Sequence[Message],
        action_ids: Sequence[int],
        opening: Sequence[Message] = (),
        tools: Sequence[Tool] = (),
    ) -> tuple[int, ...]:
        """Ids of what answers the action, up to the next thought."""
        text = "\n".join(map(_message_text, messages))
        return tuple(self._tokenizer.encode(f"\n{text}\nThought:", add_special_tokens=False))

    def action_text(self, action_ids: Sequence[int]) -> str:
        """The action as a chat model would have written it: a tool call in JSON, or the final answer."""
        text = self.text(action_ids)
        call = _ACTION.search(text)
        if call and _FINAL not in text[: call.start()]:
            name = call[1].strip("`'\"[]() ")
            arguments = _arguments(call[2].strip(), self._only_parameter.get(name))
            return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        _, found, answer = text.partition(_FINAL)
        return answer.strip() if found else text.strip()

    def text(self, token_ids: Sequence[int]) -> str:
        """What the ids say."""
        ids = [token_id for token_id in token_ids if token_id != END_OF_ACTION]
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def cut(self, token_ids: Sequence[int]) -> tuple[int, ...] | None:
        """The ids up to where the scaffold goes on, None where it does not yet.

        The last token may say more than the action: then its beginning is tokenised again.
        """
        text = self.text(token_ids)
        stop = _STOPS.search(text)
        if stop is None:
            return None
        end = stop.start(1) if stop[1] else stop.start()
        count = len(token_ids)
        while len(self.text(token_ids[:count])) > end:
            count -= 1
        rest = text[len(self.text(token_ids[:count])) : end]
        return (*token_ids[:count], *self._tokenizer.encode(rest, add_special_tokens=False))


class ReActEngine:
    """A RolloutEngine over another one that ends a completion where the scaffold goes on."""

    def __init__(self, engine: RolloutEngine, renderer: ReActRenderer) -> None:
        self._engine = engine
        self._renderer = renderer

    async def generate(
        self, token_ids: Sequence[int], settings: SamplingSettings, seed: int, affinity: str = ""
    ) -> Completion:
        """Sample one action; its last id is END_OF_ACTION unless the limit of tokens ended it."""
        history = [token_id for token_id in token_ids if token_id != END_OF_ACTION]
        limit = max(1, settings.max_new_tokens - 1)
        ids: list[int] = []
        logprobs: list[float] = []
        while len(ids) < limit:
            chunk = await self._engine.generate(
                [*history, *ids],
                replace(
                    settings,
                    max_new_tokens=min(CHUNK_TOKENS, limit - len(ids)),
                    stop_token_ids=self._renderer.eos_token_ids,
                ),
                (seed + len(ids)) % 2**63,
                affinity,
            )
            ids += chunk.token_ids
            logprobs += chunk.logprobs
            kept = self._renderer.cut(ids)
            if kept is None and chunk.stopped:
                kept = tuple(ids[:-1])
            if kept is not None:
                padded = (*logprobs, *(0.0 for _ in kept))[: len(kept)]
                return Completion((*kept, END_OF_ACTION), (*padded, 0.0), True, chunk.weight_version)
        return Completion(tuple(ids), tuple(logprobs), False, chunk.weight_version)


def _instructions(messages: Sequence[Message], tools: Sequence[Tool]) -> str:
    functions = [tool["function"] for tool in tools]
    described = "\n".join(
        f"{function['name']}: {function.get('description', '')} Arguments: {json.dumps(function['parameters'])}"
        for function in functions
    )
    names = ", ".join(function["name"] for function in functions)
    form = _FORM.format(tools=_TOOL_FORM.format(names=names) if functions else "")
    system = [message["content"] for message in messages[: _num_system(messages)]]
    return "\n\n".join(filter(None, [*system, described and f"Tools:\n{described}", form]))


def _num_system(messages: Sequence[Message]) -> int:
    return int(bool(messages) and messages[0].get("role") == "system")


def _message_text(message: Message) -> str:
    match message.get("role"):
        case "assistant":
            return _assistant_text(message)
        case "tool":
            return f"Observation: {message['content']}"
        case _:
            return f"\nQuestion: {message['content']}"


def _assistant_text(message: Message) -> str:
    parsed = parse_action(message["content"])
    if not parsed.calls:
        return (
            f"Thought: {message.get('thought', 'I know the answer.')}\n{_FINAL} {' '.join(message['content'].split())}"
        )
    thought = message.get("thought", parsed.content or f"I use {parsed.calls[0].name}.")
    calls = [f"Action: {call.name}\nAction Input: {json.dumps(call.arguments)}" for call in parsed.calls]
    return "\n".join((f"Thought: {thought}", *calls))


def _arguments(text: str, only_parameter: str | None) -> Mapping[str, Any] | str:
    """JSON at the text's beginning, or all of it as the one parameter that the tool asks for."""
    plain = _FENCE.sub(r"\1", text).strip()
    try:
        value, _ = _json.raw_decode(plain)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    return {only_parameter: plain} if only_parameter else plain
