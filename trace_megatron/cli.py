"""The command line. A mistake in the input ends in one sentence and exit code 2."""

from __future__ import annotations

import os
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
from trace_megatron.simulate.compare import METHODS, advise, compare_methods, compare_shapes, parse_shapes
from trace_megatron.simulate.table import describe_rows

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
    from trace_megatron.checks import check_config  # heavy imports only where a command needs them

    resolved = load_config(config, overrides or [])
    check_config(resolved)
    folder = RunFolder.of(resolved)
    under_torchrun = "RANK" in os.environ
    if not under_torchrun or os.environ["RANK"] == "0":
        folder.prepare(resolved, resume)
    arguments = [str(folder.root), *(["--resume"] if resume else [])]
    if under_torchrun:
        from trace_megatron.train import run_rank

        sys.exit(run_rank(arguments))
    sys.exit(run_ranks([sys.executable, "-m", "trace_megatron.train", *arguments], resolved.policy.num_ranks))


@app.command("eval")
def evaluate(config: ConfigPath, overrides: Overrides = None) -> None:
    """Accuracy of policy.model on held-out prompts, with its standard error."""
    from trace_megatron.eval import evaluate_policy

    evaluate_policy(load_config(config, overrides or []))


@app.command()
def simulate(
    config: ConfigPath,
    overrides: Overrides = None,
    selectors: Annotated[str, typer.Option(help="Methods to compare, with spaces between.")] = " ".join(METHODS),
    shapes: Annotated[str, typer.Option(help="Budgets to compare as 'M,N M,N ...'; empty: those of equal cost.")] = "",
) -> None:
    """Spend the budget on outcomes drawn from a stated model: which method, which (M, N) finds most contrast."""
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
    conversion.megatron_to_hf(source, target, like)
    if verify:
        _compare(target, source)


def _compare(hf_folder: Path, megatron_folder: Path) -> None:
    from trace_megatron.policy.convert_check import compare_logits

    say(f"logits agree to {compare_logits(hf_folder, megatron_folder):.1e} of the largest")


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
