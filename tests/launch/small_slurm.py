"""A real Slurm on this machine: munge, a controller, two nodes by two names of it, all in one temporary folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
UP_S = 30.0


def missing_programs() -> list[str]:
    """What of Slurm is not installed; daemons live outside a user's PATH."""
    return [name for name in PROGRAMS if _find(name) is None]


def _find(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


@contextmanager
def small_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Start it, yield the environment in which Slurm's commands find it, and end every process of it. Needs root."""
    nodes = (socket.gethostname().split(".")[0], "localhost")
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    _write_config(folder, nodes)
    daemons = []
    try:
        daemons.append(_start_munge(folder))
        configured = ["-D", "-f", str(folder / "slurm.conf")]
        daemons.append(_start([_find("slurmctld"), *configured], folder, environment))
        daemons += [_start([_find("slurmd"), *configured, "-N", node], folder, environment) for node in nodes]
        _wait_until_idle(folder, environment, daemons)
        yield environment
    finally:
        subprocess.run(["scancel", "--user", "root"], env=environment, capture_output=True)
        _wait(lambda: not _output(["squeue", "--noheader"], environment).strip(), UP_S)
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _write_config(folder: Path, nodes: Sequence[str]) -> None:
    for name in ("state", "munge", *(f"spool/{node}" for node in nodes)):
        (folder / name).mkdir(parents=True)
    (folder / "munge").chmod(0o755)
    controller_port, *node_ports = _free_ports(1 + len(nodes))
    described = "\n".join(
        f"NodeName={node} NodeHostname={nodes[0]} NodeAddr=127.0.0.1 Port={port} CPUs={os.cpu_count()} RealMemory=2000"
        for node, port in zip(nodes, node_ports, strict=True)
    )
    (folder / "slurm.conf").write_text(f"""
ClusterName=test
SlurmctldHost={nodes[0]}(127.0.0.1)
SlurmctldPort={controller_port}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1
DependencyParameters=kill_invalid_depend
KillWait=20
ReturnToService=2
MpiDefault=none
{described}
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""")


def _start_munge(folder: Path) -> subprocess.Popen:
    place = folder / "munge"
    (place / "key").write_bytes(os.urandom(128))
    (place / "key").chmod(0o400)
    names = ("socket", "key-file", "pid-file", "log-file", "seed-file")
    files = [f"--{name}={place}/{name.split('-')[0]}" for name in names]
    daemon = _start([_find("munged"), "--foreground", "--force", *files], folder, os.environ)
    if not _wait(lambda: (place / "socket").exists(), UP_S):
        raise RuntimeError(f"munged did not start: {(folder / 'munged.out').read_text()}")
    return daemon


def _start(command: Sequence[str], folder: Path, environment: dict[str, str]) -> subprocess.Popen:
    with open(folder / f"{Path(command[0]).name}.out", "a") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder)


def _wait_until_idle(folder: Path, environment: dict[str, str], daemons: Sequence[subprocess.Popen]) -> None:
    idle = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
    ready = _wait(lambda: _output(idle, environment).strip() == "2", UP_S)
    if not ready or any(daemon.poll() is not None for daemon in daemons):
        logs = "\n".join(path.read_text() for path in folder.glob("slurm*.out"))
        raise RuntimeError(f"Slurm did not start: {logs}")


def _output(command: Sequence[str], environment: dict[str, str]) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout


def _wait(condition, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for listener in sockets:
        listener.bind(("127.0.0.1", 0))
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports
