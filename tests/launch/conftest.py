"""The environment of `trace-megatron launch`, and a real Slurm; where either is missing, its tests are skipped."""

import os
import subprocess
from pathlib import Path

import pytest
from needed import ROOT, absent
from small_slurm import missing_programs, small_slurm


@pytest.fixture(scope="session")
def launch_python() -> Path:
    """Python of the environment with NeMo-Run, which has no torch."""
    python = ROOT / ".venv-launch" / "bin" / "python"
    if not python.exists():
        absent("the environment of `launch` is not there: make install-launch")
    return python


@pytest.fixture
def launch(launch_python, tmp_path):
    """Call `trace-megatron launch` with these arguments and variables."""

    def call(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
        home = {"NEMORUN_HOME": str(tmp_path / "nemo"), "PYTHONPATH": str(ROOT)}
        command = [str(launch_python), "-m", "trace_megatron.cli", "launch", *arguments]
        return subprocess.run(command, env=os.environ | home | variables, capture_output=True, text=True)

    return call


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment in which Slurm's commands find a real cluster: this machine as two nodes."""
    missing = missing_programs()
    if missing:
        absent(f"Slurm is not installed ({', '.join(missing)}): apt-get install slurm-wlm munge")
    if os.geteuid():
        absent("Slurm's daemons start jobs as their user: root is needed here")
    with small_slurm(tmp_path_factory.mktemp("slurm")) as environment:
        yield {"SLURM_CONF": environment["SLURM_CONF"]}
