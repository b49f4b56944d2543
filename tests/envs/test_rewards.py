"""Rewards against recorded judgements, and against answers that would stop a careless judge."""

from __future__ import annotations

import json
import resource
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_megatron.envs.math_pool import MathPool
from trace_megatron.envs.rewards import (
    exact_match,
    extract_answer,
    extract_boxed,
    f1_score,
    hotpot_f1_score,
    math_equal,
    normalize_answer,
    qa_reward,
)

DOCS = Path(__file__).parents[2] / "docs" / "grading.md"


def cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def read_rows(trace_data: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (trace_data / "grading" / name).read_text().splitlines()]


def test_recorded_maths_judgements_agree_and_each_difference_is_documented(trace_data):
    rows = read_rows(trace_data, "math_triples.jsonl") + read_rows(trace_data, "math_triples_model_outputs.jsonl")
    with ThreadPoolExecutor(4) as threads:
        judged = list(threads.map(lambda row: math_equal(row["pred"], row["gold"]), rows))
    wrong = [row["id"] for row, equal in zip(rows, judged, strict=True) if equal != row["expected"]]
    documented = DOCS.read_text()
    assert [row_id for row_id in wrong if f"`{row_id}`" not in documented] == []
    for expected in (True, False):
        group = [(row["id"], equal) for row, equal in zip(rows, judged, strict=True) if row["expected"] == expected]
        agreed = sum(equal == expected for _, equal in group)
        print(f"expected {expected}: {agreed} of {len(group)} agree")
        assert len(group) > 100 and agreed >= 0.96 * len(group)


def test_recorded_extractions_are_all_equal(trace_data):
    rows = read_rows(trace_data, "boxed_extraction.jsonl")
    assert rows and [row["id"] for row in rows if extract_answer(row["text"]) != row["expected"]] == []


def test_recorded_qa_scores_are_all_equal(trace_data):
    rows = read_rows(trace_data, "qa_em_f1.jsonl")
    scored = [row for row in rows if "em" in row]
    assert len(scored) > 100 and len(rows) > len(scored)
    for row in rows:
        assert normalize_answer(row["pred"]) == row["norm_pred"], row["id"]
    for row in scored:
        pred, golds = row["pred"], row["golds"]
        assert exact_match(pred, golds) == bool(row["em"]), row["id"]
        assert f1_score(pred, golds) == pytest.approx(row["f1"], abs=1e-4), row["id"]
        assert hotpot_f1_score(pred, golds) == pytest.approx(row["f1_hotpot"], abs=1e-4), row["id"]
        expected = 1.0 if row["em"] else row["f1"] if row["f1"] >= 0.3 else 0.0
        assert qa_reward(pred, golds) == pytest.approx(expected, abs=1e-4), row["id"]


@pytest.mark.parametrize(
    ("prediction", "gold", "equal"),
    [
        ("1,234", "1234", True),
        ("1,2", "12", False),
        ("(1,2)", "(2,1)", False),
        ("1, 2", "2, 1", True),
        ("½", "0.5", True),
        ("√2", "\\sqrt{2}", True),
        ("2π", "2\\pi", True),
        ("\u22125", "-5", True),
        ("x=5", "5", True),
        ("90°", "90", True),
        ("\\$5", "5", True),
        ("12 apples", "12", True),
        ("\\text{Friday}", "Friday", True),
        ("Friday", "Monday", False),
        ("(3, \\frac{\\pi}{2})", "\\left( 3, \\frac{\\pi}{2} \\right)", True),
        ("1\\frac{1}{2}", "1.5", True),
        ("p - q", "q - p", False),
        ("[2,5)", "(2,5)", False),
        ("x + y = 0", "5x - 7y = 0", False),
        ("4:30", "4:30 p.m.", False),
        ("3e8", "3 \\times 10^{8}", True),
        ("2e", "2", False),
        ("0.333", "1/3", False),
        ("I think that it is \\boxed{\\frac{14}{3}}.", "14/3", True),
        ("first \\boxed{3}, no, \\boxed{4}", "3", False),
        ("first \\boxed{3}, no, \\boxed{4}", "4", True),
        ("\\boxed{3} or \\boxed{4}", "4", False),
        ("\\boxed{3} and $\\boxed{4}$", "\\{3, 4\\}", True),
        ("\\boxed{3} is near. The final answer is $4$. I hope it is correct.", "4", True),
        ("The final answer is $4$. I hope it is correct. \\boxed{3}", "4", False),
        ("5.0", "5", True),
        ("5.001", "5", False),
        ("", "5", False),
        ("\\frac", "5", False),
        ("\ud800", "5", False),
        ("5", "", False),
        ("__import__('os').system('true')", "0", False),
    ],
)
def test_math_equal(prediction, gold, equal):
    assert math_equal(prediction, gold) is equal


def test_pathological_answers_take_a_limited_time():
    pool = MathPool(num_judges=1)
    try:
        assert pool.is_equal("1/2", "0.5")  # started
        used_s = cpu_seconds_of_children()
        for nonsense in ("9^{9^{9^{9^9}}}+1", "((x+1)^{9999}+1)^{9999}"):
            assert not pool.is_equal(nonsense, "9^{9^{9^9}}")
        assert pool.is_equal("1/2", "0.5")
    finally:
        pool.close()
    assert cpu_seconds_of_children() - used_s < 2 * 7


def test_a_judge_that_hangs_or_dies_is_replaced():
    pool = MathPool(num_judges=1)
    try:
        assert pool.is_equal("1/2", "0.5")
        (judge,) = pool._idle
        judge.send_signal(signal.SIGSTOP)
        pool._timeout_s = 0.1
        assert not pool.is_equal("1/2", "0.5") and judge.returncode == -signal.SIGKILL
        pool._timeout_s = 60.0
        assert pool.is_equal("1/2", "0.5")
        (judge,) = pool._idle
        judge.kill()
        judge.wait()
        assert pool.is_equal("1/2", "0.5")
    finally:
        pool.close()


def test_judges_serve_any_thread():
    assert threading.current_thread() is threading.main_thread()
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda n: math_equal(f"\\frac{{{2 * n}}}{{4}}", f"{n}/2"), range(1, 33)))


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("so \\boxed{12}.", "12"),
        ("\\boxed{1} and \\boxed{ \\frac{1}{2} }", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\text{a}} then \\boxed{unfinished {", "\\text{a}"),
        ("\\fbox{3}", "3"),
        ("\\boxed 5$", "5"),
        ("\\boxed{}", ""),
        ("boxed {3}", None),
        ("nothing", None),
    ],
)
def test_extract_boxed(text, content):
    assert extract_boxed(text) == content


@given(st.text(alphabet="\\boxed{} 1$", max_size=60))
def test_extraction_never_fails(text):
    extract_answer(text)
    content = extract_boxed(text)
    assert content is None or content in text


words = st.lists(st.sampled_from(["yes", "no", "the", "river", "Red", "red!", "1,0"]), max_size=5).map(" ".join)


@given(words, st.lists(words, min_size=1, max_size=3))
def test_qa_reward_is_monotone_and_bounded(prediction, golds):
    reward = qa_reward(prediction, golds)
    assert reward == 1.0 or reward == 0.0 or 0.3 <= reward < 1.0 or f1_score(prediction, golds) == reward
    assert hotpot_f1_score(prediction, golds) <= f1_score(prediction, golds)
    assert qa_reward(golds[0], golds) == 1.0
    assert qa_reward(prediction, [*golds, prediction]) == 1.0
