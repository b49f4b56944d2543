"""What `trace-megatron launch` was asked for, checked, and the script that every rank of the job runs.

Plain text from plain values: neither NeMo-Run nor torch is needed here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import yaml

from trace_megatron.config import ENV_TOKEN, Config, dump_config
from trace_megatron.errors import UserError
from trace_megatron.rollout.serve_flags import SERVE_FLAGS
from trace_megatron.run_folder import RunFolder

_SLURM_TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d\d?(:\d\d){0,2}")
_SSH = re.compile(r"ssh://((?P<user>[^@/:]+)@)?(?P<host>[^@/:]+)(:(?P<port>\d+))?")
FIRST_PORT = 8000
"""Of a server node's servers."""
FIRST_ENV_PORT = 8500
"""Of a trainer node's environment servers."""
TOKEN_LINES = f"""{{ set +x; }} 2> /dev/null  # the token of the environment servers is not for the log
export {ENV_TOKEN}=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')
set -x"""
"""For the batch script, whose variables all tasks get."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class SSHAddress:
    """A cluster's login node; the user's SSH configuration fills in what is left out."""

    host: str
    user: str | None
    port: int | None


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """The options of ``trace-megatron launch``. ``check_request`` finds what cannot work."""

    executor: Literal["local", "slurm"]
    account: str
    partition: str
    nodes: int
    gpus: int | None
    """GPUs of a node, one for each trainer rank; None: as many as ranks; 0: a cluster without GPUs."""
    container: str
    """Image for Slurm's pyxis plug-in; empty: none."""
    mounts: tuple[str, ...]
    """SOURCE:TARGET for the container, beside the working folder, which is always mounted under its own name."""
    time: str
    """Slurm's limit of one job, as sbatch reads it."""
    env: tuple[str, ...]
    """NAME=VALUE for every rank."""
    sbatch: tuple[str, ...]
    """KEY=VALUE of further options of sbatch."""
    tunnel: str
    """``local``: sbatch runs here; ``ssh://USER@HOST``: there."""
    workdir: str
    """Folder where the job starts: relative paths of the configuration begin there."""
    python: str
    """Python of the training environment, seen from ``workdir``."""
    chain: int
    """Jobs that follow one another; each goes on where the one before was stopped."""
    resume: bool
    """Let the first job go on, too."""
    server_nodes: int = 0
    """Further nodes on which `vllm serve` samples for the trainer; 0: the run starts its engines itself."""
    env_servers: int = 0
    """Environment servers on each trainer node; 0: the environment is in the first rank's process."""

    @property
    def address(self) -> SSHAddress | None:
        """Of the tunnel; None: this machine. Raises UserError."""
        if self.tunnel == "local":
            return None
        match = _SSH.fullmatch(self.tunnel)
        if match is None:
            raise UserError(f"expected --tunnel local or ssh://USER@HOST, found '{self.tunnel}'")
        return SSHAddress(match["host"], match["user"], int(match["port"]) if match["port"] else None)


def check_request(request: LaunchRequest, config: Config) -> None:
    """Raise UserError for what no executor could run."""
    if request.executor not in ("local", "slurm"):
        raise UserError(f"expected --executor local or slurm, found '{request.executor}'")
    if request.chain < 1:
        raise UserError(f"expected --chain of at least 1, found {request.chain}")
    for option, entries in (("--env", request.env), ("--sbatch", request.sbatch)):
        for entry in entries:
            name, separator, _ = entry.partition("=")
            if not separator or not _NAME.fullmatch(name.replace("-", "_")):
                raise UserError(f"expected {option} NAME=VALUE, found '{entry}'")
    if not re.fullmatch(r"[\w.-]+", config.run.name):
        raise UserError(
            f"expected letters, digits, '.', '_' and '-' in run.name, the name of the job, found '{config.run.name}'"
        )
    if request.executor == "local":
        _check_local(request)
        return
    for option, value in (("--account", request.account), ("--partition", request.partition)):
        if not value:
            raise UserError(
                f"expected {option} for --executor slurm, found none: sacctmgr and sinfo list those you have"
            )
    if not _SLURM_TIME.fullmatch(request.time):
        raise UserError(
            f"expected --time as minutes, HH:MM:SS or DAYS-HH:MM:SS, found '{request.time}': write 04:00:00 for 4 hours"
        )
    if request.mounts and not request.container:
        raise UserError("expected --container with --mounts, found none: without a container nothing needs mounting")
    if not request.workdir.startswith("/"):
        raise UserError(f"expected an absolute --workdir, found '{request.workdir}': ~ of another machine is not ours")
    _ = request.address
    tasks_per_node(request, config)
    servers_per_node(request, config)
    if request.env_servers < 0:
        raise UserError(f"expected --env-servers of at least 0, found {request.env_servers}")
    if request.env_servers and config.env.urls:
        raise UserError(
            f"expected no env.urls with --env-servers, found {', '.join(config.env.urls)}: the job's own servers take "
            f"their place, so leave out one of the two"
        )


def _check_local(request: LaunchRequest) -> None:
    if request.nodes != 1:
        raise UserError(f"expected --nodes 1 for --executor local, found {request.nodes}: use --executor slurm")
    if request.chain != 1:
        raise UserError(f"expected --chain 1 for --executor local, found {request.chain}: nothing limits its time")
    given = {
        "--account": request.account,
        "--partition": request.partition,
        "--gpus": request.gpus is not None,
        "--server-nodes": request.server_nodes,
        "--env-servers": request.env_servers,
        "--container": request.container,
        "--mounts": request.mounts,
        "--sbatch": request.sbatch,
        "--tunnel": request.tunnel != "local",
    }
    wrong = [option for option, value in given.items() if value]
    if wrong:
        raise UserError(
            f"expected no {', '.join(wrong)} for --executor local: add --executor slurm, whose options they are"
        )


def tasks_per_node(request: LaunchRequest, config: Config) -> int:
    """Trainer ranks of one node. Raises UserError where nodes, GPUs and ranks do not go together."""
    ranks = config.policy.num_ranks
    layout = (
        f"{ranks} trainer ranks (policy.tensor_parallel {config.policy.tensor_parallel} x pipeline_parallel "
        f"{config.policy.pipeline_parallel} x context_parallel {config.policy.context_parallel} x data_parallel "
        f"{config.policy.data_parallel})"
    )
    if request.nodes < 1 or ranks % request.nodes:
        divisors = [str(count) for count in range(1, ranks + 1) if ranks % count == 0]
        raise UserError(
            f"expected --nodes to divide the {layout}, found {request.nodes}: use one of {', '.join(divisors)}, or "
            f"change policy.data_parallel"
        )
    per_node = ranks // request.nodes
    if request.gpus not in (None, 0, per_node):
        raise UserError(
            f"expected a GPU for each of the {layout}, found --nodes {request.nodes} x --gpus {request.gpus}: use "
            f"--gpus {per_node}, or change policy.data_parallel"
        )
    return per_node


def servers_per_node(request: LaunchRequest, config: Config) -> int:
    """Servers on a node of the server group, each with ``engine.tensor_parallel`` GPUs; without GPUs one."""
    gpus = tasks_per_node(request, config) if request.gpus is None else request.gpus
    size = config.engine.tensor_parallel
    if request.server_nodes < 0:
        raise UserError(f"expected --server-nodes of at least 0, found {request.server_nodes}")
    if size < 1:
        raise UserError(f"expected engine.tensor_parallel of at least 1, found {size}")
    if request.server_nodes and config.engine.urls:
        raise UserError(
            f"expected no engine.urls with --server-nodes, found {', '.join(config.engine.urls)}: the job's own "
            f"servers take their place, so leave out one of the two"
        )
    if request.server_nodes and gpus % size:
        raise UserError(f"expected engine.tensor_parallel to divide the {gpus} GPUs of a server's node, found {size}")
    return max(gpus // size, 1)


def server_script(request: LaunchRequest, config: Config) -> str:
    """Bash for one task of the server group: a `vllm serve`, which listens at its node's own address."""
    engine = config.engine
    length = engine.max_model_len or config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    lines = [*_opening(request), "export VLLM_SERVER_DEV_MODE=1", f"port=$(({FIRST_PORT} + SLURM_LOCALID))"]
    flags = [
        f"--model {shlex.quote(config.policy.model)} --dtype {engine.dtype} --seed {config.run.seed}",
        f"--tensor-parallel-size {engine.tensor_parallel} --max-num-seqs {engine.max_num_seqs}",
        f"--max-model-len {length}",
        SERVE_FLAGS,
    ]
    if request.gpus == 0:  # what engines of the run's own get on a CPU, for the reasons in rollout/vllm_engine.py
        batched = max(length, engine.max_num_seqs, 4096)
        flags.append(f"--enforce-eager --block-size 32 --no-enable-chunked-prefill --max-num-batched-tokens {batched}")
    else:
        lines.append(f"first=$((SLURM_LOCALID * {engine.tensor_parallel}))")
        lines.append(f"export CUDA_VISIBLE_DEVICES=$(seq -s , $first $((first + {engine.tensor_parallel - 1})))")
    server = f"exec {shlex.quote(request.python)} -m vllm.entrypoints.openai.api_server"
    lines.append(" \\\n    ".join([f'{server} --host "$SLURMD_NODENAME" --port $port', *flags]))
    return "\n".join(lines) + "\n"


def rank_script(request: LaunchRequest, config: Config, *, goes_on: bool) -> str:
    """Bash for one rank of a Slurm job. ``goes_on``: resume where a checkpoint is; a requeued job does so, too.

    The last command becomes the training process itself, so that Slurm's signals and exit code are its own.
    """
    folder = shlex.quote(str(RunFolder.of(config).root))
    again = "1" if goes_on else "${SLURM_RESTART_COUNT:-0}  # of a job that Slurm queued again"
    lines = [
        *_opening(request),
        "export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS",
        "export LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE",
        f"run={folder}",
        f"again={again}",
        "resume=",
        'if [ "$again" -gt 0 ]; then',
        '    if compgen -G "$run/checkpoints/step_*/state.json" > /dev/null; then',
        "        resume=--resume",
        '    elif [ -e "$run" ] && [ "$RANK" = 0 ]; then  # it never reached a checkpoint: begin anew',
        '        mv "$run" "$run.before-job-$SLURM_JOB_ID"',
        "    fi",
        "fi",
    ]
    options = ["$resume"]
    if request.env_servers:
        lines += _start_env_servers(request, config)
    if request.server_nodes:
        lines += _await_servers(request, "urls", "$SERVER_HOSTS", FIRST_PORT, servers_per_node(request, config))
        options += ['"engine.urls=[${urls#,}]" "sync.address=$MASTER_ADDR" engine.colocated=false']
    if request.env_servers:
        lines += _await_servers(request, "env_urls", "$TRAINER_HOSTS", FIRST_ENV_PORT, request.env_servers)
        options += ['"env.urls=[${env_urls#,}]"']
    return "\n".join([*lines, _train(request, config, " ".join(options))])


def local_script(request: LaunchRequest, config: Config) -> str:
    """Bash for a job on this machine: one command, which starts its ranks itself."""
    return "\n".join([*_opening(request), _train(request, config, "--resume" if request.resume else "")])


def _start_env_servers(request: LaunchRequest, config: Config) -> list[str]:
    """By the first rank of each node, with which they end. One that refuses to start ends the rank, and so the job."""
    server = f"{shlex.quote(request.python)} -m trace_megatron.cli serve-env -c /dev/stdin"
    section = yaml.safe_dump({"env": yaml.safe_load(dump_config(config))["env"]}, sort_keys=False)
    return [
        f"for port in {_ports(FIRST_ENV_PORT, request.env_servers)}; do",
        '    [ "$LOCAL_RANK" = 0 ] || continue',
        f"    {{ {server} --host \"$SLURMD_NODENAME\" --port $port --owner $$ || [ $? != 2 ] || kill $$; }} <<'ENV' &",
        f"{section}ENV",
        "done",
    ]


def _await_servers(request: LaunchRequest, name: str, hosts: str, first_port: int, count: int) -> list[str]:
    """The servers' addresses in the variable ``name``; the first rank waits until all answer."""
    ask = "import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)"
    return [
        f"{name}=",
        f"for host in {hosts}; do",
        f"    for port in {_ports(first_port, count)}; do",
        f'        {name}="${name},http://$host:$port"',
        f"        until [ \"$RANK\" != 0 ] || {shlex.quote(request.python)} -c '{ask}' http://$host:$port/health; do",
        "            sleep 1",
        "        done 2> /dev/null",
        "    done",
        "done",
    ]


def _ports(first: int, count: int) -> str:
    return " ".join(str(first + index) for index in range(count))


def _opening(request: LaunchRequest) -> list[str]:
    pairs = [entry.partition("=") for entry in request.env]
    exports = [f"export {name}={shlex.quote(value)}" for name, _, value in pairs]
    return ["set -eu", f"cd {shlex.quote(request.workdir)}", *exports]


def _train(request: LaunchRequest, config: Config, resume: str) -> str:
    # The configuration is the script's own: what was printed runs, whatever happens to the file meanwhile.
    command = f"exec {shlex.quote(request.python)} -m trace_megatron.cli train -c /dev/stdin {resume}".rstrip()
    return f"{command} <<'CONFIG'\n{dump_config(config)}CONFIG\n"


def sbatch_options(entries: Sequence[str]) -> dict[str, str]:
    """``--sbatch KEY=VALUE ...`` by NeMo-Run's names."""
    pairs = [entry.partition("=") for entry in entries]
    return {key.replace("-", "_"): value for key, _, value in pairs}
