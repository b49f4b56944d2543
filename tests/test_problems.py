"""Problem files: the schema, what hand-written files may leave out, and what is refused."""

import json

import pytest

from trace_megatron.errors import UserError
from trace_megatron.problems import Problem, read_problems, to_row, to_train_on

KINDS = ("math", "choice")


def read(tmp_path, *rows, kinds=KINDS):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_problems(str(path), "env.params.train", kinds)


def test_rows_survive_a_round_trip(tmp_path):
    problems = [
        Problem("a", "math", "1 + 1?", ("2", "2.0"), overlaps=("e/1",)),
        Problem("b", "choice", "Which?", ("B",), ("x", "y")),
    ]
    assert read(tmp_path, *map(to_row, problems)) == problems


def test_hand_written_rows_may_be_shorter(tmp_path):
    problems = read(
        tmp_path,
        {"problem": "1 + 1?", "answer": 2},
        {"problem": "1/2?", "answer": ["1/2", "ignored"], "answer_variants": ["0.5", "1/2"]},
        {"question": "Which?", "choices": ["x", "y"], "answer": "A"},
    )
    assert [(p.problem_id, p.kind, p.answers) for p in problems] == [
        ("rows/1", "math", ("2",)),
        ("rows/2", "math", ("1/2", "0.5")),
        ("rows/3", "choice", ("A",)),
    ]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "q"}, "question and answers"),
        ({"question": " ", "answers": ["a"]}, "question and answers"),
        ({"question": "q", "answers": [1]}, "question and answers"),
        ({"question": "q", "answers": ["a"], "kind": "qa"}, "kind math or choice here, found qa"),
        ({"question": "q", "answers": ["C"], "choices": ["x", "y"]}, "the letter of one"),
        ({"question": "q", "answers": ["A"], "kind": "choice"}, "found 0 choices"),
        ([1], "an object in line 1"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, row, words):
    with pytest.raises(UserError, match=words) as error:
        read(tmp_path, row)
    assert "line 1 of" in str(error.value) and "\n" not in str(error.value)


def test_problems_that_are_evaluated_on_are_not_trained_on(capsys):
    same, flagged, good = (
        Problem("a", "math", "same", ("1",)),
        Problem("b", "math", "flagged", ("1",), overlaps=("e/2",)),
        Problem("c", "math", "good", ("1",)),
    )
    assert to_train_on([same, flagged, good], [Problem("v", "math", "same", ("1",))]) == [good]
    assert "2 of 3 problems" in capsys.readouterr().err
