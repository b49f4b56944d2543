"""Training problems that repeat evaluation problems.

Words are runs of letters and digits in lower case, LaTeX commands included. Two questions are the same where their
words are; a training question contains an evaluation question where at least half of the latter's runs of NGRAM words
occur in it. A question of fewer than MIN_GRAMS runs has to be the same: phrases are as long.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trace_megatron.problems import Problem

NGRAM = 8
MIN_GRAMS = 4
SHARE = 0.5

_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True, slots=True)
class Overlap:
    """One pair."""

    train_id: str
    eval_id: str
    share: float
    """Of the evaluation question's runs of words; 1 where the words are the same."""
    exact: bool


def words(text: str) -> tuple[str, ...]:
    """What two questions are compared by."""
    return tuple(_WORD.findall(text.lower()))


def find_overlaps(training: Iterable[Problem], evaluation: Sequence[Problem]) -> list[Overlap]:
    """All pairs, in the order of ``training``. Choices are not compared: they vary from copy to copy."""
    same: dict[tuple[str, ...], list[int]] = defaultdict(list)
    grams: dict[int, list[int]] = defaultdict(list)
    num_grams = []
    for number, problem in enumerate(evaluation):
        said = words(problem.question)
        same[said].append(number)
        runs = _runs(said)
        num_grams.append(len(runs))
        for run in runs:
            grams[run].append(number)
    return [overlap for problem in training for overlap in _of_problem(problem, evaluation, same, grams, num_grams)]


def _of_problem(
    problem: Problem,
    evaluation: Sequence[Problem],
    same: Mapping[tuple[str, ...], Sequence[int]],
    grams: Mapping[int, Sequence[int]],
    num_grams: Sequence[int],
) -> list[Overlap]:
    said = words(problem.question)
    shared = Counter(number for run in _runs(said) for number in grams.get(run, ()))
    shares = {
        number: count / num_grams[number]
        for number, count in shared.items()
        if num_grams[number] >= MIN_GRAMS and count >= SHARE * num_grams[number]
    }
    exact = set(same.get(said, ()))
    return [
        Overlap(problem.problem_id, evaluation[number].problem_id, round(shares.get(number, 1.0), 3), number in exact)
        for number in sorted(exact | shares.keys())
    ]


def _runs(said: tuple[str, ...]) -> set[int]:
    """Hashes: a large evaluation set has a million runs."""
    return {hash(said[start : start + NGRAM]) for start in range(len(said) - NGRAM + 1)}
