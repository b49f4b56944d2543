"""Options of the simulated fleet that cannot be: one sentence and exit code 2."""

import subprocess
import sys

import pytest
from needed import ROOT

TOOL = ROOT / "tools" / "simulate_engines.py"
sys.path.insert(0, str(TOOL.parent))
import simulate_engines  # noqa: E402

from trace_megatron.errors import UserError  # noqa: E402


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--engines", "0"),
        ("--rollouts", "0"),
        ("--slots", "0"),
        ("--turn-tokens", "nan"),
        ("--sigma", "-1"),
        ("--base-ms", "-5"),
        ("--stop-prob", "0"),
        ("--stop-prob", "2"),
    ],
)
def test_numbers_that_cannot_be_are_named(option, value, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["simulate_engines.py", option, value])
    with pytest.raises(UserError, match=f"expected {option} .*found {value}"):
        simulate_engines.main()


def test_a_run_without_trees_is_a_sentence_and_exit_code_2(tmp_path):
    done = subprocess.run([sys.executable, TOOL, "--recorded", tmp_path], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"error: expected trees of a run below '{tmp_path}', found none\n"
