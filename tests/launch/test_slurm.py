"""Training as jobs of a real Slurm on this machine, submitted by NeMo-Run: real Megatron ranks, a real vLLM engine."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from needed import ROOT
from tiny_runs import approximately, command, read_metrics, without_clock, write_answering_model, write_config

SECTIONS = {"run": {"steps": 6}, "predictor": {"kind": "constant"}, "validation": {"every": 0}}


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return write_answering_model(tmp_path_factory.mktemp("policy") / "model")


def options(config: Path) -> list[str]:
    return [
        *("-c", str(config), "--executor", "slurm", "--account", "root", "--partition", "batch", "--gpus", "0"),
        *("--workdir", str(config.parent), "--python", sys.executable),
        *("--env", "GLOO_SOCKET_IFNAME=lo", "--env", "OMP_NUM_THREADS=1", "--env", f"PYTHONPATH={ROOT}"),
    ]


def test_a_chain_is_cancelled_goes_on_and_has_the_metrics_of_a_direct_run(slurm, launch, policy, tmp_path):
    direct, chained = tmp_path / "direct", tmp_path / "chained"
    configs = []
    for folder in (direct, chained):
        folder.mkdir()
        configs.append(write_config(folder, policy, **SECTIONS))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    undisturbed = subprocess.Popen(command("train", "-c", str(configs[0])), env=environment)

    submitted = launch(*options(configs[1]), "--chain", "3", **slurm)
    assert submitted.returncode == 0, submitted.stderr
    jobs = re.findall(r"job (\d+) submitted", submitted.stderr)
    assert len(jobs) == 3
    wait_for((chained / "run" / "checkpoints" / "step_000002" / "state.json").exists, limit_s=400)
    subprocess.run(["scancel", jobs[0]], env=os.environ | slurm, check=True)
    wait_for(lambda: state(jobs[2], slurm) not in ("PENDING", "RUNNING", "COMPLETING"), limit_s=400)

    assert [state(job, slurm) for job in jobs] == ["CANCELLED", "COMPLETED", "COMPLETED"]
    logs = [next((tmp_path / "nemo").glob(f"experiments/run/*/*/log-*_{job}_*.out")).read_text() for job in jobs]
    assert "resumed after step" in logs[1]
    assert "nothing to resume" in logs[2] and "engine up" not in logs[2]  # a finished run ends at once
    assert undisturbed.wait(timeout=400) == 0
    expected, found = read_metrics(direct / "run"), read_metrics(chained / "run")
    assert len(found) == len(expected) == 6
    assert sum(line["train/grad_norm"] > 0 for line in expected) > 1
    for one, other in zip(expected, found, strict=True):
        assert without_clock(other) == approximately(without_clock(one))


def test_trainer_and_servers_as_groups_of_one_job(slurm, launch, policy, tmp_path):
    """Two ranks and their environment server on one node, a `vllm serve` on the other that gets weights over TCP."""
    sections = SECTIONS | {"run": {"steps": 2}, "budget": {"candidates": 2, "rollouts": 4, "continuations": 1}}
    config = write_config(tmp_path, policy, **sections)
    server = ("VLLM_CPU_KVCACHE_SPACE=1", "VLLM_CPU_OMP_THREADS_BIND=nobind", "TORCH_COMPILE_DISABLE=1")
    server += ("VLLM_ENABLE_V1_MULTIPROCESSING=0",)  # as in test_hosts.py
    more = [argument for entry in server for argument in ("--env", entry)]
    followed = launch(*options(config), *more, "--server-nodes", "1", "--env-servers", "1", "--follow", **slurm)
    assert followed.returncode == 0, followed.stdout + followed.stderr
    lines = read_metrics(tmp_path / "run")
    assert len(lines) == 2 and all(line["engines/alive"] == 1 for line in lines)
    assert all(line["rollout/failed_share"] == 0 for line in lines)
    used = (tmp_path / "run" / "config.yaml").read_text()
    assert all(re.search(rf"urls:\n *- http://[\w.-]+:{port}\n", used) for port in (8000, 8500))
    (log,) = (tmp_path / "nemo").glob("experiments/run/*/*/sbatch_*.out")  # Slurm's trace of the batch script
    assert "export TRACE_ENV_TOKEN=$(od" in log.read_text() and not re.search(r"[0-9a-f]{32}", log.read_text())


def test_a_log_is_followed_and_a_failure_is_the_exit_code(slurm, launch, policy, tmp_path):
    config = write_config(tmp_path, policy)
    followed = launch(*options(config), "--follow", "policy.model=nowhere", **slurm)
    assert followed.returncode == 1
    assert "nowhere" in followed.stdout  # what train says of it
    assert [line.split(": ")[1] for line in followed.stderr.splitlines() if line.startswith("job ")][-1] == "FAILED"


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--partition", "nope"], "Invalid partition name"),
        (["--gpus", "2"], "generic resource"),
        (["--time", "9:99:99:99"], "--time"),
        (["--sbatch", "nodelist=elsewhere"], "Invalid node name"),
    ],
)
def test_what_slurm_refuses_is_one_sentence(slurm, launch, policy, tmp_path, extra, words):
    refused = launch(*options(write_config(tmp_path, policy)), *extra, **slurm)
    assert refused.returncode == 2, refused.stderr
    assert words in refused.stderr and len(refused.stderr.strip().splitlines()) == 1


def state(job: str, slurm: dict[str, str]) -> str:
    shown = subprocess.run(["scontrol", "show", "job", job], env=os.environ | slurm, capture_output=True, text=True)
    return re.search(r"JobState=(\w+)", shown.stdout)[1]


def wait_for(condition, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
