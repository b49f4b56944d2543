"""Jobs through NeMo-Run: on this machine, or on Slurm by a local or an SSH tunnel.

NeMo-Run renders the batch script, copies it to the cluster and keeps its record of the job below NEMORUN_HOME (its
`nemo experiment` commands find it there). What a rank does is in ``job.py``.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nemo_run as run
from invoke.exceptions import UnexpectedExit
from nemo_run.config import get_nemorun_home
from nemo_run.core.tunnel.client import Tunnel
from nemo_run.run.job import Job
from torchx.specs import AppState

from trace_megatron.config import Config
from trace_megatron.errors import UserError
from trace_megatron.launch.job import (
    TOKEN_LINES,
    LaunchRequest,
    local_script,
    rank_script,
    sbatch_options,
    server_script,
    servers_per_node,
    tasks_per_node,
)

SBATCH = "sbatch --requeue --parsable"  # as NeMo-Run calls it
_CONNECT_S = 15
_POLL_S = 0.5
_RUNNING = (AppState.UNSUBMITTED, AppState.SUBMITTED, AppState.PENDING, AppState.RUNNING)


@dataclass(frozen=True, slots=True)
class Submitted:
    """Jobs of one launch that Slurm has accepted."""

    job_ids: tuple[str, ...]
    folders: tuple[str, ...]
    """On the cluster, one a job: its logs."""
    tunnel: Tunnel


def dry_run(request: LaunchRequest, config: Config) -> Iterator[str]:
    """Every script of the launch, as it would be submitted, with the command; nothing is kept, nothing connected."""
    with tempfile.TemporaryDirectory(prefix="trace-megatron-") as scratch:
        experiment = _experiment(request, config, scratch, number="NUMBER")
        with experiment:
            _add_jobs(experiment, request, config)
            experiment.dryrun(log=False, delete_exp_dir=False)
            for index in range(len(experiment.jobs)):
                yield from _describe(request, experiment, index)


def _describe(request: LaunchRequest, experiment: run.Experiment, index: int) -> Iterator[str]:
    job = experiment.jobs[index]
    scripts = sorted(Path(job.executor.job_dir, "scripts").glob("*.sh"))
    if request.executor == "local":
        yield "# job on this machine"
        yield scripts[0].read_text()
        return
    folder = job.executor.tunnel.job_dir
    dependency = f" --dependency=afterany:JOB_{index}" if index else ""
    yield f"# job {index + 1} of {request.chain}: {SBATCH}{dependency} {folder}/{job.id}_sbatch.sh"
    yield Path(job.executor.experiment_dir, f"{job.id}_sbatch.sh").read_text()
    for who, script in zip(("rank", "server"), scripts, strict=False):
        yield f"# every {who} of job {index + 1}: {folder}/{job.id}/scripts/{script.name}"
        yield script.read_text()


def run_here(request: LaunchRequest, config: Config) -> int:
    """Run the job on this machine with its output on ours; returns its exit code: 0 or 1. It ends with us."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    experiment = _experiment(request, config, get_nemorun_home(), number=str(time.time_ns()))
    with experiment:
        _add_jobs(experiment, request, config)
        experiment.run()
        (job,) = experiment.jobs
        try:
            _print_until_ended(experiment, job)
        except BaseException:
            experiment.cancel(job.id)
            raise
    return 0 if job.state is AppState.SUCCEEDED else 1


def _print_until_ended(experiment: run.Experiment, job: Job) -> None:
    # NeMo-Run can print a job's output itself, but not always to its last line.
    printed = 0
    running = True
    while running:
        running = experiment.status(return_dict=True)[job.id]["status"] in _RUNNING
        for log in Path(job.executor.job_dir).glob("nemo_run/*/*/0/combined.log"):
            news = log.read_bytes()[printed:]
            printed += len(news)
            sys.stdout.write(news.decode(errors="replace"))
            sys.stdout.flush()
        time.sleep(_POLL_S)


def submit(request: LaunchRequest, config: Config) -> Submitted:
    """Hand all jobs of the chain to Slurm. Raises UserError with what the cluster answered where it refuses."""
    tunnel = connected(request)
    experiment = _experiment(request, config, get_nemorun_home(), number=str(time.time_ns()))
    with experiment:
        _add_jobs(experiment, request, config)
        try:
            experiment.run(detach=True)
        except UnexpectedExit as error:
            raise UserError(
                f"expected Slurm to accept the job, found that '{error.result.command}' answered: "
                f"{_sentence(error.result.stderr or error.result.stdout)}; check --account, --partition, --nodes, "
                f"--gpus and --time, of which sacctmgr and sinfo show what is there"
            ) from error
    folders = tuple(f"{job.executor.tunnel.job_dir}/{job.id}" for job in experiment.jobs)
    return Submitted(tuple(job.handle.split("/")[-1] for job in experiment.jobs), folders, tunnel)


def connected(request: LaunchRequest) -> Tunnel:
    """A tunnel that reaches the cluster's sbatch. Raises UserError where there is no way, or no sbatch at its end."""
    tunnel = _tunnel(request)
    where = "this machine"
    if request.address is not None:
        where = f"'{request.address.host}'"
        _connect(tunnel, request)
    if tunnel.run("command -v sbatch", warn=True).failed:
        raise UserError(
            f"expected Slurm's sbatch on {where}, found none: launch on a login node, or name one with --tunnel "
            f"ssh://USER@HOST"
        )
    return tunnel


def _connect(tunnel: run.SSHTunnel, request: LaunchRequest) -> None:
    import paramiko
    from fabric import Connection

    address = request.address
    tunnel.session = Connection(address.host, user=address.user, port=address.port, connect_timeout=_CONNECT_S)
    try:
        tunnel.session.open()
    except (OSError, paramiko.SSHException, EOFError) as error:
        raise UserError(
            f"expected an SSH server that lets us in at '{request.tunnel}', found: {_sentence(error)}; try 'ssh "
            f"{address.host}' first: a key or an agent is needed, and the host must be known"
        ) from error


def _tunnel(request: LaunchRequest) -> run.LocalTunnel | run.SSHTunnel:
    address = request.address
    if address is None:
        return run.LocalTunnel(job_dir=os.path.join(get_nemorun_home(), "experiments"))
    remote = f"{request.workdir}/.nemo_run/experiments"
    return run.SSHTunnel(host=address.host, user=address.user, port=address.port, job_dir=remote)


def _experiment(request: LaunchRequest, config: Config, base_dir: str, number: str) -> run.Experiment:
    logging.getLogger("torchx").setLevel(logging.ERROR)
    return run.Experiment(
        config.run.name,
        executor=_executor(request, config),
        id=f"{config.run.name}_{number}",
        log_level="WARNING",
        base_dir=base_dir,
        clean_mode=True,
        enable_goodbye_message=False,
        skip_status_at_exit=True,
        serialize_metadata_for_scripts=False,
    )


def _add_jobs(experiment: run.Experiment, request: LaunchRequest, config: Config) -> None:
    if request.executor == "local":
        experiment.add(run.Script(inline=local_script(request, config)), name=config.run.name)
        return
    previous: list[str] = []
    for index in range(request.chain):
        task = run.Script(inline=rank_script(request, config, goes_on=request.resume or index > 0))
        executor = _executor(request, config)
        if request.server_nodes:
            task = [task, run.Script(inline=server_script(request, config))]
            executor = [executor, _server_executor(executor, request, config)]
        name = config.run.name if request.chain == 1 else f"{config.run.name}-{index + 1}"
        previous = [experiment.add(task, executor=executor, name=name, dependencies=previous)]


def _executor(request: LaunchRequest, config: Config) -> run.LocalExecutor | run.SlurmExecutor:
    if request.executor == "local":
        return run.LocalExecutor(packager=run.Packager())
    per_node = tasks_per_node(request, config)
    # Where ranks meet; the port is the job's own, so that two jobs of a node do not meet.
    variables = {"MASTER_ADDR": "$head_node", "MASTER_PORT": "$((20000 + SLURM_JOB_ID % 10000))"}
    if request.env_servers:
        variables["TRAINER_HOSTS"] = _hosts("$SLURM_JOB_NODELIST")
    mounts = [f"{request.workdir}:{request.workdir}", *request.mounts]
    return run.SlurmExecutor(
        account=request.account,
        partition=request.partition,
        job_name_prefix="trace-megatron.",
        time=request.time,
        nodes=request.nodes,
        ntasks_per_node=per_node,
        gpus_per_node=per_node if request.gpus is None else request.gpus or None,
        exclusive=True,
        mem="0",  # all of the node's
        container_image=request.container or None,
        container_mounts=mounts if request.container else [],
        env_vars=variables,
        setup_lines=TOKEN_LINES if request.env_servers else None,
        additional_parameters=sbatch_options(request.sbatch),
        dependency_type="afterany",  # a job that ran into its time limit has failed, says Slurm
        tunnel=_tunnel(request),
        packager=run.Packager(),
        poll_estimated_start_time=False,
    )


def _server_executor(trainer: run.SlurmExecutor, request: LaunchRequest, config: Config) -> run.SlurmExecutor:
    """The second group of a heterogeneous job; ``trainer``, the first, learns of it."""
    trainer.heterogeneous = True
    trainer.env_vars["SERVER_HOSTS"] = _hosts("$SLURM_JOB_NODELIST_HET_GROUP_1")
    trainer.wait_time_for_group_job = 0
    trainer.monitor_group_job_wait_time = 5  # when a group ends, the other one is ended
    server = trainer.clone()
    server.nodes = request.server_nodes
    server.ntasks_per_node = servers_per_node(request, config)
    return server


def _hosts(node_list: str) -> str:
    """Bash for a list of nodes, with spaces between."""
    return f'"$(scontrol show hostnames {node_list} | tr "\\n" " ")"'


def _sentence(error: object) -> str:
    return " ".join(str(error).split()) or type(error).__name__
