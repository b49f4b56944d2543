"""Data sets from files of every format and from the Hub's Parquet: what is kept, dropped, noted, held out, flagged."""

import csv
import gzip
import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from trace_megatron.data.convert import Unusable, build_problem
from trace_megatron.data.files import read_rows
from trace_megatron.data.hub import read_hub
from trace_megatron.data.overlap import find_overlaps, words
from trace_megatron.data.prepare import flag_overlaps, prepare
from trace_megatron.data.sources import SOURCES
from trace_megatron.errors import UserError
from trace_megatron.problems import KINDS, LETTERS, Problem, read_problems

TOOL = Path(__file__).parents[2] / "tools" / "prepare_data.py"
spec = importlib.util.spec_from_file_location("prepare_data", TOOL)
prepare_data = importlib.util.module_from_spec(spec)
spec.loader.exec_module(prepare_data)

HUB_ROWS = {
    "deepscaler": ({"problem": "1/4+1/4?", "answer": "\\frac12", "solution": ""}, ("\\frac12",), ()),
    "math500": (
        {
            "problem": "1+1?",
            "solution": "\\boxed{2}",
            "answer": "2",
            "subject": "Algebra",
            "unique_id": "test/a/1.json",
        },
        ("2",),
        (),
    ),
    "aime24": ({"id": 60, "problem": "n?", "solution": "s", "answer": "204", "year": "2024"}, ("204",), ()),
    "amc23": ({"id": 0, "question": "n?", "answer": 27.0, "url": "u"}, ("27",), ()),
    "minerva": ({"question": "d?", "answer": "$1.6$"}, ("1.6",), ()),
    "olympiadbench": (
        {
            "id": 1606,
            "question": "How many?",
            "context": "A game.",
            "final_answer": ["$1$", "2"],
            "image_1": None,
            "modality": "Text-only",
            "question_type": "Open-ended",
            "language": "English",
        },
        ("$1$, 2",),
        (),
    ),
    "mmlu_pro": (
        {"question_id": 7, "question": "q?", "options": ["w", "N/A", "x", "y"], "answer": "C", "answer_index": 2},
        ("B",),
        ("w", "x", "y"),
    ),
    "arc_c": (
        {
            "id": "M1",
            "question": "q?",
            "choices": {"text": ["w", "x", "y"], "label": ["1", "2", "3"]},
            "answerKey": "3",
        },
        ("C",),
        ("w", "x", "y"),
    ),
    "hotpotqa": ({"id": "5a", "question": "q?", "answer": "yes", "level": "hard"}, ("yes",), ()),
    "2wiki": ({"id": "dev_0", "question": "q?", "golden_answers": ["Tetisheri"], "metadata": {}}, ("Tetisheri",), ()),
    "musique": (
        {"id": "2hop__1", "question": "q?", "answer": "A B", "answer_aliases": ["B", "A B"], "answerable": True},
        ("A B", "B"),
        (),
    ),
    "bamboogle": ({"Question": "q?", "Answer": "james madison"}, ("james madison",), ()),
}
"""Per data set, a row with the Hub's columns, and the answers and choices that it means."""


@pytest.mark.parametrize("name", HUB_ROWS)
def test_the_hubs_columns_are_understood(name):
    row, answers, choices = HUB_ROWS[name]
    problem = build_problem(row, SOURCES[name], 3)
    assert (problem.kind, problem.answers, problem.choices) == (SOURCES[name].kind, answers, choices)
    assert problem.problem_id.startswith(f"{name}/") and problem.question.endswith("?")


def test_gpqas_right_answers_are_put_anywhere_but_always_at_the_same_place():
    names = ["Correct Answer", *(f"Incorrect Answer {n}" for n in (1, 2, 3))]
    letters = set()
    for number in range(40):
        row = {"Record ID": f"rec{number}", "Question": "q"} | dict(zip(names, "wxyz", strict=True))
        problem = build_problem(row, SOURCES["gpqa"], 0)
        assert sorted(problem.choices) == list("wxyz")
        assert problem.choices[LETTERS.index(problem.answers[0])] == "w"
        assert build_problem(row, SOURCES["gpqa"], 9) == problem
        letters.add(problem.answers[0])
    assert letters == set("ABCD")


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("deepscaler", {"answer": ""}, "no answer"),
        ("deepscaler", {"problem": None}, "no question"),
        ("olympiadbench", {"image_1": {"bytes": "..."}}, "needs an image"),
        ("olympiadbench", {"question_type": "Theorem proof"}, "question_type is Theorem proof, not Open-ended"),
        ("olympiadbench", {"final_answer": None}, "no answer"),
        ("musique", {"answerable": False}, "answerable is False"),
        ("musique", {"answerable": "false"}, "answerable is false"),
        ("arc_c", {"answerKey": "E"}, "none of the choices"),
        ("arc_c", {"choices": {"text": ["w"], "label": ["1"]}, "answerKey": "1"}, "1 choices"),
        ("mmlu_pro", {"answer_index": 1}, "none of the choices"),
        ("mmlu_pro", {"answer_index": "many"}, "none of the choices"),
        ("gpqa", {"Question": "q"}, "no answer"),
    ],
)
def test_an_unusable_row_has_a_reason(name, change, reason):
    row = HUB_ROWS[name][0] if name in HUB_ROWS else {}
    with pytest.raises(Unusable, match=reason):
        build_problem(row | change, SOURCES[name], 0)


def test_an_answer_that_only_the_solution_holds_is_found():
    assert build_problem({"problem": "p", "solution": r"So \boxed{7}."}, SOURCES["minerva"], 0).answers == ("7",)


ROWS = [
    {"id": "1", "question": 'A "quoted" line,\nand a second', "choices": ["w", "x"], "answer": "B"},
    {"id": "2", "question": "é?", "choices": ["w", "x", "y"], "answer": "A"},
]


def write(path: Path, rows=ROWS) -> Path:
    match path.suffixes:
        case [".jsonl"]:
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        case [".jsonl", ".gz"]:
            path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
        case [".json"]:
            path.write_text(json.dumps(rows))
        case [".parquet"]:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        case [".csv"]:
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows({**row, "choices": json.dumps(row["choices"])} for row in rows)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet", "a.csv"])
def test_every_format_holds_the_same(tmp_path, name):
    assert list(read_rows(write(tmp_path / name))) == ROWS
    report = prepare(SOURCES["arc_c"], "eval", read_rows(tmp_path / name), tmp_path / "out")
    assert report.kept == {"eval": 2} and not report.dropped
    problems = read_problems(str(tmp_path / "out" / "arc_c" / "eval.jsonl"), "out", KINDS)
    assert [(p.problem_id, p.question, p.answers) for p in problems] == [
        ("arc_c/1", ROWS[0]["question"], ("B",)),
        ("arc_c/2", "é?", ("A",)),
    ]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a"\n', "JSON in line 2"),
        ("a.jsonl", b"[1]\n", "an object in line 1"),
        ("a.jsonl", b"\xff\xfe", "UTF-8"),
        ("a.jsonl.gz", b"no gzip", "UTF-8 text"),
        ("a.json", b'{"a": ', "JSON in"),
        ("a.json", b'"text"', "a list of objects"),
        ("a.parquet", b"PAR0 nothing", "a Parquet file"),
        ("a.csv", b"a,b\n1\n", "2 cells up to line 2"),
        ("a.csv", b'a,b\n1,"2\n', "CSV"),
        ("a.txt", b"", "a file that ends in .jsonl"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words) as error:
        list(read_rows(tmp_path / name))
    assert name in str(error.value) and "\n" not in str(error.value)


def test_training_sets_lose_their_faults_and_evaluation_sets_note_them(tmp_path):
    rows = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(40)]
    rows += [
        {"problem": "What is  3 + 3 ?", "answer": "6"},
        {"problem": "what is 4 + 4?", "answer": "9"},
        {"problem": "Who is it?", "answer": "It depends on the parity."},
        {"problem": "long " * 3000, "answer": "1"},
        {"problem": "none", "answer": None},
    ]
    report = prepare(SOURCES["deepscaler"], "train", rows, tmp_path)
    assert report.rows == 45 and report.kept == {"train": 38, "validation": 2}
    assert {reason.partition(":")[0]: ids for reason, ids in report.dropped.items()} == {
        "no answer": ["deepscaler/44"],
        "asked before": ["deepscaler/40"],
        "asked before, with another answer": ["deepscaler/41"],
        "answer cannot be read as mathematics": ["deepscaler/42"],
        "question longer than 10000 characters": ["deepscaler/43"],
    }
    assert json.loads((tmp_path / "deepscaler" / "report_train.json").read_text())["dropped"] == report.dropped
    train, validation = (
        {words(p.question) for p in read_problems(str(tmp_path / "deepscaler" / f"{name}.jsonl"), "x", KINDS)}
        for name in ("train", "validation")
    )
    assert len(train) == 38 and len(validation) == 2 and not train & validation
    reordered = prepare(SOURCES["deepscaler"], "train", rows[::-1], tmp_path / "again")
    assert reordered.kept == report.kept
    held_out = read_problems(str(tmp_path / "again" / "deepscaler" / "validation.jsonl"), "x", KINDS)
    assert {words(problem.question) for problem in held_out} == validation

    noted = prepare(SOURCES["minerva"], "eval", rows, tmp_path)
    assert noted.kept == {"eval": 44} and list(noted.dropped) == ["no answer"]
    assert sum(map(len, noted.noted.values())) == 4


def test_overlaps_are_flagged_in_the_training_files(tmp_path):
    text = "A farmer has seventeen sheep and all but nine of them run away one morning: how many sheep are left then?"
    variant = text.replace("farmer", "shepherd")
    prepare(
        SOURCES["deepscaler"],
        "train",
        [{"id": n, "problem": p, "answer": "9"} for n, p in enumerate((text.upper(), variant, "Is 9 left?"))],
        tmp_path,
    )
    prepare(SOURCES["math500"], "eval", [{"unique_id": "s", "problem": text, "answer": "9"}], tmp_path)
    for _ in range(2):  # again, with nothing new
        pairs = flag_overlaps(tmp_path)
        assert [(pair.train_id, pair.eval_id, pair.exact) for pair in pairs] == [
            ("deepscaler/0", "math500/s", True),
            ("deepscaler/1", "math500/s", False),
        ]
    flagged = read_problems(str(tmp_path / "deepscaler" / "train.jsonl"), "x", KINDS)
    assert [problem.overlaps for problem in flagged] == [("math500/s",), ("math500/s",), ()]
    assert len(json.loads((tmp_path / "overlap.json").read_text())["pairs"]) == 2


def test_phrases_are_no_overlap():
    tail = "can be written as m/n where m and n are relatively prime positive integers. Find m + n."
    long = "In triangle ABC the sides are 13, 14 and 15 and the incircle touches BC at the point D. The ratio BD/DC"
    other = "A fair coin is thrown seven times and the heads are counted. The chance of exactly three heads"
    short = "Find m + n where m and n are prime"
    problems = [Problem(str(n), "math", q, ("1",)) for n, q in enumerate((f"{long} {tail}", f"{other} {tail}", short))]
    assert find_overlaps(problems[:1], problems[1:]) == []
    assert [pair.eval_id for pair in find_overlaps(problems[2:], problems)] == ["2"]


def test_the_hubs_parquet_files_are_read_split_by_split(tmp_path, monkeypatch):
    import huggingface_hub

    names = ["default/test/0000.parquet", "default/test/0001.parquet", "default/train/0000.parquet"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"name": name}]), tmp_path / name)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: names)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda _, name, **__: str(tmp_path / name))
    assert [row["name"] for row in read_hub("a/b", "default", "test")] == names[:2]
    with pytest.raises(UserError, match="split 'dev' of the configuration 'default' in 'a/b', found default/test"):
        list(read_hub("a/b", "default", "dev"))


def run_tool(*arguments: str | Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["prepare_data.py", *map(str, arguments)])
        return prepare_data.main()


def test_the_tool_says_what_it_did_and_overwrites_nothing(tmp_path, capsys):
    rows = write(tmp_path / "a.json")
    command = [sys.executable, TOOL, "--out", tmp_path / "out", "arc_c", "--from", rows]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "arc_c eval: 2 rows, 2 eval" in done.stderr and "0 pairs exactly" in done.stderr
    for arguments, part in (
        (("--out", tmp_path / "out", "arc_c", "--from", rows), "expected no file at"),
        (("--out", tmp_path / "new", "arc", "--from", rows), "did you mean 'arc_c'"),
        (("--out", tmp_path / "new", "arc_c", "--from", "nowhere.csv"), "found none at 'nowhere.csv'"),
        (("--out", tmp_path / "new", "math500", "--split", "train"), "a split of 'math500' (eval), found 'train'"),
        (("--out", tmp_path / "new", "hotpotqa", "--from", rows), "hotpotqa train, hotpotqa eval"),
        (("--out", rows, "arc_c", "--from", rows), f"expected a folder at '{rows}', found a file"),
        (("--out", tmp_path / "new", "bamboogle", "--from", write(tmp_path / "n.json", [{"a": 1}])), "1 x no question"),
    ):
        assert run_tool(*arguments) == 2
        sentence = capsys.readouterr().err.strip()
        assert part in sentence and len(sentence.splitlines()) == 1, sentence
        assert not (tmp_path / "new").exists()


def test_without_the_hub_the_remedy_is_a_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert run_tool("--out", tmp_path / "out", "math500") == 2
    sentence = capsys.readouterr().err
    assert "--from" in sentence and "HuggingFaceH4/MATH-500" in sentence and not (tmp_path / "out").exists()


REAL = {
    ("math500", "eval"): ("math/math500.jsonl", 500),
    ("aime24", "eval"): ("math/aime24.jsonl", 30),
    ("amc23", "eval"): ("math/amc23.jsonl", 40),
    ("minerva", "eval"): ("math/minerva_math.jsonl", 60),
    ("olympiadbench", "eval"): ("math/olympiadbench_en_maths_text.jsonl", 60),
    ("hotpotqa", "eval"): ("qa/hotpotqa_dev_500.jsonl", 500),
    ("hotpotqa", "train"): ("qa/hotpotqa_distractor_200.jsonl", 200),
    ("2wiki", "eval"): ("qa/2wikimultihopqa_dev_500.jsonl", 500),
    ("musique", "train"): ("qa/musique_distractor_100.jsonl", 100),
    ("bamboogle", "eval"): ("qa/bamboogle_125.jsonl", 125),
}


def test_real_samples_are_prepared_without_loss_and_known_overlaps_are_found(trace_data, tmp_path):
    for (name, split), (path, count) in REAL.items():
        report = prepare(SOURCES[name], split, itertools.islice(read_rows(trace_data / path), count), tmp_path)
        assert report.rows == sum(report.kept.values()) == count, (name, report)
    rows = list(read_rows(trace_data / "math" / "deepscaler_aime_train.jsonl"))
    report = prepare(SOURCES["deepscaler"], "train", rows, tmp_path)
    assert sum(report.kept.values()) == 975
    known = {row["id"] for row in rows if row.get("overlaps_eval")}
    found = [pair for pair in flag_overlaps(tmp_path) if pair.train_id.startswith("deepscaler/")]
    assert {pair.train_id for pair in found if pair.exact} == known and len(known) == 6
    assert {pair.train_id for pair in found} - known == {"deepscaler/aime/454", "deepscaler/aime/744"}
