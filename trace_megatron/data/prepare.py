"""Rows of a data set -> OUT/<name>/{train,validation,eval}.jsonl, with a report of every row that was left out.

A training set loses what cannot be judged, repeats itself or is too long. An evaluation set loses only what cannot be
asked or judged at all, because its figures must be comparable: the rest of its faults are noted in the report.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trace_megatron.data.convert import Row, Unusable, build_problem, faults, row_id
from trace_megatron.data.overlap import NGRAM, SHARE, Overlap, find_overlaps, words
from trace_megatron.data.sources import Source
from trace_megatron.errors import UserError
from trace_megatron.problems import KINDS, Problem, read_problems, to_row

VALIDATION_PROBLEMS = 500
VALIDATION_SHARE = 0.05
"""Of a training set: the problems whose questions have the smallest hashes, at most VALIDATION_PROBLEMS."""
FILES = {"train": ("train", "validation"), "eval": ("eval",)}
"""Split of a source -> the files that it becomes."""

_THREADS = 4  # that wait for the judges of mathematical answers


@dataclass(slots=True)
class Report:
    """What became of the rows of one split."""

    rows: int = 0
    kept: dict[str, int] = field(default_factory=dict)
    """File -> problems."""
    dropped: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> ids of the rows."""
    noted: dict[str, list[str]] = field(default_factory=dict)
    """As ``dropped``, of evaluation problems that were kept all the same."""

    def lines(self, name: str) -> Iterator[str]:
        """For a person, a few ids of each kind."""
        kept = ", ".join(f"{count} {file}" for file, count in self.kept.items())
        yield f"{name}: {self.rows} rows, {kept}"
        for verb, reasons in (("dropped", self.dropped), ("kept, but", self.noted)):
            for reason, ids in reasons.items():
                more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
                yield f"  {verb} {len(ids)}: {reason} ({', '.join(ids[:3])}{more})"


def targets(source: Source, split: str, out: Path) -> list[Path]:
    """The files that the split becomes. Raises UserError for a split that the source lacks, or files that exist."""
    if split not in source.splits:
        raise UserError(f"expected a split of '{source.name}' ({', '.join(source.splits)}), found '{split}'")
    for folder in (out, out / source.name):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"expected a folder at '{folder}', found a file: choose another --out")
    paths = [out / source.name / f"{name}.jsonl" for name in FILES[split]]
    for path in paths:
        if path.exists():
            raise UserError(f"expected no file at '{path}', found one: remove it or choose another --out")
    return paths


def prepare(
    source: Source,
    split: str,
    rows: Iterable[Row],
    out: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Write the files of one split. ``progress``: called with (rows looked at, rows). Raises UserError as ``targets``,
    and where no row is usable; then nothing is written."""
    paths = targets(source, split, out)
    report = Report()
    problems = _build(source, rows, report)
    found = _faults(problems, progress)
    if split == "train":
        problems = _usable(problems, found, report)
        held_out = _held_out(problems)
        training = [problem for problem in problems if problem.problem_id not in held_out]
        parts = [training, [problem for problem in problems if problem.problem_id in held_out]]
    else:
        for problem, reasons in zip(problems, found, strict=True):
            for reason in reasons:
                report.noted.setdefault(reason, []).append(problem.problem_id)
        parts = [problems]
    if not problems:
        reasons = "; ".join(f"{len(ids)} x {reason}" for reason, ids in report.dropped.items()) or "no rows"
        raise UserError(f"expected usable rows for '{source.name}', found none of {report.rows}: {reasons}")
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    report.kept = {path.stem: len(part) for path, part in zip(paths, parts, strict=True)}
    text = json.dumps(dataclasses.asdict(report), indent=1, ensure_ascii=False)
    (paths[0].parent / f"report_{split}.json").write_text(text + "\n", encoding="utf-8")
    for path, part in reversed(list(zip(paths, parts, strict=True))):  # the training file, which is looked for, last
        write_problems(path, part)
    return report


def write_problems(path: Path, problems: Sequence[Problem]) -> None:
    """The file appears whole or not at all."""
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(to_row(problem), ensure_ascii=False) + "\n" for problem in problems)
    partial.rename(path)


def flag_overlaps(out: Path) -> list[Overlap]:
    """Compare all training and validation files below ``out`` with all evaluation files: mark the rows, write
    ``overlap.json``."""
    evaluation = [problem for path in sorted(out.glob("*/eval.jsonl")) for problem in _read(path)]
    pairs = []
    for path in sorted([*out.glob("*/train.jsonl"), *out.glob("*/validation.jsonl")]):
        problems = _read(path)
        found = defaultdict(list)
        for overlap in find_overlaps(problems, evaluation):
            found[overlap.train_id].append(overlap)
            pairs.append(overlap)
        marked = [
            dataclasses.replace(problem, overlaps=tuple(pair.eval_id for pair in found[problem.problem_id]))
            for problem in problems
        ]
        if marked != problems:
            write_problems(path, marked)
    record: dict[str, Any] = {
        "rule": f"the same words, or at least {SHARE:.0%} of the evaluation question's runs of {NGRAM} words",
        "evaluation_problems": len(evaluation),
        "pairs": [dataclasses.asdict(pair) for pair in pairs],
    }
    (out / "overlap.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return pairs


def _read(path: Path) -> list[Problem]:
    return read_problems(str(path), f"'{path}'", KINDS)


def _build(source: Source, rows: Iterable[Row], report: Report) -> list[Problem]:
    problems: dict[str, Problem] = {}
    for number, row in enumerate(rows):
        report.rows += 1
        try:
            problem = build_problem(row, source, number)
        except Unusable as reason:
            report.dropped.setdefault(str(reason), []).append(row_id(row, source, number))
            continue
        if problem.problem_id in problems:
            problem = dataclasses.replace(problem, problem_id=f"{problem.problem_id}#{number}")
        problems[problem.problem_id] = problem
    return list(problems.values())


def _faults(problems: Sequence[Problem], progress: Callable[[int, int], None]) -> list[list[str]]:
    """Of every problem, with the problem that asks the same before it."""
    first: dict[tuple[str, ...], Problem] = {}
    found = []
    with ThreadPoolExecutor(_THREADS) as threads:
        for number, (problem, reasons) in enumerate(zip(problems, threads.map(faults, problems), strict=True), start=1):
            other = first.setdefault((*words(problem.question), "|", *map(str.lower, problem.choices)), problem)
            if other is not problem and set(other.answers) & set(problem.answers):
                reasons = [*reasons, "asked before"]
            elif other is not problem:
                reasons = [*reasons, "asked before, with another answer"]
            found.append(reasons)
            progress(number, len(problems))
    return found


def _usable(problems: Sequence[Problem], found: Sequence[Sequence[str]], report: Report) -> list[Problem]:
    kept = []
    for problem, reasons in zip(problems, found, strict=True):
        if reasons:
            report.dropped.setdefault(reasons[0], []).append(problem.problem_id)
        else:
            kept.append(problem)
    return kept


def _held_out(problems: Sequence[Problem]) -> set[str]:
    """Ids of the validation problems: they depend on the questions alone, not on their order."""
    count = min(VALIDATION_PROBLEMS, int(VALIDATION_SHARE * len(problems)))
    hashes = sorted(
        (hashlib.blake2b(" ".join(words(problem.question)).encode(), digest_size=8).hexdigest(), problem.problem_id)
        for problem in problems
    )
    return {problem_id for _, problem_id in hashes[:count]}
