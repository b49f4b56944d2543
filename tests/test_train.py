"""Whole runs through the command line: real Megatron ranks, a real vLLM engine, a tiny policy."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml
from tiny_models import write_tiny_model
from transformers import AutoModelForCausalLM

from trace_megatron.cli import main
from trace_megatron.config import EnvConfig, load_config
from trace_megatron.envs import build_environment
from trace_megatron.rollout.chat import ChatRenderer
from trace_megatron.tree_files import read_trees

TASKS = {"letter_counting": {"min_words": 1, "max_words": 3}}  # answers are mostly 0, 1 or 2


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    """A tiny policy that answers in the asked form, with a digit at random: some answers are right, some are not."""
    folder = write_tiny_model(tmp_path_factory.mktemp("policy") / "model", family="qwen3", tied=False, head_dim=32)
    renderer = ChatRenderer.from_folder(folder)
    environment = build_environment(EnvConfig(params={"tasks": TASKS}))
    stop = renderer.stop_token_ids[0]
    rows, labels = [], []
    for number, task in enumerate(environment.tasks("train")[index] for index in range(48)):
        prompt = renderer.prompt_ids(task.messages)
        action = [*renderer._tokenizer.encode(f"Answer: {number % 3}", add_special_tokens=False), stop]
        rows.append([*prompt, *action])
        labels.append([-100] * len(prompt) + action)
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [stop] * (longest - len(row)) for row in rows])
    targets = torch.tensor([row + [-100] * (longest - len(row)) for row in labels])
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(0)
    for _ in range(20):
        chosen = torch.randperm(len(rows))[:8]
        loss = model(tokens[chosen], labels=targets[chosen]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.6  # the form is learnt; the digit stays open
    model.save_pretrained(folder)
    return folder


def write_config(folder: Path, model: Path, **sections) -> Path:
    values = {
        "run": {"name": "run", "output_dir": str(folder), "steps": 4, "seed": 3, "checkpoint_every": 2},
        "policy": {"model": str(model), "dtype": "float32", "pipeline_parallel": 2, "tokens_per_micro_batch": 1024},
        "optimizer": {"learning_rate": 1e-3},
        "method": {"selector": "trace", "advantage": "tree_rpo"},
        "budget": {"candidates": 6, "rollouts": 8, "continuations": 2},
        "predictor": {"kind": "model", "model": str(model), "num_layers": 1, "dtype": "float32", "learning_rate": 1e-3},
        "rollout": {"max_turns": 3, "max_new_tokens": 16, "max_prompt_tokens": 512, "max_response_tokens": 512},
        "engine": {"dtype": "float32", "max_num_seqs": 32, "kv_cache_gib": 0.25},
        "env": {"name": "reasoning_gym", "params": {"tasks": TASKS}},
        "validation": {"every": 4, "prompts": 8},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    load_config(path)
    return path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "trace_megatron.cli", *arguments]


def read_metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def without_clock(line: dict) -> dict:
    """A step's numbers without those that a clock made."""
    return {
        key: value
        for key, value in line.items()
        if not (key.startswith("seconds/") or key.endswith(("_s", "seconds", "predictor_share", "peak_memory_gib")))
    }


def approximately(value):
    """Nested JSON with every float compared to 1e-5, everything else exactly."""
    if isinstance(value, dict):
        return {key: approximately(item) for key, item in value.items()}
    if isinstance(value, list):
        return [approximately(item) for item in value]
    return pytest.approx(value, rel=1e-5, abs=1e-5) if isinstance(value, float) else value


@pytest.fixture(scope="module")
def runs(tmp_path_factory, policy) -> tuple[Path, Path]:
    """One run of four steps, and one that is killed in the third step and resumed; both at the same time."""
    whole, broken = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("broken")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    uninterrupted = subprocess.Popen(command("train", "-c", str(write_config(whole, policy))), env=environment)
    config = write_config(broken, policy)
    interrupted = subprocess.Popen(command("train", "-c", str(config)), env=environment, start_new_session=True)
    checkpoint = broken / "run" / "checkpoints" / "step_000002" / "state.json"
    deadline = time.monotonic() + 240
    while not checkpoint.exists() and time.monotonic() < deadline and interrupted.poll() is None:
        time.sleep(0.02)
    os.killpg(interrupted.pid, signal.SIGKILL)
    interrupted.wait()
    assert checkpoint.exists()
    subprocess.run(command("train", "-c", str(config), "--resume"), env=environment, check=True)
    assert uninterrupted.wait(timeout=240) == 0
    return whole / "run", broken / "run"


def test_a_resumed_run_samples_the_same_tokens_and_gives_the_same_metrics(runs):
    whole, resumed = runs
    for step in range(1, 5):
        name = f"trees/step_{step:06d}.jsonl.zst"
        expected, found = (json.loads(json.dumps([asdict(tree) for tree in read_trees(run / name)])) for run in runs)
        assert found == approximately(expected)  # tokens, rewards, anchors to the letter; an engine's logprobs nearly
    for expected, found in zip(read_metrics(whole), read_metrics(resumed), strict=True):
        assert without_clock(found) == approximately(without_clock(expected))


def test_the_run_did_learn_from_trees(runs):
    """Guards the test above: without contrast, gradients and continuations it would compare nothing."""
    lines = read_metrics(runs[0])
    assert any(line["rollout/effective_ratio"] > 0 and line["train/grad_norm"] > 0 for line in lines)
    assert any(line["rollout/num_continuations"] > 0 for line in lines)
    assert all(line["train/num_tokens"] < line["train/num_unpacked_tokens"] for line in lines)
    assert all(line["train/ratio_tail"] < 1e-3 for line in lines)  # engine and trainer agree after every sync
    assert "validation/accuracy" in lines[3]


def test_the_exported_policy_loads_and_was_trained(runs, policy):
    before, after = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (policy, runs[0] / "hf"))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["policy.tensor_paralel=2"], ["policy.tensor_paralel", "policy.tensor_parallel"]),
        (["policy.model=nowhere/at/all"], ["nowhere/at/all"]),
        (["policy.tensor_parallel=3"], ["tensor_parallel", "4 attention heads"]),
        (["policy.pipeline_parallel=4"], ["pipeline_parallel", "at most 2 pipeline chunks"]),
        (["env.params={tasks: {}}"], ["tasks"]),
        (["rollout.top_p=0.9"], ["top_p", "decoupled"]),
        (["method.selector=tracer"], ["tracer", "trace"]),
        (["predictor.kind=none"], ["predictor"]),
        (["rollout.max_response_tokens=100000"], ["max_response_tokens", "2048"]),
        (["budget.rollouts=1"], ["1"]),
        (["run.steps=0"], ["run.steps", "0"]),
        (["validation.prompts=0"], ["validation.prompts", "0"]),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(tmp_path, policy, overrides, words, monkeypatch, capsys):
    config = write_config(tmp_path, policy)
    sentence = refused(["train", "-c", str(config), *overrides], monkeypatch, capsys)
    assert len(sentence.splitlines()) == 1
    for word in words:
        assert word in sentence
    assert list(tmp_path.iterdir()) == [config]  # nothing was written


def refused(arguments: list[str], monkeypatch, capsys) -> str:
    """What the command says before it ends with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["trace-megatron", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return capsys.readouterr().err.strip()


def test_an_existing_run_is_not_overwritten(runs, tmp_path, policy, monkeypatch, capsys):
    config = write_config(tmp_path, policy)
    shutil.copytree(runs[0], tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    assert "--resume" in refused(["train", "-c", str(config)], monkeypatch, capsys)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_a_checkpoint_of_another_shape_is_refused(runs, tmp_path, policy):
    other = write_tiny_model(tmp_path / "other", family="qwen3", tied=False, head_dim=32, ffn=128)
    shutil.copytree(runs[0], tmp_path / "run")
    config = write_config(tmp_path, other, predictor={"kind": "constant"})
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    result = subprocess.run(command("train", "-c", str(config), "--resume"), capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert "checkpoint" in result.stderr
    assert "Traceback" not in result.stderr
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
