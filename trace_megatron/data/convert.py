"""A data set's row -> a problem, or the reason why it is none."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from trace_megatron.data.sources import Source
from trace_megatron.envs.rewards import extract_boxed, math_readable
from trace_megatron.problems import LETTERS, Problem

MAX_CHARACTERS = 10_000
"""Of a question to train on; longer ones are tables and program listings."""

Row = Mapping[str, Any]


class Unusable(Exception):
    """The row cannot be asked or judged."""


def build_problem(row: Row, source: Source, number: int) -> Problem:
    """The problem of the ``number``-th row (from 0). Raises Unusable."""
    for column, value in source.required.items():
        found = row.get(column)
        if found is not None and str(found).lower() != str(value).lower():  # a CSV file holds texts
            raise Unusable(f"{column} is {found}, not {value}")
    if any(row.get(column) is not None for column in source.images):
        raise Unusable("needs an image")
    question = _text(_first(row, source.question))
    if not question:
        raise Unusable("no question")
    context = _text(_first(row, source.context))
    if context:
        question = f"{context}\n{question}"
    problem_id = row_id(row, source, number)
    if source.kind == "choice":
        choices, letter = _choice(row, source, problem_id)
        return Problem(problem_id, "choice", question, (letter,), choices)
    return Problem(problem_id, source.kind, question, _answers(row, source))


def row_id(row: Row, source: Source, number: int) -> str:
    """The row's own id, or its number, below the data set's name."""
    own = _text(_first(row, source.id)) or str(number)
    return own if own.startswith(f"{source.name}/") else f"{source.name}/{own}"


def faults(problem: Problem) -> list[str]:
    """What speaks against training on a problem that can be asked and judged."""
    found = []
    if len(problem.question) > MAX_CHARACTERS:
        found.append(f"question longer than {MAX_CHARACTERS} characters")
    if problem.kind == "math" and not any(map(math_readable, problem.answers)):
        found.append("answer cannot be read as mathematics: only the very same text would be right")
    return found


def _first(row: Row, columns: Sequence[str]) -> Any:
    """The first of the columns that holds something."""
    return next((row[column] for column in columns if row.get(column) not in (None, "", [])), None)


def _text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # AMC's answers are floats on the Hub
    return "" if value is None else str(value).strip()


def _answers(row: Row, source: Source) -> tuple[str, ...]:
    found = _first(row, source.answer)
    if found is None:
        boxed = extract_boxed(_text(_first(row, source.solution)))
        if boxed is None:
            raise Unusable("no answer")
        found = boxed
    if isinstance(found, list) and source.kind == "math":  # parts of one answer; OlympiadBench has one text of them all
        found = [", ".join(map(_text, found))]
    answers = [*(found if isinstance(found, list) else [found]), *(_first(row, source.more_answers) or ())]
    texts = [_plain_math(_text(answer)) if source.kind == "math" else _text(answer) for answer in answers]
    if not (texts := [text for text in texts if text]):
        raise Unusable("no answer")
    return tuple(dict.fromkeys(texts))


def _plain_math(answer: str) -> str:
    """Without the dollar signs around all of it, and without a box."""
    boxed = extract_boxed(answer)
    answer = answer if boxed is None else boxed
    inner = re.fullmatch(r"\$([^$]+)\$", answer)
    return inner[1].strip() if inner else answer


def _choice(row: Row, source: Source, problem_id: str) -> tuple[tuple[str, ...], str]:
    """Choices and the right one's letter."""
    right = _text(_first(row, source.answer))
    wrong = [_text(row.get(column)) for column in source.wrong_choices]
    if wrong and all(wrong) and right:
        place = int.from_bytes(hashlib.blake2b(problem_id.encode(), digest_size=8).digest(), "big") % (len(wrong) + 1)
        return (*wrong[:place], right, *wrong[place:]), LETTERS[place]
    given = _first(row, source.choices)
    labels: list[str] = []
    if isinstance(given, Mapping):
        labels, given = list(map(str, given.get("label", ()))), given.get("text")
    texts = [_text(choice) for choice in given or ()]
    index = row.get(source.answer_index[0])
    if index is None:
        if not right:
            raise Unusable("no answer")
        index = _place(right, labels or list(LETTERS[: len(texts)]), texts)
    # MMLU-Pro fills its choices up with N/A
    kept = [number for number, text in enumerate(texts) if text and text != "N/A"]
    if len(kept) < 2 or len(kept) > len(LETTERS):
        raise Unusable(f"{len(kept)} choices")
    if str(index) not in map(str, kept):
        raise Unusable("the answer is none of the choices")
    return tuple(texts[number] for number in kept), LETTERS[kept.index(int(index))]


def _place(right: str, labels: Sequence[str], texts: Sequence[str]) -> int:
    if right in labels:
        return labels.index(right)
    if texts.count(right) == 1:
        return texts.index(right)
    raise Unusable("the answer is none of the choices")
