"""What a launch is refused for, and what a rank's script does: plain text, run by bash, no cluster."""

import dataclasses
import os
import re
import subprocess
from pathlib import Path

import pytest
from needed import ROOT

from trace_megatron.config import Config, EngineConfig, EnvConfig, PolicyConfig, RunConfig
from trace_megatron.errors import UserError
from trace_megatron.launch.job import (
    LaunchRequest,
    check_request,
    local_script,
    rank_script,
    server_script,
    servers_per_node,
    tasks_per_node,
)

CONFIG = Config(run=RunConfig(name="a"), policy=PolicyConfig(tensor_parallel=4, data_parallel=4))
REQUEST = LaunchRequest(
    executor="slurm",
    account="lab",
    partition="gpu",
    nodes=2,
    gpus=8,
    container="",
    mounts=(),
    time="04:00:00",
    env=(),
    sbatch=(),
    tunnel="local",
    workdir="/project",
    python="python",
    chain=1,
    resume=False,
)


def test_ranks_are_shared_out_evenly():
    check_request(REQUEST, CONFIG)
    assert tasks_per_node(REQUEST, CONFIG) == 8
    assert tasks_per_node(dataclasses.replace(REQUEST, nodes=4, gpus=None), CONFIG) == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nodes": 3}, ["--nodes", "16 trainer ranks", "1, 2, 4, 8, 16"]),
        ({"nodes": 0}, ["--nodes", "found 0"]),
        ({"gpus": 4}, ["--gpus 4", "--gpus 8"]),
        ({"account": ""}, ["--account"]),
        ({"partition": ""}, ["--partition"]),
        ({"time": "4h"}, ["--time", "4h", "04:00:00"]),
        ({"tunnel": "ssh"}, ["--tunnel", "ssh://USER@HOST"]),
        ({"tunnel": "http://host"}, ["--tunnel", "http://host"]),
        ({"workdir": "~/project"}, ["--workdir"]),
        ({"mounts": ("/a:/b",)}, ["--container"]),
        ({"env": ("A",)}, ["--env", "NAME=VALUE"]),
        ({"sbatch": ("=x",)}, ["--sbatch", "NAME=VALUE"]),
        ({"chain": 0}, ["--chain"]),
        ({"server_nodes": -1}, ["--server-nodes"]),
        ({"env_servers": -1}, ["--env-servers"]),
        ({"executor": "pbs"}, ["--executor", "local", "slurm", "pbs"]),
        ({"executor": "local", "gpus": None}, ["--nodes 1", "--executor slurm"]),
        ({"executor": "local", "nodes": 1, "chain": 2}, ["--chain 1"]),
        ({"executor": "local", "nodes": 1}, ["--account, --partition, --gpus for", "--executor slurm"]),
        ({"executor": "local", "nodes": 1, "server_nodes": 2}, ["--server-nodes"]),
        ({"executor": "local", "nodes": 1, "env_servers": 1}, ["--env-servers"]),
    ],
)
def test_a_mistake_is_one_sentence(changes, words):
    with pytest.raises(UserError) as caught:
        check_request(dataclasses.replace(REQUEST, **changes), CONFIG)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("tunnel", "expected"),
    [
        ("ssh://ada@login.example.org:2222", ("login.example.org", "ada", 2222)),
        ("ssh://login", ("login", None, None)),
    ],
)
def test_addresses(tunnel, expected):
    assert dataclasses.astuple(dataclasses.replace(REQUEST, tunnel=tunnel).address) == expected


@pytest.fixture
def play(tmp_path):
    """Run a rank's script as srun would, with a Python that notes its arguments, its input and its place."""
    fake = tmp_path / "python"
    fake.write_text(
        '#!/bin/bash\necho "$@"; echo "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GREETING"; cat $5\n'
    )
    fake.chmod(0o755)

    def call(goes_on: bool = False, rank: int = 0, restarts: int = 0, name: str = "a") -> list[str]:
        config = dataclasses.replace(CONFIG, run=RunConfig(name=name))
        request = dataclasses.replace(REQUEST, workdir=str(tmp_path), python=str(fake), env=("GREETING=it's me",))
        slurm = {"SLURM_PROCID": rank, "SLURM_NTASKS": 16, "SLURM_LOCALID": rank % 8, "SLURM_NTASKS_PER_NODE": 8}
        slurm |= {"SLURM_JOB_ID": 7, "SLURM_RESTART_COUNT": restarts}
        result = subprocess.run(
            ["bash", "-c", rank_script(request, config, goes_on=goes_on)],
            env=os.environ | {name: str(value) for name, value in slurm.items()},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    return call


def test_a_rank_gets_its_place_and_the_resolved_configuration(play):
    arguments, place, *config = play(rank=9)
    assert arguments == "-m trace_megatron.cli train -c /dev/stdin"
    assert place == "9 16 1 8 it's me"
    assert "  tensor_parallel: 4" in config


@pytest.mark.parametrize(("goes_on", "restarts", "resumes"), [(True, 0, True), (False, 1, True), (False, 0, False)])
def test_a_job_goes_on_where_a_checkpoint_is(play, tmp_path, goes_on, restarts, resumes):
    checkpoint = tmp_path / "runs" / "a" / "checkpoints" / "step_000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").touch()
    assert play(goes_on=goes_on, restarts=restarts)[0].endswith("--resume") == resumes
    assert checkpoint.exists()


def test_a_run_without_a_checkpoint_begins_anew_and_is_kept(play, tmp_path):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "metrics.jsonl").write_text("precious")
    assert not play(goes_on=True, rank=1)[0].endswith("--resume")
    assert (tmp_path / "runs" / "a").exists()  # one rank alone sets it aside
    assert not play(goes_on=True)[0].endswith("--resume")
    assert (tmp_path / "runs" / "a.before-job-7" / "metrics.jsonl").read_text() == "precious"
    assert not (tmp_path / "runs" / "a").exists()


def test_a_server_gets_its_own_gpus():
    config = dataclasses.replace(CONFIG, engine=EngineConfig(tensor_parallel=2))
    request = dataclasses.replace(REQUEST, server_nodes=1)
    assert servers_per_node(request, config) == 4
    script = (
        server_script(request, config).split("exec ")[0].replace("cd /project", "") + "echo $port $CUDA_VISIBLE_DEVICES"
    )
    found = subprocess.run(
        ["bash", "-c", script], env=os.environ | {"SLURM_LOCALID": "3"}, capture_output=True, text=True
    )
    assert found.stdout.strip() == "8003 6,7"
    with pytest.raises(UserError, match="tensor_parallel"):
        servers_per_node(request, dataclasses.replace(CONFIG, engine=EngineConfig(tensor_parallel=3)))
    with pytest.raises(UserError, match=r"tensor_parallel.* found 0"):
        servers_per_node(request, dataclasses.replace(CONFIG, engine=EngineConfig(tensor_parallel=0)))
    with pytest.raises(UserError, match=r"no engine\.urls with --server-nodes, found http://a:1"):
        servers_per_node(request, dataclasses.replace(CONFIG, engine=EngineConfig(urls=("http://a:1",))))


@pytest.mark.parametrize(("code", "rank", "expected"), [(0, 0, 0), (0, 9, 0), (2, 0, -15), (1, 0, 0)])
def test_environment_servers_start_once_a_node_and_end_the_job_if_they_refuse_to_start(tmp_path, code, rank, expected):
    """A Python that notes what is served; a server that ends otherwise (1) is missed by nobody but the run."""
    fake = tmp_path / "python"
    fake.write_text(
        f'#!/bin/bash\ncase "$3" in serve-env) (echo "$@"; cat) >> served-$SLURM_PROCID; exit {code};;\n'
        f'train) sleep 0.1; echo "$@"; exit;; esac\n[ {code} != 2 ]\n'  # a server that refused never answers
    )
    fake.chmod(0o755)
    request = dataclasses.replace(REQUEST, workdir=str(tmp_path), python=str(fake), env_servers=2)
    slurm = {"SLURM_PROCID": rank, "SLURM_NTASKS": 16, "SLURM_LOCALID": rank % 8, "SLURM_NTASKS_PER_NODE": 8}
    slurm |= {"TRAINER_HOSTS": "n0 n1 ", "SLURMD_NODENAME": "n0"}
    result = subprocess.run(
        ["bash", "-c", rank_script(request, CONFIG, goes_on=False)],
        env=os.environ | {name: str(value) for name, value in slurm.items()},
        capture_output=True,
        text=True,
    )
    assert result.returncode == expected, result.stderr
    if expected == 0:
        assert " env.urls=[http://n0:8500,http://n0:8501,http://n1:8500,http://n1:8501]" in result.stdout
    served = (tmp_path / f"served-{rank}").read_text() if rank % 8 == 0 else ""
    assert served.count("serve-env -c /dev/stdin --host n0 --port 850") == served.count("name: reasoning_gym")
    assert len(set(re.findall(r"--port (\d+) --owner \d+", served))) == (2 if rank % 8 == 0 else 0)
    with pytest.raises(UserError, match=r"no env\.urls with --env-servers, found http://a:1"):
        check_request(request, dataclasses.replace(CONFIG, env=EnvConfig(urls=("http://a:1",))))


def test_engines_that_would_be_colocated_are_not_where_servers_sample():
    config = dataclasses.replace(CONFIG, engine=EngineConfig(colocated=True))
    script = rank_script(dataclasses.replace(REQUEST, server_nodes=1), config, goes_on=False)
    assert " engine.colocated=false <<" in script
    assert " engine.colocated=false <<" not in rank_script(REQUEST, config, goes_on=False)


def test_a_job_on_this_machine_is_the_train_command():
    script = local_script(dataclasses.replace(REQUEST, executor="local", nodes=1), CONFIG)
    assert "exec python -m trace_megatron.cli train -c /dev/stdin <<" in script and "RANK" not in script


def test_without_nemo_run_the_environment_is_named(capsys, monkeypatch, tmp_path):
    from trace_megatron.launch.run import launch_job

    monkeypatch.setitem(__import__("sys").modules, "nemo_run", None)
    with pytest.raises(UserError, match="make install-launch"):
        launch_job(REQUEST, CONFIG, follow=False, only_print=True)


def test_nothing_heavy_is_imported(launch_python):
    """The whole command line, and all of launch, in an environment that has no torch."""
    modules = ["cli", *(f"launch.{path.stem}" for path in (ROOT / "trace_megatron" / "launch").glob("*.py"))]
    imports = "; ".join(f"import trace_megatron.{name.removesuffix('.__init__')}" for name in modules)
    found = "[name for name in ('torch', 'vllm', 'megatron', 'transformers') if name in sys.modules]"
    result = subprocess.run(
        [launch_python, "-c", f"import sys; {imports}; print({found})"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.stdout.strip() == "[]", result.stderr


def refused(result: subprocess.CompletedProcess) -> str:
    assert result.returncode == 2, result.stdout + result.stderr
    (sentence,) = result.stderr.strip().splitlines()
    return sentence


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("run: {name: a}\npolicy: {model: model, data_parallel: 2}\n")
    return path


def slurm_options(config: Path) -> list[str]:
    return ["-c", str(config), "--executor", "slurm", "--account", "lab", "--partition", "gpu"]


def test_no_sbatch(launch, config, tmp_path):
    assert "sbatch" in refused(launch(*slurm_options(config), PATH=str(tmp_path)))


def test_an_account_that_slurm_does_not_know(launch, config, tmp_path):
    """Slurm's own words, by a stand-in for sbatch: a real one asks a database that one machine has not."""
    words = "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    sentence = refused(launch(*slurm_options(config), PATH=f"{tmp_path}:{os.environ['PATH']}"))
    assert words in sentence and "--account" in sentence


def test_a_server_that_does_not_answer(launch, config):
    sentence = refused(launch(*slurm_options(config), "--tunnel", "ssh://ada@127.0.0.1:1"))
    assert "ssh://ada@127.0.0.1:1" in sentence and "Traceback" not in sentence


def test_nodes_that_do_not_divide_the_ranks(launch, config):
    assert "2 trainer ranks" in refused(launch(*slurm_options(config), "--nodes", "3"))


def test_a_dry_run_needs_no_cluster_and_writes_nothing(launch, config, tmp_path):
    before = set(tmp_path.rglob("*"))
    result = launch(*slurm_options(config), "--tunnel", "ssh://ada@127.0.0.1:1", "--dry-run", PATH=os.environ["PATH"])
    assert result.returncode == 0, result.stderr
    assert "#SBATCH --account=lab" in result.stdout and "data_parallel: 2" in result.stdout
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (2, 1)])
def test_a_job_on_this_machine_prints_to_its_last_line(launch, config, tmp_path, code, expected):
    (tmp_path / "python").write_text(f"#!/bin/bash\necho \"$@\"; grep parallel; echo 'last words' >&2; exit {code}\n")
    (tmp_path / "python").chmod(0o755)
    result = launch("-c", str(config), "--workdir", str(tmp_path), "--python", "./python")
    assert result.returncode == expected, result.stderr
    lines = result.stdout.splitlines()
    assert "train -c /dev/stdin" in lines[0] and "  data_parallel: 2" in lines and lines[-1] == "last words"
