"""The command line. A mistake in the input ends in one sentence and exit code 2."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from trace_megatron.config import load_config
from trace_megatron.errors import RolloutError, UserError
from trace_megatron.launch.local import run_ranks
from trace_megatron.log import say
from trace_megatron.rollout.engine import EngineError
from trace_megatron.run_folder import RunFolder

# What needs torch or NumPy is imported where a command needs it: `launch` works on a login node without either.

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

ConfigPath = Annotated[Path, typer.Option("-c", "--config", help="YAML file of the run.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value ...", show_default=False)]


@app.callback()
def trace_megatron() -> None:
    """TRACE on Megatron-Core and vLLM: rollouts where outcomes are undecided."""


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
) -> None:
    """Train a policy: one process per rank, started here or by torchrun."""
    resolved = load_config(config, overrides or [])
    folder = RunFolder.of(resolved)
    is_rank = "RANK" in os.environ  # of torchrun, or of Slurm's srun as `launch` starts it
    prepares = not is_rank or os.environ["RANK"] == "0"
    if resume and folder.is_finished(resolved):
        if prepares:
            say(f"nothing to resume: the run at '{folder.root}' has all its {resolved.run.steps} steps")
        return
    from trace_megatron.checks import check_config, check_servers

    check_config(resolved)
    if prepares:
        check_servers(resolved)
        folder.prepare(resolved, resume)
    if is_rank:
        from trace_megatron.train import run_rank

        sys.exit(run_rank(folder, resolved, resume))
    arguments = [str(folder.root), *(["--resume"] if resume else [])]
    sys.exit(run_ranks([sys.executable, "-m", "trace_megatron.train", *arguments], resolved.policy.num_ranks))


@app.command()
def launch(
    config: ConfigPath,
    overrides: Overrides = None,
    executor: Annotated[str, typer.Option(help="'local': this machine; 'slurm': a cluster.")] = "local",
    account: Annotated[str, typer.Option(help="Slurm account.")] = "",
    partition: Annotated[str, typer.Option(help="Slurm partition.")] = "",
    nodes: Annotated[int, typer.Option(help="Nodes; they share the trainer ranks evenly.")] = 1,
    gpus: Annotated[int | None, typer.Option(help="GPUs of a node, 0: none.  [default: one a rank]")] = None,
    server_nodes: Annotated[int, typer.Option(help="Further nodes, on which vLLM servers sample.")] = 0,
    env_servers: Annotated[int, typer.Option(help="Environment servers on each of the nodes.")] = 0,
    container: Annotated[str, typer.Option(help="Container image (Slurm's pyxis).")] = "",
    mounts: Annotated[str, typer.Option(help="SOURCE:TARGET,... for the container, beside --workdir.")] = "",
    time: Annotated[str, typer.Option(help="Time limit of a job, HH:MM:SS.")] = "04:00:00",
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for every rank; repeatable.")] = None,
    sbatch: Annotated[list[str] | None, typer.Option(help="KEY=VALUE for sbatch, e.g. qos=long; repeatable.")] = None,
    tunnel: Annotated[str, typer.Option(help="'local': sbatch is here; ssh://USER@HOST: there.")] = "local",
    workdir: Annotated[str, typer.Option(help="Folder to start in, there.  [default: the current one]")] = "",
    python: Annotated[str, typer.Option(help="Python of the training environment, there.")] = ".venv/bin/python",
    chain: Annotated[int, typer.Option(help="Jobs in a row, each resumes the one before.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="The first job resumes, too.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Print the jobs' logs until they end.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the scripts with the configuration; submit nothing.")
    ] = False,
) -> None:
    """Train as a job of NeMo-Run: on this machine, or on Slurm."""
    from trace_megatron.launch.job import LaunchRequest
    from trace_megatron.launch.run import launch_job

    request = LaunchRequest(
        executor=executor,
        account=account,
        partition=partition,
        nodes=nodes,
        gpus=gpus,
        container=container,
        mounts=tuple(filter(None, mounts.split(","))),
        time=time,
        env=tuple(env or ()),
        sbatch=tuple(sbatch or ()),
        tunnel=tunnel,
        workdir=workdir or os.getcwd(),
        python=python,
        chain=chain,
        resume=resume,
        server_nodes=server_nodes,
        env_servers=env_servers,
    )
    sys.exit(launch_job(request, load_config(config, overrides or []), follow=follow, only_print=dry_run))


@app.command("serve-env")
def serve_env(
    config: ConfigPath,
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Address to listen at; one of a network needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.")] = 8500,
    owner: Annotated[int, typer.Option(help="Process id with which the server ends.", show_default=False)] = 0,
) -> None:
    """Serve the configuration's environment to runs on other hosts, which name it in env.urls."""
    from trace_megatron.envs.server import serve_environment
    from trace_megatron.serving import end_with

    if owner:
        end_with(owner)
    serve_environment(load_config(config, overrides or []).env, host, port)


@app.command("eval")
def evaluate(config: ConfigPath, overrides: Overrides = None) -> None:
    """avg@k of a checkpoint (eval.checkpoint) on benchmarks (eval.benchmarks); goes on where it was interrupted."""
    from trace_megatron.eval import evaluate_policy
    from trace_megatron.eval.table import describe_summaries

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the engine is closed
    typer.echo(describe_summaries(evaluate_policy(load_config(config, overrides or []))))


@app.command()
def simulate(
    config: ConfigPath,
    overrides: Overrides = None,
    selectors: Annotated[
        str, typer.Option(help="Methods to compare, with spaces between.")
    ] = "uniform pcl treepo trace",
    shapes: Annotated[str, typer.Option(help="Budgets to compare as 'M,N M,N ...'; empty: those of equal cost.")] = "",
) -> None:
    """Spend the budget on outcomes drawn from a stated model: which method, which (M, N) finds most contrast."""
    from trace_megatron.simulate.compare import advise, compare_methods, compare_shapes, parse_shapes
    from trace_megatron.simulate.table import describe_rows

    resolved = load_config(config, overrides or [])
    rows = compare_methods(resolved, selectors.split())
    other = compare_shapes(resolved, parse_shapes(shapes))
    typer.echo(describe_rows("methods at one budget", rows))
    typer.echo(describe_rows(f"budgets of {resolved.method.selector}", other))
    if not shapes:
        typer.echo(advise(other))


convert = typer.Typer(no_args_is_help=True, help="Hugging Face folder <-> Megatron-Core distributed checkpoint.")
app.add_typer(convert, name="convert")

Source = Annotated[Path, typer.Argument(help="Folder to read.", show_default=False)]
Target = Annotated[Path, typer.Argument(help="Folder to write; must not exist.", show_default=False)]
Verify = Annotated[bool, typer.Option("--verify", help="Compare logits; takes either model's memory in float32.")]


@convert.command()
def hf_to_megatron(
    source: Source,
    target: Target,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks to cut for.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages to cut for.")] = 1,
    ep: Annotated[int, typer.Option(help="Expert-parallel ranks to cut for.")] = 1,
    verify: Verify = False,
) -> None:
    """Write a checkpoint that Megatron-Core loads, at this layout or any other."""
    from trace_megatron.memory import keep_freed_memory
    from trace_megatron.policy import convert as conversion
    from trace_megatron.policy.names import ParallelSizes

    keep_freed_memory()
    gc.freeze()  # what was imported stays, and need not be gone through at every collection
    conversion.hf_to_megatron(source, target, ParallelSizes(tp, pp, ep))
    if verify:
        _compare(source, target)


@convert.command()
def megatron_to_hf(
    source: Source,
    target: Target,
    like: Annotated[Path | None, typer.Option(help="HF folder of config and tokenizer, if SOURCE has none.")] = None,
    verify: Verify = False,
) -> None:
    """Write a folder that transformers and vLLM load."""
    from trace_megatron.memory import keep_freed_memory
    from trace_megatron.policy import convert as conversion

    keep_freed_memory()
    gc.freeze()  # what was imported stays, and need not be gone through at every collection
    conversion.megatron_to_hf(source, target, like)
    if verify:
        _compare(target, source)


def _compare(hf_folder: Path, megatron_folder: Path) -> None:
    from trace_megatron.policy.convert_check import compare_logits

    say(f"logits agree to {compare_logits(hf_folder, megatron_folder):.1e} of the largest")


@app.command()
def plan(config: ConfigPath, overrides: Overrides = None) -> None:
    """Memory by part and seconds by phase on the stated device; refuses what cannot fit and proposes what does."""
    from trace_megatron.checks import check_engine
    from trace_megatron.plan.table import describe_plan

    resolved = load_config(config, overrides or [])
    check_engine(resolved)
    for line in describe_plan(resolved):
        typer.echo(line)


@app.command()
def report(config: ConfigPath, overrides: Overrides = None) -> None:
    """Write runs/NAME/report.html: curves, times, trees and configuration of a run."""
    from trace_megatron.report.html import write_report
    from trace_megatron.rollout.chat import decoder

    resolved = load_config(config, overrides or [])
    typer.echo(write_report(RunFolder.of(resolved).root, decoder(resolved.policy.model)))


@app.command("inspect")
def inspect_trees(
    config: ConfigPath,
    overrides: Overrides = None,
    step: Annotated[int, typer.Option(help="Step; 0: the last one.")] = 0,
    tree: Annotated[int, typer.Option(help="Number of a tree to print in full; -1: list them all.")] = -1,
) -> None:
    """Read a run's rollout trees: a list of a step's trees, or one with its text."""
    from trace_megatron.report.tree_view import describe_trees, draw_tree
    from trace_megatron.rollout.chat import decoder
    from trace_megatron.tree_files import read_step

    resolved = load_config(config, overrides or [])
    trees = read_step(RunFolder.of(resolved).trees, step)
    if tree < 0:
        lines = describe_trees(trees)
    elif tree < len(trees):
        lines = draw_tree(trees[tree], decoder(resolved.policy.model))
    else:
        raise UserError(f"expected --tree below {len(trees)}, the trees of that step, found {tree}")
    for line in lines:
        typer.echo(line)


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Option("-c", "--config", help="Also check this run's configuration.")] = None,
    overrides: Overrides = None,
) -> None:
    """What this machine has and lacks for a run."""
    from trace_megatron.doctor import Verdict, examine

    findings = list(examine(load_config(config, overrides or []) if config else None))
    for finding in findings:
        typer.echo(finding)
    if any(finding.verdict is Verdict.WRONG for finding in findings):
        sys.exit(2)


def main() -> None:
    """Entry point of ``trace-megatron``."""
    try:
        app()
    except UserError as error:
        say(f"error: {error}")
        sys.exit(2)
    except (EngineError, RolloutError) as error:
        say(f"error: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
