"""Problems on disk: JSON Lines of one schema, which tools/prepare_data.py writes and the environments read.

    {"id": "math500/1", "kind": "math", "question": "What is 1/4 + 1/4?", "answers": ["\\\\frac{1}{2}", "0.5"]}
    {"id": "arc_c/7", "kind": "choice", "question": "Which is a gas?", "choices": ["iron", "neon"], "answers": ["B"]}
    {"id": "hotpotqa/3", "kind": "qa", "question": "Which river ...?", "answers": ["Danube", "the Danube"]}

Any of ``answers`` is right. Hand-written files may leave out id and kind, and say ``problem`` for the question and
``answer`` (text, number, or a list of which the first counts) with optional ``answer_variants`` for the answers.
``overlaps``, where present, names evaluation problems that are the same: such a problem is not trained on.
"""

from __future__ import annotations

import json
import string
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trace_megatron.errors import UserError
from trace_megatron.log import say

KINDS = ("math", "choice", "qa")
LETTERS = string.ascii_uppercase
"""Of the choices, in their order."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One row."""

    problem_id: str
    kind: str
    """One of KINDS: how an answer is judged."""
    question: str
    answers: tuple[str, ...]
    """Accepted answers; of a choice, its letter."""
    choices: tuple[str, ...] = ()
    """Texts of the choices, empty for the other kinds."""
    overlaps: tuple[str, ...] = ()
    """Ids of evaluation problems that it repeats."""


def to_row(problem: Problem) -> dict[str, Any]:
    """JSON values of a row; empty fields are left out."""
    row = {"id": problem.problem_id, "kind": problem.kind, "question": problem.question}
    optional = {"choices": problem.choices, "answers": problem.answers, "overlaps": problem.overlaps}
    return row | {name: list(values) for name, values in optional.items() if values}


def read_problems(paths: str | Sequence[str], option: str, kinds: Collection[str]) -> list[Problem]:
    """The problems of one or several files, of the first of ``kinds`` where a row says nothing else.

    Raises UserError, which names ``option``, for a missing file, a row that is no problem, a kind that is not in
    ``kinds``, or an id that occurs twice.
    """
    problems: dict[str, Problem] = {}
    for path in map(Path, [paths] if isinstance(paths, str) and paths else paths):
        for number, row in _rows(path, option):
            problem = _parse(row, f"{path.stem}/{number}", f"line {number} of '{path}'", kinds)
            if problem.problem_id in problems:
                raise UserError(
                    f"expected a different id in each row at {option}, found '{problem.problem_id}' twice: name the "
                    "rows otherwise, or leave the ids out"
                )
            problems[problem.problem_id] = problem
    return list(problems.values())


def to_train_on(problems: Sequence[Problem], held_out: Sequence[Problem]) -> list[Problem]:
    """The problems without those that are held out or repeat an evaluation problem; says how many are left out."""
    questions = {problem.question for problem in held_out}
    kept = [problem for problem in problems if not problem.overlaps and problem.question not in questions]
    if len(kept) < len(problems):
        say(
            f"{len(problems) - len(kept)} of {len(problems)} problems to train on are left out: they are validation "
            "problems too, or overlap with an evaluation set"
        )
    return kept


def choices_text(choices: Sequence[str]) -> str:
    """The choices as lines with their letters."""
    return "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False))


def _rows(path: Path, option: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    if not path.is_file():
        raise UserError(f"expected a JSON Lines file at {option}, found none at '{path}'")
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"expected JSON in line {number} of '{path}', found: {error}") from error
        if not isinstance(row, dict):
            raise UserError(f"expected an object in line {number} of '{path}', found {line[:80]}")
        yield number, row


def _parse(row: Mapping[str, Any], default_id: str, where: str, kinds: Collection[str]) -> Problem:
    question = row.get("question", row.get("problem"))
    answers = _answers(row)
    if not isinstance(question, str) or not question.strip() or not answers:
        raise UserError(
            f"expected the fields question and answers (or problem and answer) in {where}, found {json.dumps(row)[:80]}"
        )
    choices = tuple(map(str, row.get("choices", ())))
    kind = row.get("kind", "choice" if choices else next(iter(kinds)))
    if kind not in kinds:
        raise UserError(f"expected problems of kind {' or '.join(kinds)} here, found {kind} in {where}")
    if kind == "choice" and (len(choices) < 2 or answers[0] not in LETTERS[: len(choices)] or len(answers) > 1):
        raise UserError(
            f"expected two choices or more (26 at most) and the letter of one as the answer in {where}, found "
            f"{len(choices)} choices and {list(answers)}"
        )
    return Problem(
        problem_id=str(row.get("id", default_id)),
        kind=kind,
        question=question.strip(),
        answers=answers,
        choices=choices,
        overlaps=tuple(row.get("overlaps", ())),
    )


def _answers(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Accepted answers as texts, each once; empty where there is none."""
    if isinstance(row.get("answers"), list):
        found = row["answers"]
        if not all(isinstance(answer, str) for answer in found):
            return ()
    else:
        answer = row.get("answer")
        first = answer[0] if isinstance(answer, list) and answer else answer
        if first in (None, [], ""):
            return ()
        found = [first, *row.get("answer_variants", ())]
    return tuple(dict.fromkeys(str(answer) for answer in found if str(answer).strip()))
