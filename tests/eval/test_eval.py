"""`trace-megatron eval` through the command line with a real engine: killed, gone on with, repeated, refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from answering_policy import teach_answers
from tiny_models import build_tokenizer, write_tiny_model

from trace_megatron.cli import main
from trace_megatron.config import load_config
from trace_megatron.envs.python_tool import PythonTool
from trace_megatron.errors import UserError
from trace_megatron.eval import evaluate_policy
from trace_megatron.eval.benchmarks import plan_benchmarks
from trace_megatron.eval.records import Record, RecordFile
from trace_megatron.eval.table import describe_summaries, summarize
from trace_megatron.rollout.engine import Completion
from trace_megatron.types import RolloutStatus

NUM_PROBLEMS, SAMPLES = 40, 3
PARAMS = {"system": "Choose.", "tool_call": False, "sandbox": "unsafe", "workers": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A policy that boxes a letter, problems with letters for answers, and a configuration."""
    folder = tmp_path_factory.mktemp("eval")
    rows = [
        {"id": f"q{n}", "question": f"Item {n}?", "choices": ["one", "two"], "answers": ["AB"[n % 2]]}
        for n in range(NUM_PROBLEMS)
    ]
    rows.append({"id": "long", "question": "Item " * 100, "choices": ["one", "two"], "answers": ["A"]})
    (folder / "data" / "arc_c").mkdir(parents=True)
    for path in (folder / "data" / "arc_c" / "eval.jsonl", folder / "again.jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = write_tiny_model(folder / "model", family="qwen3", tied=False, head_dim=32)
    tasks = PythonTool(validation=str(folder / "again.jsonl"), **PARAMS).tasks("validation")[:NUM_PROBLEMS]
    teach_answers(model, tasks, [rf"\boxed{{{'AB'[n // 2 % 2]}}}" for n in range(NUM_PROBLEMS)])
    values = {
        "run": {"output_dir": str(folder / "runs"), "seed": 3},
        "policy": {"model": str(model)},
        "rollout": {"max_turns": 2, "max_new_tokens": 24, "max_prompt_tokens": 200, "max_response_tokens": 200},
        "engine": {"dtype": "float32", "max_num_seqs": 2, "kv_cache_gib": 0.25},
        "env": {"name": "python_tool", "params": {**PARAMS, "validation": str(folder / "again.jsonl")}},
        "validation": {"prompts": 4, "samples": 2, "temperature": 0.7},
        "eval": {"data": str(folder / "data"), "samples": SAMPLES, "benchmarks": ["arc_c"]},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return folder


def command(folder: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "trace_megatron.cli", "eval", "-c", str(folder / "config.yaml"), *overrides]


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def killed(folder) -> Path:
    """The records of an evaluation that was killed half-way, in the middle of a line."""
    records = folder / "runs" / "eval" / "model" / "arc_c" / "records.jsonl"
    with (folder / "killed.log").open("w") as log:
        process = subprocess.Popen(command(folder), start_new_session=True, stderr=log)
        deadline = time.monotonic() + 480
        while time.monotonic() < deadline and process.poll() is None:
            if records.is_file() and records.read_bytes().count(b"\n") > 5:
                break
            time.sleep(0.002)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    count = records.read_bytes().count(b"\n")
    assert 5 < count < NUM_PROBLEMS * SAMPLES, (count, (folder / "killed.log").read_text())
    shutil.copy(records, folder / "before.jsonl")
    with records.open("a") as file:
        file.write('{"prompt_id": "q1", "sam')
    return records


@pytest.fixture(scope="module")
def finished(folder, killed) -> subprocess.CompletedProcess:
    """The same command again, with two more benchmarks: the same problems in another file, and the run's own split."""
    benchmarks = f"eval.benchmarks=[arc_c, {folder}/again.jsonl, validation]"
    done = subprocess.run(command(folder, benchmarks), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def test_a_killed_evaluation_goes_on(folder, killed, finished):
    before, after = read(folder / "before.jsonl"), read(killed)
    assert len(after) == (NUM_PROBLEMS + 1) * SAMPLES
    for record in before:  # as they were; the rest is new
        assert record in after
    places = [(record["prompt_id"], record["sample"]) for record in after]
    expected = [f"q{n}" for n in range(NUM_PROBLEMS)] + ["long"]
    assert places == [(name, k) for name in expected for k in range(SAMPLES)]


def test_the_same_seeds_give_the_same_records(folder, killed, finished):
    again = folder / "runs" / "eval" / "model" / "again" / "records.jsonl"
    assert again.read_bytes() == killed.read_bytes()
    assert len({record["text"] for record in read(again)}) > 1


def test_records_and_table_agree(folder, killed, finished):
    records = read(killed)
    assert {record["reward"] for record in records} == {0.0, 1.0}  # else nothing below would be seen
    by_prompt = [[r["reward"] for r in records if r["prompt_id"] == name] for name in {r["prompt_id"] for r in records}]
    means = [sum(rewards) / SAMPLES for rewards in by_prompt]
    mean = sum(means) / len(means)
    error = (sum((m - mean) ** 2 for m in means) / (len(means) - 1) / len(means)) ** 0.5
    passed = sum(any(rewards) for rewards in by_prompt) / len(means)
    rows = {line.split()[0]: line.split() for line in finished.stdout.splitlines()}
    assert rows["arc_c"][1:5] == [str(len(means)), str(SAMPLES), f"{100 * mean:.2f}", f"{100 * error:.2f}"]
    assert rows["arc_c"][5:7] == [f"{100 * mean:.2f}", f"{100 * passed:.2f}"]
    assert rows["again"][1:] == rows["arc_c"][1:] and rows["validation"][1:3] == ["4", str(SAMPLES)]
    for record in records:
        if record["status"] == "finished" and record["answer"]:
            right = record["answer"] == "AB"[int(record["prompt_id"][1:]) % 2]
            assert record["reward"] == right and record["answer"] in record["text"]
        assert record["action_tokens"] > 0 or record["prompt_id"] == "long"
    long = records[-1]
    assert (long["status"], long["reward"], long["turns"]) == ("truncated", 0.0, 0)
    assert "3 of" not in finished.stderr and "1 of 41 prompts are longer" in finished.stderr
    assert json.loads((killed.parent / "summary.json").read_text())["mean_reward"] == pytest.approx(mean)


def test_a_finished_evaluation_needs_no_engine(folder, finished, monkeypatch, capsys):
    start_s = time.perf_counter()
    monkeypatch.setattr("trace_megatron.eval.open_engine", None)
    monkeypatch.setattr(sys, "argv", command(folder)[2:])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code and time.perf_counter() - start_s < 20
    assert capsys.readouterr().out.splitlines()[1].split() == finished.stdout.splitlines()[1].split()


def refused(folder: Path, monkeypatch, capsys, *overrides: str) -> str:
    monkeypatch.setattr("trace_megatron.eval.open_engine", None)  # nothing may be started
    monkeypatch.setattr(sys, "argv", command(folder, *overrides)[2:])
    with pytest.raises(SystemExit) as ended:
        main()
    sentence = capsys.readouterr().err.strip().splitlines()[-1]
    assert ended.value.code == 2 and sentence.startswith("error: "), sentence
    return sentence


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["eval.samples=4"], "go on with samples (k) 3 as it began, found 4"),
        (["eval.temperature=0.5"], "rollout.temperature 1.0 as it began, found 0.5"),
        (["run.seed=4"], "seed 3"),
        (["env.params.system=Other"], "env.params.system"),
    ],
)
def test_other_settings_do_not_mix_with_the_records(folder, killed, finished, monkeypatch, capsys, overrides, words):
    before = killed.read_bytes()
    assert words in refused(folder, monkeypatch, capsys, *overrides)
    assert killed.read_bytes() == before


def test_other_problems_or_weights_do_not_mix_with_the_records(folder, finished, tmp_path, monkeypatch, capsys):
    copy = shutil.copytree(folder, tmp_path / "copy")
    overrides = [f"run.output_dir={copy}/runs", f"eval.data={copy}/data"]
    problems = copy / "data" / "arc_c" / "eval.jsonl"
    problems.write_text(problems.read_text().replace("Item 3?", "Item three?"))
    assert "go on with problems" in refused(folder, monkeypatch, capsys, *overrides)
    shutil.copy(folder / "again.jsonl", problems)
    tokenizer = copy / "model" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    assert "go on with weights" in refused(folder, monkeypatch, capsys, *overrides, f"policy.model={copy}/model")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["eval.benchmarks=[arc]"], "unknown benchmark 'arc': did you mean 'arc_c'"),
        (["eval.benchmarks=[math500]"], "prepare_data.py --out"),
        (["eval.benchmarks=[deepscaler]"], "found 'deepscaler', which has none"),
        (["eval.benchmarks=[]"], "expected benchmarks"),
        (["eval.benchmarks=[arc_c, arc_c]"], "every benchmark once"),
        (["eval.benchmarks=arc_c"], "expected a list for 'eval.benchmarks'"),
        (["eval.benchmarks=[nowhere/at/all.jsonl]"], "unknown benchmark 'nowhere/at/all.jsonl'"),
        (["eval.benchmarks=[BAD]"], "question and answers (or problem and answer) in line 1"),
        (["eval.benchmarks=[QA]"], "env.name=retrieval with an index"),
        (["eval.benchmarks=[GOOD]", "eval.output=BAD"], "expected to write records at"),
        (["eval.checkpoint=runs/nothing"], "no folder at 'runs/nothing'"),
        (["eval.checkpoint=DATA"], "a run's config.yaml, policy.json or Megatron's .metadata"),
        (["eval.samples=-1"], "eval.samples of at least 0"),
        (["eval.top_p=1.5"], "eval.top_p in [0, 1]"),
        (["eval.scaffold=cot"], "chat, react"),
        (["eval.sample=1"], "did you mean 'eval.samples'"),
    ],
)
def test_a_mistake_is_one_sentence(folder, tmp_path, monkeypatch, capsys, overrides, words):
    (tmp_path / "bad.jsonl").write_text('{"question": "q"}\n')
    (tmp_path / "qa.jsonl").write_text('{"question": "q", "answers": ["a"], "kind": "qa"}\n')
    (tmp_path / "good.jsonl").write_text('{"question": "1+1?", "answers": ["2"], "kind": "math"}\n')
    names = {
        "BAD": tmp_path / "bad.jsonl",
        "GOOD": tmp_path / "good.jsonl",
        "QA": tmp_path / "qa.jsonl",
        "DATA": folder / "data",
    }
    for name, path in names.items():
        overrides = [override.replace(name, str(path)) for override in overrides]
    sentence = refused(folder, monkeypatch, capsys, *overrides, f"run.output_dir={tmp_path}/runs")
    assert words in sentence and not (tmp_path / "runs").exists()


def test_a_model_without_a_chat_template_is_pointed_to_plain_text(folder, tmp_path, monkeypatch, capsys):
    base = shutil.copytree(folder / "model", tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    overrides = [f"eval.checkpoint={base}", f"run.output_dir={tmp_path}/runs"]
    assert "eval.scaffold=react" in refused(folder, monkeypatch, capsys, *overrides)


def test_a_base_model_is_asked_in_plain_text(folder, tmp_path, monkeypatch):
    """The engine is a script here; test_vllm_engine.py has a real one below the same scaffold."""
    base = shutil.copytree(folder / "model", tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    histories = []

    class Engine:
        async def generate(self, token_ids, settings, seed, affinity=""):
            histories.append(build_tokenizer().decode(token_ids))
            begun = len(histories[-1].rpartition("Thought:")[2])  # a token is a byte here
            written = " B, I think.\nFinal Answer: \\boxed{B}\n\nQuestion: Item"[begun:]
            ids = tuple(build_tokenizer().encode(written))[: settings.max_new_tokens]
            return Completion(ids, (-1.0,) * len(ids), False, 0)

    monkeypatch.setattr("trace_megatron.eval.open_engine", lambda config, loop: nullcontext(Engine()))
    overrides = [f"eval.checkpoint={base}", "eval.scaffold=react", f"run.output_dir={tmp_path}/runs"]
    overrides += ["eval.prompts=20", "rollout.max_prompt_tokens=1500", "rollout.max_new_tokens=64"]
    (summary,) = evaluate_policy(load_config(folder / "config.yaml", overrides))
    records = read(tmp_path / "runs" / "eval" / "base-react" / "arc_c" / "records.jsonl")
    assert len(records) == 20 * SAMPLES and {r["text"] for r in records} == {" B, I think.\nFinal Answer: \\boxed{B}"}
    assert all(r["reward"] == (r["answer"] == "B" and int(r["prompt_id"][1:]) % 2) for r in records)
    assert 0 < summary.mean_reward < 1 and summary.turns_mean == 1 and summary.truncated_share == 0
    assert all("Final Answer: The answer is \\boxed{87}." in history for history in histories)  # the examples


def test_the_papers_k_and_the_environments_of_the_kinds(folder, tmp_path):
    data = tmp_path / "data"
    names = ("math500", "aime24", "amc23", "minerva", "olympiadbench", "mmlu_pro", "arc_c", "gpqa", "hotpotqa")
    for name in names:
        kind = "choice" if name in ("mmlu_pro", "arc_c", "gpqa") else "qa" if name == "hotpotqa" else "math"
        row = {"question": "q", "answers": ["A"], "kind": kind} | ({"choices": ["x", "y"]} if kind == "choice" else {})
        (data / name).mkdir(parents=True)
        (data / name / "eval.jsonl").write_text(json.dumps(row))
    overrides = [f"eval.data={data}", f"eval.benchmarks=[{', '.join(names)}, bfcl]", "eval.samples=0"]
    overrides += ["env.name=retrieval", "env.params={index: somewhere, num_passages: 2, train: t.jsonl}"]
    planned = plan_benchmarks(load_config(folder / "config.yaml", overrides))
    assert [benchmark.samples for benchmark in planned] == [4, 32, 16, 4, 4, 1, 4, 8, 1, 4]
    assert [benchmark.env.name for benchmark in planned] == [*["python_tool"] * 8, "retrieval", "bfcl"]
    params = {"index": "somewhere", "num_passages": 2, "validation": str(data / "hotpotqa" / "eval.jsonl")}
    assert planned[8].env.params == params
    react = plan_benchmarks(load_config(folder / "config.yaml", [*overrides, "eval.scaffold=react"]))
    assert react[8].env.params == {**params, "num_examples": 3} and react[9].env.params == {"worked_example": True}


def record(prompt_id: str, sample: int, reward: float, status=RolloutStatus.FINISHED) -> Record:
    return Record(prompt_id, sample, reward, status, 1, 2, 3, "a", "text", {})


def test_failed_samples_are_played_again_and_nobody_else_may_write(tmp_path):
    records = RecordFile(tmp_path / "b", {"k": 1})
    records.add(record("p", 0, 1.0))
    records.add(record("p", 1, 0.0, RolloutStatus.ENV_ERROR))
    with pytest.raises(UserError, match="no other evaluation"):
        RecordFile(tmp_path / "b", {"k": 1})
    records.close()
    again = RecordFile(tmp_path / "b", {"k": 1})
    assert ("p", 0) in again and ("p", 1) not in again
    again.close()


def test_standard_errors_are_over_prompts():
    """Samples of a prompt that are all alike add nothing: ten times the samples, the same error."""
    groups = {"a": 1.0, "b": 0.0, "c": 1.0, "d": 0.5}
    errors = []
    for samples in (1, 10):
        records = [record(name, k, reward) for name, reward in groups.items() for k in range(samples)]
        summary = summarize("b", records, samples)
        errors.append(summary.standard_error)
        assert (summary.mean_reward, summary.exact_share, summary.pass_share) == (0.625, 0.5, 0.5)
    assert errors[0] == pytest.approx(errors[1]) == pytest.approx(0.2394, abs=1e-4)
    single = summarize("b", [record("a", 0, 1.0)], 1)
    assert single.standard_error is None and " - " in describe_summaries([single])
