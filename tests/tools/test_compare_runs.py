"""compare_runs tells a repeated run from another."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from trace_megatron.errors import UserError
from trace_megatron.tree_files import write_trees
from trace_megatron.types import ROOT, Prompt, Rollout, RolloutStatus, RolloutTree, Task, Turn

SCRIPT = Path(__file__).parents[2] / "tools" / "compare_runs.py"
spec = importlib.util.spec_from_file_location("compare_runs", SCRIPT)
compare_runs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compare_runs)


def write_run(folder: Path, loss: float = 0.5, token: int = 6, steps: int = 2, success: float | None = 0.5) -> Path:
    folder.mkdir()
    metrics = {"train/loss": loss, "calibration": [{"count": 3, "success_mean": success}]}
    lines = [{"step": step, **metrics, "seconds/rollouts": loss * step} for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in range(1, steps + 1):
        turn = Turn((5, token), (-0.1, -1.2), (), 0)
        tree = RolloutTree(Prompt("t", Task("t", (), {}), (1,)), (Rollout(ROOT, (turn,), 1.0, RolloutStatus.FINISHED),))
        write_trees(folder / "trees" / f"step_{step:06d}.jsonl.zst", [tree])
    return folder


@pytest.mark.parametrize(
    ("other", "code", "words"),
    [
        ({"loss": 0.5 + 1e-7, "steps": 1}, 0, "1 steps: the same tokens; largest difference of a metric 1.0e-07"),
        ({"loss": 0.6}, 1, "1.0e-01 (train/loss)"),
        ({"success": 0.5 + 1e-7}, 0, "1.0e-07 (calibration)"),
        ({"success": None}, 1, "inf (calibration)"),
        ({"token": 7}, 1, "step 1: other tokens"),
    ],
)
def test_a_repeated_run_is_told_from_another(tmp_path, monkeypatch, capsys, other, code, words):
    runs = [write_run(tmp_path / "run"), write_run(tmp_path / "other", **other)]
    monkeypatch.setattr(sys, "argv", ["compare_runs.py", *map(str, runs)])
    assert compare_runs.main() == code
    assert words in capsys.readouterr().out


def test_a_run_without_steps_is_refused(tmp_path, monkeypatch):
    runs = [write_run(tmp_path / "run"), write_run(tmp_path / "other", steps=0)]
    monkeypatch.setattr(sys, "argv", ["compare_runs.py", *map(str, runs)])
    with pytest.raises(UserError, match="found 2 and 0 steps"):
        compare_runs.main()
