"""Outcomes in [0, 1]: mathematical answers by math-verify and what it misses, short answers by EM and F1."""

from __future__ import annotations

import functools
import re
import string
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal

from trace_megatron.envs.math_pool import MathPool

F1_FLOOR = 0.3
"""F1 below it earns nothing (arXiv 2606.11119, reward of the question-answering setting)."""
_MAX_CHARACTERS = 4_000
"""Of an answer that is looked at; longer ones are cut from the front, as the answer stands last."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_LISTED = re.compile(r"(?:[\s,;$]|\\quad|\\qquad|\\text\{\s*(?:and|or)\s*\}|and|or)*")
_PLAIN_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)")
_NUMBER = re.compile(r"-?\d*\.?\d+")
_ANSWER_IS = re.compile(r"[Aa]nswer is:?\s*(.*)")
_OUTPUT = re.compile(r"```output\n(.*?)(?:```|\Z)", re.S)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def math_equal(prediction: str, gold: str) -> bool:
    """Whether the prediction, an answer or a text that ends in one, is the gold answer in another form.

    Takes a few seconds at most, may be called in any thread. False where no answer can be read, or not in time.
    """
    prediction, gold = _last_answer(prediction)[-_MAX_CHARACTERS:].strip(), gold.strip()
    if not prediction or not gold:
        return False
    if _squeezed(prediction) == _squeezed(gold):
        return True
    if _PLAIN_NUMBER.fullmatch(prediction) and _PLAIN_NUMBER.fullmatch(gold):
        return Decimal(prediction) == Decimal(gold)
    return _pool().is_equal(prediction, gold)


def math_readable(gold: str) -> bool:
    """Whether the judge reads the gold answer as mathematics, so that other forms of it can be right too."""
    gold = gold.strip()
    return bool(gold) and (_PLAIN_NUMBER.fullmatch(gold) is not None or _pool().is_equal(gold, gold))


def extract_boxed(text: str) -> str | None:
    """Content of the last ``\\boxed{...}`` whose braces close; ``\\fbox`` and ``\\boxed 5`` too. None without one."""
    boxes = _boxes(text)
    return boxes[-1][2] if boxes else None


def extract_answer(text: str) -> str:
    """The answer of a solution that need not follow a form, with spaces and trailing zeros taken out.

    What is boxed, or follows "answer is", or was the last output of a program, or else the last number. Empty without.
    Follows what ToRA and Qwen2.5-Math evaluate (arXiv 2309.17452, 2409.12122), so that their figures can be compared.
    """
    _, boxed, rest = text.rpartition("boxed")
    if boxed:
        content = _braced(rest) if rest.startswith("{") else rest.partition("$")[0].strip()
        answer = rest if content is None else content
    elif found := _ANSWER_IS.findall(text):
        answer = found[-1]
    elif outputs := [output.strip() for output in _OUTPUT.findall(text) if output.strip()]:
        answer = outputs[-1].splitlines()[-1]
    else:
        numbers = _NUMBER.findall(text.replace(",", ""))
        answer = numbers[-1] if numbers else ""
    return _cleaned(answer.strip().partition("\n")[0])


def qa_reward(prediction: str, golds: Sequence[str]) -> float:
    """1 for an exact match with any gold answer, else the best F1 if it reaches ``F1_FLOOR``, else 0."""
    if exact_match(prediction, golds):
        return 1.0
    f1 = f1_score(prediction, golds)
    return f1 if f1 >= F1_FLOOR else 0.0


def exact_match(prediction: str, golds: Sequence[str]) -> bool:
    """Equality with any gold answer after SQuAD's normalisation."""
    return any(normalize_answer(prediction) == normalize_answer(gold) for gold in golds)


def f1_score(prediction: str, golds: Sequence[str]) -> float:
    """The best token F1 over the gold answers, as SQuAD defines it."""
    return max((_f1(normalize_answer(prediction), normalize_answer(gold)) for gold in golds), default=0.0)


def hotpot_f1_score(prediction: str, golds: Sequence[str]) -> float:
    """As ``f1_score``, but a yes, no or noanswer on either side counts only if the other side is the same."""
    said = normalize_answer(prediction)
    closed = {"yes", "no", "noanswer"}
    pairs = [(said, normalize_answer(gold)) for gold in golds]
    return max((_f1(*pair) for pair in pairs if pair[0] == pair[1] or not closed & set(pair)), default=0.0)


def normalize_answer(text: str) -> str:
    """Lower case without punctuation, articles and extra spaces (SQuAD, HotpotQA)."""
    without_punctuation = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", without_punctuation).split())


def _f1(prediction: str, gold: str) -> float:
    said, wanted = prediction.split(), gold.split()
    shared = sum((Counter(said) & Counter(wanted)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(said), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """Start, end and content of every box."""
    boxes = []
    for match in _BOX.finditer(text):
        rest = text[match.end() :]
        if rest.startswith("{"):
            content = _braced(rest)
            if content is not None:
                boxes.append((match.start(), match.end() + len(content) + 2, content.strip()))
        elif rest and match.group().endswith(" "):
            content = re.split(r"[\s$]", rest, maxsplit=1)[0]
            boxes.append((match.start(), match.end() + len(content), content))
    return boxes


def _last_answer(text: str) -> str:
    """The last box, together with those that it is listed with; the text itself where it goes on to an answer."""
    boxes = _boxes(text)
    if not boxes or "final answer is" in text[boxes[-1][1] :]:
        return text
    answers = [boxes[-1][2]]
    for before, after in zip(reversed(boxes[:-1]), reversed(boxes), strict=False):
        if not _LISTED.fullmatch(text, before[1], after[0]):
            break
        answers.append(before[2])
    return ", ".join(reversed(answers))


def _braced(text: str) -> str | None:
    """What stands between the brace at the beginning and its partner; None if that one is missing."""
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text, re.S):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if not depth and match.group() == "}":
            return text[1 : match.start()]
    return None


def _squeezed(answer: str) -> str:
    return re.sub(r"\s+|\\[,;!]|\$", "", answer).removesuffix(".")


def _cleaned(answer: str) -> str:
    answer = answer.strip().removeprefix(":").strip().removesuffix(".").removesuffix("/")
    answer = re.sub(r",?\s*\band\b\s*", ",", answer)
    answer = re.sub(r"\s+|\\[!,;]", "", answer).replace("dfrac", "frac").replace("tfrac", "frac").strip("$")
    return re.sub(r"(?<=\d)\.0+(?!\d)", "", answer)


@functools.cache
def _pool() -> MathPool:
    return MathPool()
