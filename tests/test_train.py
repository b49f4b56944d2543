"""Whole runs through the command line: real Megatron ranks, a real vLLM engine, a tiny policy."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from tiny_models import write_tiny_model
from tiny_runs import approximately, command, read_metrics, without_clock, write_answering_model, write_config
from transformers import AutoModelForCausalLM

from trace_megatron.cli import main
from trace_megatron.config import EvalConfig, load_config
from trace_megatron.errors import UserError
from trace_megatron.eval.checkpoints import find_checkpoint, to_hf_folder
from trace_megatron.tree_files import read_trees


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return write_answering_model(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, policy) -> tuple[Path, Path]:
    """One run of four steps, and one that is killed in the third step and resumed; both at the same time.

    In the second trainer and engine take turns, which must change nothing."""
    whole, broken = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("broken")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    uninterrupted = subprocess.Popen(command("train", "-c", str(write_config(whole, policy))), env=environment)
    config = write_config(broken, policy, engine={"colocated": True})
    interrupted = subprocess.Popen(command("train", "-c", str(config)), env=environment, start_new_session=True)
    checkpoint = broken / "run" / "checkpoints" / "step_000002" / "state.json"
    deadline = time.monotonic() + 480
    while not checkpoint.exists() and time.monotonic() < deadline and interrupted.poll() is None:
        time.sleep(0.02)
    os.killpg(interrupted.pid, signal.SIGKILL)
    interrupted.wait()
    assert checkpoint.exists()
    subprocess.run(command("train", "-c", str(config), "--resume"), env=environment, check=True)
    assert uninterrupted.wait(timeout=480) == 0
    return whole / "run", broken / "run"


def test_a_resumed_run_samples_the_same_tokens_and_gives_the_same_metrics(runs):
    whole, resumed = runs
    for step in range(1, 5):
        name = f"trees/step_{step:06d}.jsonl.zst"
        expected, found = (json.loads(json.dumps([asdict(tree) for tree in read_trees(run / name)])) for run in runs)
        assert found == approximately(expected)  # tokens, rewards, anchors to the letter; an engine's logprobs nearly
    for expected, found in zip(read_metrics(whole), read_metrics(resumed), strict=True):
        for stage in ("asleep", "training", "offloaded", "receiving", "sampling"):
            assert found.pop(f"colocation/{stage}_used_gib") > 0
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


def test_any_of_a_runs_weights_can_be_evaluated(runs, tmp_path):
    """The last checkpoint holds what hf/ holds, at two pipeline stages; an earlier one does not."""
    run = shutil.copytree(runs[0], tmp_path / "run")
    config = load_config(run / "config.yaml")

    def find(path: Path, **settings):
        return find_checkpoint(replace(config, eval=EvalConfig(checkpoint=str(path), **settings)))

    def weights(path: Path, **settings):
        return AutoModelForCausalLM.from_pretrained(to_hf_folder(find(path, **settings))).state_dict()

    assert [find(path).home for path in (run, run / "hf", run / "checkpoints" / "step_000002")] == [
        run / "eval" / "hf",
        run / "eval" / "hf",
        run / "eval" / "step_000002",
    ]
    exported = weights(run)
    last, first = (weights(run / "checkpoints" / name) for name in ("step_000004", "step_000002/policy"))
    assert all(torch.equal(exported[name], last[name]) for name in exported)
    assert any(not torch.equal(exported[name], first[name]) for name in exported)
    os.utime(run / "checkpoints" / "step_000004", (time.time() + 9, time.time() + 9))  # of a resumed run
    assert find(run).folder == run / "checkpoints" / "step_000004" / "policy"
    shutil.rmtree(run / "hf")
    assert find(run, output=str(tmp_path / "o")).home == tmp_path / "o"
    shutil.rmtree(run / "checkpoints" / "step_000004")
    shutil.rmtree(run / "checkpoints" / "step_000002")
    with pytest.raises(UserError, match=r"hf/ or a checkpoint in the run"):
        find(run)


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
        (["engine.urls=[localhost:8000]"], ["engine.urls", "'localhost:8000'", "http://HOST:PORT"]),
        (["engine.urls=[http://a:1, http://a:1]"], ["engine.urls", "once each"]),
        (["engine.urls=[http://127.0.0.1:1]"], ["engine.urls", "http://127.0.0.1:1", "refused"]),
        (["env.urls=[localhost]"], ["env.urls", "'localhost'", "http://HOST:PORT"]),
        (["env.urls=[http://127.0.0.1:1]"], ["env.urls", "http://127.0.0.1:1", "refused", "serve-env"]),
        (["engine.timeout_s=0"], ["engine.timeout_s", "above 0"]),
        (["rollout.max_staleness=1"], ["rollout.max_staleness", "decoupled", "bypass"]),
        (
            ["rollout.max_staleness=1", "loss.old_logprobs=decoupled", "engine.colocated=true"],
            ["engine.colocated", "max_staleness=0"],
        ),
        (["rollout.max_staleness=-1"], ["rollout.max_staleness", "-1"]),
        (["rollout.carried_share=0.2"], ["rollout.carried_share", "max_staleness of at least 2"]),
        (["rollout.carried_share=1"], ["rollout.carried_share", "[0, 1)"]),
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
    config = write_config(tmp_path, other, run={"steps": 6}, predictor={"kind": "constant"})
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    result = subprocess.run(command("train", "-c", str(config), "--resume"), capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert "checkpoint" in result.stderr
    assert "Traceback" not in result.stderr
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
