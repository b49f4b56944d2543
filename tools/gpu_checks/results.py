"""What a check returns, how checks are run one after the other, and the table of their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    SKIP = "skip"


class SkippedError(Exception):
    """Why a check does not apply here."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a check found that holds."""

    detail: str
    measured_ms: float | None = None
    floor_ms: float | None = None
    """What bandwidth or arithmetic alone would take; None where no device's peaks are known."""


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    verdict: Verdict
    detail: str
    seconds: float
    measured_ms: float | None = None
    floor_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """``run`` returns an Outcome, or raises: SkippedError, or whatever says what is wrong."""

    name: str
    run: Callable[[], Outcome]


def run_checks(checks: Iterable[Check], limit_s: float) -> Iterator[Result]:
    """One result per check, each yielded as it comes. After ``limit_s`` the rest is left out."""
    start_s = time.perf_counter()
    for check in checks:
        spent_s = time.perf_counter() - start_s
        if spent_s > limit_s:
            yield Result(check.name, Verdict.SKIP, f"the {limit_s:.0f} s of this part were over", 0.0)
            continue
        yield run_check(check)


def run_check(check: Check) -> Result:
    """A failure is data here: whatever a check raises becomes its result."""
    start_s = time.perf_counter()
    try:
        outcome = check.run()
    except SkippedError as reason:
        return Result(check.name, Verdict.SKIP, str(reason), time.perf_counter() - start_s)
    except Exception as error:
        detail = f"{type(error).__name__}: {' '.join(str(error).split())}"[:2000]
        return Result(check.name, Verdict.FAIL, detail, time.perf_counter() - start_s)
    seconds = time.perf_counter() - start_s
    return Result(check.name, Verdict.PASS, outcome.detail, seconds, outcome.measured_ms, outcome.floor_ms)


def format_result(result: Result) -> str:
    """One line: verdict, name, time over floor, detail."""
    figures = ""
    if result.measured_ms is not None:
        figures = f"{result.measured_ms:9.3f} ms"
        if result.floor_ms is not None:
            figures += f", floor {result.floor_ms:.3f} ms ({result.measured_ms / max(result.floor_ms, 1e-9):.1f}x)"
    return f"{result.verdict:4}  {result.name:<44} {figures:<38} {result.detail}".rstrip()


def summary(results: Sequence[Result]) -> str:
    counts = {verdict: sum(result.verdict == verdict for result in results) for verdict in Verdict}
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
