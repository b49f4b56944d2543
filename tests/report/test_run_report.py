"""Report, inspection and doctor, on a run's files as training writes them."""

import json
import re

import pytest
from typer.testing import CliRunner

from trace_megatron import doctor
from trace_megatron.cli import app
from trace_megatron.config import Config, PolicyConfig, dump_config
from trace_megatron.errors import UserError
from trace_megatron.report.html import write_report
from trace_megatron.report.tree_view import describe_trees, draw_tree
from trace_megatron.tree_files import read_step, write_trees
from trace_megatron.types import ROOT, Anchor, Prompt, Rollout, RolloutStatus, RolloutTree, Task, Turn

WORDS = {1: "question", 2: "call", 3: "<b>42</b>", 4: "answer"}


def decode(ids):
    return " ".join(WORDS[index] for index in ids)


def example_tree(name="task-7"):
    call, answer = Turn((2,), (-0.5,), (3,), 0), Turn((4,), (-0.1,), (), 0)
    rollouts = (
        Rollout(ROOT, (call, answer), 0.0, RolloutStatus.FINISHED),
        Rollout(ROOT, (answer,), 0.0, RolloutStatus.ENV_ERROR, trained=False),
        Rollout(Anchor(0, 1), (answer,), 1.0, RolloutStatus.FINISHED),
    )
    return RolloutTree(Prompt(name, Task(name, (), {}), (1,)), rollouts, prefix_probs=(0.625,))


def line(step):
    return {
        "step": step,
        "rollout/effective_ratio": 0.5,
        "rollout/reward_mean": 0.25 * step,
        "rollout/allocation_histogram": [1, 0, 2],
        "rollout/continuations_by_turn": [3],
        "train/num_tokens": 100,
        "train/num_unpacked_tokens": 300,
        "time/predictor_share": 0.02,
        "seconds/rollouts": 2.0,
        "seconds/policy_update": 1.0,
    }


@pytest.fixture
def run(tmp_path):
    run = tmp_path / "runs" / "example"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(dump_config(Config()))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line(step)) + "\n" for step in (1, 2)))
    write_trees(run / "trees" / "step_000001.jsonl.zst", [example_tree("old")])
    write_trees(run / "trees" / "step_000002.jsonl.zst", [example_tree(), example_tree("task-8")])
    return run


def test_a_tree_as_text():
    text = "\n".join(draw_tree(example_tree(), decode))
    assert "rollout 0 (bare): reward 0, finished" in text
    assert "rollout 1 (bare): reward 0, env_error, not trained on" in text
    assert "rollout 2 (from turn 1 of 0): reward 1, finished\n  turn 2\n    answer" in text
    assert "turn 1   V = 0.625\n    call\n      <b>42</b>" in text
    first, second = describe_trees([example_tree()])
    assert first == "1 trees, 1 mixed, 2.5 units"
    assert "task-7  2+1 rollouts, 4 tokens, rewards 0 0 1  mixed" in second


def test_the_report_holds_curves_trees_and_configuration_and_nothing_foreign(run):
    page = write_report(run, decode).read_text()
    assert "tokens trained: 200 packed, 600 if every trajectory were trained alone (3.00x)" in page
    assert page.count("data:image/svg+xml;base64,") >= 4
    assert "task-8" in page and "old" not in page.partition("Trees of the last step")[2].partition("<h2>")[0]
    assert "&lt;b&gt;42&lt;/b&gt;" in page and "<b>42" not in page  # model text is text
    assert "tensor_parallel: 1" in page
    assert not re.search(r"https?://|<script", page)
    assert not list(run.glob("*.partial"))


def test_the_commands(run, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(f"run: {{name: example, output_dir: {run.parent}}}\n")
    listed = CliRunner().invoke(app, ["inspect", "-c", str(config)])
    assert listed.exit_code == 0 and "2 trees, 2 mixed" in listed.output
    older = CliRunner().invoke(app, ["inspect", "-c", str(config), "--step", "1"])
    assert "old" in older.output
    for arguments, message in (
        (["--step", "9"], "expected trees of step 9"),
        (["--tree", "5"], "expected --tree below 2"),
        (["--tree", "0"], "expected an HF model folder with the run's tokenizer"),
    ):
        result = CliRunner().invoke(app, ["inspect", "-c", str(config), *arguments])
        assert isinstance(result.exception, UserError) and message in str(result.exception)
    with pytest.raises(UserError, match="expected finished steps"):
        write_report(tmp_path, decode)
    assert len(read_step(run / "trees")) == 2


def test_the_doctor_names_what_is_wrong(monkeypatch):
    findings = {finding.subject: finding for finding in doctor.examine(Config(policy=PolicyConfig(model="nowhere")))}
    assert findings["megatron-core"].verdict is doctor.Verdict.OK
    assert findings["configuration"].verdict is doctor.Verdict.WRONG and "nowhere" in findings["configuration"].text
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    monkeypatch.setattr(doctor.native, "AVAILABLE", False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    findings = {finding.subject: finding for finding in doctor.examine()}
    assert {findings[name].verdict for name in ("megatron-core", "vllm", "torch")} == {doctor.Verdict.WRONG}
    assert {findings[name].verdict for name in ("native ops", "sandbox")} == {doctor.Verdict.NOTE}


def test_the_doctor_names_a_stack_that_was_not_tested(monkeypatch):
    tested = dict(doctor._TESTED)
    monkeypatch.setattr(doctor, "_version", tested.get)
    assert list(doctor._stack()) == []
    tested["torch"] += "+cpu"
    tested["megatron-core"] = "0.99"
    (finding,) = doctor._stack()
    assert (
        finding.verdict is doctor.Verdict.NOTE and "megatron-core 0.99" in finding.text and "torch" not in finding.text
    )


def test_the_doctor_names_ops_that_the_gpu_lacks(monkeypatch):
    monkeypatch.setattr(doctor.native, "AVAILABLE", True)
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: True)
    for built, verdict in ((True, doctor.Verdict.OK), (False, doctor.Verdict.NOTE)):
        monkeypatch.setattr(doctor.native, "has", lambda op, device, built=built: built)
        finding = doctor._native()
        assert finding.verdict is verdict and ("TRACE_BUILD=cuda" in finding.text) is not built


def test_the_doctor_as_a_command(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("policy: {model: nowhere}\n")
    result = CliRunner().invoke(app, ["doctor", "-c", str(config)])
    assert result.exit_code == 2 and "wrong configuration: expected a Hugging Face model folder" in result.output
