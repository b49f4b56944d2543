"""Tool calls in what a model wrote: Hermes/Qwen ``<tool_call>`` blocks and Llama's forms, tolerant of small faults.

A call is a JSON object with a name and arguments (or parameters). Nothing here evaluates text: JSON, or Python literals
where a model wrote a Python dict.

    <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>     Hermes, Qwen; several, text around them
    {"name": "f", "parameters": {"x": 1}}                           Llama 3.x; the end of the text
    <|python_tag|>{...}  <|python_tag|>f.call(x=1)  <|python_tag|>print(1)
    <function=f>{"x": 1}</function>                                 Llama 3.1's custom form
    [f(x=1), g()]                                                   Llama 3.2 and 4, the whole text
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from typing import Any

PYTHON_TOOL = "python"
"""Name of the call that raw code behind Llama's python tag becomes; its argument is ``code``."""

_TAG = re.compile(r"<think>|<tool_call>|<\|python_tag\|>|<function=(?P<function>[\w.-]+)>")
_BLOCK_END = re.compile(r"</tool_call>|</function>|(?=<tool_call>|<function=)|\Z")
_CLOSING = re.compile(r"[\s;}]*(?:```)?\s*(?:</tool_call>|</function>)?")  # some models close one brace too many
_BETWEEN = re.compile(r"[\s;,]*")
_SPACE = re.compile(r"\s*")
_FENCE = re.compile(r"\s*(?:```(?:json|tool_call)?[ \t]*\n)?\s*")
_BARE = re.compile(
    r"^[ \t]*(?:```(?:json|tool_call)?[ \t]*\n[ \t]*)?"
    r"(?=(?:\[\s*)?\{\s*\"(?:name|type|function|arguments|parameters)\")",
    re.M,
)
_PYTHONIC = re.compile(r"\[\s*[A-Za-z_][\w.]*\(.*\)\s*\]", re.S)
_BUILTIN = re.compile(r"([A-Za-z_]\w*)\.call\((.*)\)\s*\Z", re.S)
_MAX_PYTHONIC = 20_000  # characters; Python's parser is slow on long nonsense

_json = json.JSONDecoder(strict=False)  # raw newlines in strings: models write code that way


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call; ``arguments`` is what stood there, a mapping unless the model wrote something else."""

    name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class ParsedAction:
    """What an action's text holds beside its thoughts."""

    content: str | None
    """The text outside the calls; None without any. Blocks that could not be read stay in it."""
    calls: tuple[ToolCall, ...]
    errors: tuple[str, ...]
    """One sentence for each block that could not be read, to be answered as an observation."""


def parse_tool_calls(text: str) -> tuple[str | None, list[ToolCall]]:
    """Content and calls of an action; ``parse_action`` also tells which blocks could not be read."""
    parsed = parse_action(text)
    return parsed.content, list(parsed.calls)


def parse_action(text: str) -> ParsedAction:
    """Content, calls and faults of an action; thoughts (``<think>``, also one that the prompt opened) are left out."""
    thought, closed, rest = text.partition("</think>")
    if closed and "<think>" not in thought:  # the prompt had opened it
        text = rest.lstrip()
    calls: list[ToolCall] = []
    errors: list[str] = []
    pieces: list[str] = []
    position = 0
    while tag := _TAG.search(text, position):
        pieces.append(text[position : tag.start()])
        if tag.group() == "<think>":
            position = _end_of_thought(text, tag.end())
            continue
        try:
            found, position = _read_block(text, tag)
            calls += found
        except _BadCallError as error:
            errors.append(str(error))
            position = _BLOCK_END.search(text, tag.end()).end()
            pieces[-1] += text[tag.start() : position]
    pieces.append(text[position:])
    if calls:
        content = "\n".join(piece.strip() for piece in pieces if piece.strip())
        return ParsedAction(content or None, tuple(calls), tuple(errors))
    content = "".join(pieces)
    if errors:
        return ParsedAction(content, (), tuple(errors))
    return _parse_bare(content) or ParsedAction(content or None, (), ())


def _end_of_thought(text: str, start: int) -> int:
    """Where the text goes on. A thought without an end takes all that follows: a call inside it was never made."""
    end = text.find("</think>", start)
    if end < 0:
        return len(text)
    return _SPACE.match(text, end + len("</think>")).end()


def _read_block(text: str, tag: re.Match[str]) -> tuple[list[ToolCall], int]:
    """Calls behind a tag, and where their block ends."""
    start = _FENCE.match(text, tag.end()).end()
    if tag.group() == "<|python_tag|>":
        return _read_python_tag(text, start), len(text)
    values, end = _read_values(text, start)
    if not values:
        value, end = _read_literal(text, start)
        values = [value]
    if tag["function"]:
        return [ToolCall(tag["function"], _decoded(values[0]))], _CLOSING.match(text, end).end()
    return [_as_call(value) for value in values], _CLOSING.match(text, end).end()


def _read_python_tag(text: str, start: int) -> list[ToolCall]:
    values, end = _read_values(text, start)
    if values and not text[end:].strip(" \n\t;}`"):
        return [_as_call(value) for value in values]
    if builtin := _BUILTIN.match(text, start):
        calls = _pythonic_calls(f"[{builtin[1]}({builtin[2]})]")
        if calls:
            return calls
    return [ToolCall(PYTHON_TOOL, {"code": text[start:].strip()})]


def _parse_bare(text: str) -> ParsedAction | None:
    """Calls without a tag: JSON at the end of the text, or a list of Python calls; None if there is neither."""
    if _PYTHONIC.fullmatch(text.strip()):
        calls = _pythonic_calls(text.strip())
        return ParsedAction(None, tuple(calls), ()) if calls else None
    opening = _BARE.search(text)
    if not opening:
        return None
    values, end = _read_values(text, opening.end())
    if not values:
        whole = not text[: opening.start()].strip() and re.search(r'"(?:arguments|parameters)"', text)
        return ParsedAction(text, (), (_not_json(text, opening.end()),)) if whole else None
    is_call = all(isinstance(value, dict) and _has_name_and_arguments(value) for value in values)
    if not is_call or text[end:].strip(" \n\t;}`"):
        return None
    return ParsedAction(text[: opening.start()].strip() or None, tuple(_as_call(value) for value in values), ())


def _read_values(text: str, start: int) -> tuple[list[Any], int]:
    """JSON values that follow each other, lists taken apart; none if the first cannot be read."""
    values: list[Any] = []
    end = start
    while True:
        begin = _BETWEEN.match(text, end).end() if values else end
        if not text.startswith(("{", "["), begin):
            return values, end
        try:
            value, end = _json.raw_decode(text, begin)
        except (ValueError, RecursionError):
            return values, end
        values += value if isinstance(value, list) else [value]


def _read_literal(text: str, start: int) -> tuple[Any, int]:
    """A Python literal, for models that write single quotes, True or None; raises _BadCallError."""
    end = _BLOCK_END.search(text, start).start()
    try:
        return ast.literal_eval(text[start:end].strip().removesuffix("```")), end
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        raise _BadCallError(_not_json(text, start)) from None


def _not_json(text: str, start: int) -> str:
    try:
        _json.raw_decode(text, start)
        reason = "it is followed by something else"
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at character {error.pos - start}"
    except RecursionError:
        reason = "it is nested too deeply"
    return f'expected a tool call as JSON {{"name": ..., "arguments": {{...}}}}, found something else: {reason}'


def _has_name_and_arguments(value: dict[str, Any]) -> bool:
    call = value["function"] if isinstance(value.get("function"), dict) else value
    return isinstance(call.get("name"), str) and ("arguments" in call or "parameters" in call)


def _as_call(value: Any) -> ToolCall:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):  # OpenAI's form
        value = value["function"]
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        raise _BadCallError(f'expected a tool call with a "name", found {str(value)[:80]}')
    arguments = value.get("arguments", value.get("parameters"))
    return ToolCall(name, {} if arguments is None else _decoded(arguments))


def _decoded(arguments: Any) -> Any:
    """Arguments that were serialised twice, once decoded; a text that is no JSON container stays a text."""
    if not isinstance(arguments, str) or not arguments.strip().startswith(("{", "[")):
        return arguments
    try:
        return json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return arguments


def _pythonic_calls(text: str) -> list[ToolCall]:
    """Calls of ``[f(x=1), g()]`` whose arguments are keywords with literal values; empty if it is anything else."""
    if len(text) > _MAX_PYTHONIC:
        return []
    try:
        tree = ast.parse(text, mode="eval").body
        calls = []
        for call in tree.elts if isinstance(tree, ast.List) else ():
            if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
                return []
            calls.append(
                ToolCall(
                    ast.unparse(call.func), {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
                )
            )
        return calls
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return []


class _BadCallError(Exception):
    """A block that holds no readable call."""
