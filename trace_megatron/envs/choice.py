"""Multiple choice: the letter that a text ends with, against the right one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trace_megatron.envs.rewards import extract_boxed, normalize_answer
from trace_megatron.problems import LETTERS

_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathbb|bf|rm)\s*\{([^{}]*)\}")
_LETTER = re.compile(r"(?:(?:option|choice|answer)\s*:?\s*)?\(?\s*([A-Za-z])\s*(?:[).:,\-]|\Z)(.*)", re.S | re.I)
_SAID = re.compile(r"(?i:\banswer\s*(?:is|:)\s*:?\s*(?:option|choice)?)\s*[*_$\"'`]*\(?([A-Z])\)?(?![\w'])")


def choice_equal(text: str, gold: str, choices: Sequence[str]) -> bool:
    """Whether the text chooses the letter ``gold``."""
    return extract_choice(text, choices) == gold


def extract_choice(text: str, choices: Sequence[str]) -> str | None:
    """The letter chosen: in the last box (a letter, or one choice's own text), else behind the last "answer is".

    None where nothing, or more than one choice, can be read.
    """
    boxed = extract_boxed(text)
    if boxed is not None:
        return _letter(boxed, choices)
    said = _SAID.findall(text)
    return said[-1] if said and said[-1] in LETTERS[: len(choices)] else None


def _letter(answer: str, choices: Sequence[str]) -> str | None:
    answer = _WRAPPED.sub(r"\1", answer).strip(" $*\"'`\n")
    match = _LETTER.match(answer)
    if match and match[1].upper() in LETTERS[: len(choices)]:
        letter, rest = match[1].upper(), normalize_answer(match[2])
        if not rest or rest == normalize_answer(choices[LETTERS.index(letter)]):
            return letter  # "B, C" chooses two, and "B) neon" is B only if that is what B says
    plain = normalize_answer(answer)
    same = [letter for letter, choice in zip(LETTERS, choices, strict=False) if normalize_answer(choice) == plain]
    return same[0] if plain and len(same) == 1 else None
