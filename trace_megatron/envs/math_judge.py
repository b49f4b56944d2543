"""A process that compares mathematical answers with math-verify, one JSON line in and one out. Started by math_pool.

It imports nothing of trace_megatron, and holds what a pathological answer could harm: its own time and memory.
"""

from __future__ import annotations

import json
import logging
import re
import resource
import signal
import sys

from math_verify import parse, verify

_MEMORY_BYTES = 2 << 30
# Processor seconds of one judgement, so that a busy machine gives the same rewards as an idle one. After the first an
# exception is raised; arithmetic on huge integers does not see it, and after the second the kernel ends the process.
_SOFT_LIMIT_S = 2.0
_HARD_LIMIT_S = 3.0

_DELIMITERS = ("$", "\\boxed", "\\[", "\\(")
_PROSE = re.compile(r"(?<![\\{A-Za-z])[A-Za-z]{2,}[,:]?\s+[A-Za-z]{2,}")
_PLAIN = re.compile(r"[^\w\\={;,.]*(?:\d[\d,]*(?:\.\d+)?|\.\d+)[^\w\\={;,]*(?:[A-Za-z]{2,})?\.?")
_E_NOTATION = re.compile(r"(?<![A-Za-z\\])(\d+(?:\.\d+)?|\.\d+)\s*[eE]([+-]?\d+)(?![\dA-Za-z])")
_CLOCK = re.compile(r"(?:\\text\{)?\s*(\d{1,2}):(\d{2})(?!\d)\s*(.*)", re.S)
_UNICODE = str.maketrans(
    {
        "\u2212": "-",  # minus sign
        "\u2013": "-",  # en dash
        "\u00d7": "\\times ",
        "·": "\\cdot ",
        "÷": "/",
        "π": "\\pi ",
        "∞": "\\infty ",
        "≤": "\\le ",
        "≥": "\\ge ",
        "\u222a": "\\cup ",
        "°": "^{\\circ}",
        "½": "\\frac{1}{2}",
        "¼": "\\frac{1}{4}",
        "¾": "\\frac{3}{4}",
        "²": "^2",
        "³": "^3",
        "\u00a0": " ",
    }
)


def is_equal(prediction: str, gold: str) -> bool:
    """Whether any reading of the prediction equals one of the gold answer."""
    prediction, gold = _rewritten(prediction), _rewritten(gold)
    clocks = _clock(prediction), _clock(gold)
    if all(clocks):
        return clocks[0] == clocks[1]
    return any(
        verify(_parsed(gold_reading), _parsed(reading), timeout_seconds=None)
        for gold_reading in _readings(gold)
        for reading in _readings(prediction)
    )


def _rewritten(text: str) -> str:
    text = text.translate(_UNICODE).replace("{,}", ",").replace("\\$", "")
    text = re.sub(r"(\d)\.(?=\s*[/*+)])", r"\1", text)  # 1./3
    text = re.sub(r"\^\s*(?:\{\s*\\prime\s*\}|\\prime)", "'", text)
    text = re.sub(r"√\s*(\d+|[A-Za-z]|\([^()]*\))", r"\\sqrt{\1}", text)
    return _E_NOTATION.sub(r"\1 \\times 10^{\2}", text)


def _clock(text: str) -> tuple[int, str, str] | None:
    """A time of day as hours, minutes and the letters of a.m. or p.m."""
    match = _CLOCK.fullmatch(text.strip().strip("$"))
    return (int(match[1]), match[2], re.sub(r"\\text|[^apm]", "", match[3].lower())) if match else None


def _readings(text: str) -> list[str]:
    """What math-verify is given: text that marks its mathematics, or prose, as it is; anything else as mathematics.

    As it is, math-verify would take the last number of an unmarked formula for the whole of it.
    """
    if any(delimiter in text for delimiter in _DELIMITERS) or _PROSE.search(text):
        return [text]
    marked = f"${text.strip()}$"
    return [marked, text] if _PLAIN.fullmatch(text.strip()) else [marked]


def _parsed(text: str) -> list:
    return parse(text, parsing_timeout=None)


class _OutOfTimeError(BaseException):
    """Not an Exception, which the parser would catch."""


def _out_of_time(*_: object) -> None:
    raise _OutOfTimeError


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGVTALRM, _out_of_time)
    logging.disable(logging.CRITICAL)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        prediction, gold = json.loads(line)
        print(json.dumps(_judge(prediction, gold)), flush=True)


def _judge(prediction: str, gold: str) -> bool:
    signal.setitimer(signal.ITIMER_PROF, _HARD_LIMIT_S)  # whose signal, unhandled, ends the process
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, _SOFT_LIMIT_S)
        try:
            return bool(is_equal(prediction, gold))
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except (Exception, _OutOfTimeError):  # whatever the parser raises on nonsense: it is no answer
        return False
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
