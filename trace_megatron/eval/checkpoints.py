"""What ``eval.checkpoint`` may name -> a Hugging Face folder that the engine loads."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from trace_megatron.config import Config, load_config
from trace_megatron.errors import UserError
from trace_megatron.log import say
from trace_megatron.policy.convert import megatron_to_hf
from trace_megatron.policy.dist_index import is_megatron_folder
from trace_megatron.policy.run_checkpoint import is_run_checkpoint
from trace_megatron.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Weights to evaluate."""

    folder: Path
    """Where they lie: an HF folder, or what has to be converted to one."""
    like: Path | None
    """HF folder with the configuration and tokenizer, for weights that have to be converted; else None."""
    home: Path
    """Where records go."""


def find_checkpoint(config: Config) -> Checkpoint:
    """Look at what is there; converts nothing. Raises UserError that says what a folder lacks."""
    named = Path(config.eval.checkpoint or config.policy.model)
    if not named.is_dir():
        option = "eval.checkpoint" if config.eval.checkpoint else "policy.model"
        raise UserError(
            f"expected an HF folder, a run's folder or a checkpoint at {option}, found no folder at '{named}'"
        )
    root = _run_root(named)
    folder = _weights(named, RunFolder(root) if root else None)
    label = folder.parent.name if is_run_checkpoint(folder) else folder.name
    home = (root / "eval" if root else Path(config.run.output_dir) / "eval") / label
    if config.eval.output:
        home = Path(config.eval.output)
    elif config.eval.scaffold != "chat":
        home = home.with_name(f"{label}-{config.eval.scaffold}")
    if not (is_run_checkpoint(folder) or is_megatron_folder(folder)):
        return Checkpoint(folder, None, home)
    if is_megatron_folder(folder) and (folder / "config.json").is_file():
        return Checkpoint(folder, folder, home)
    like = load_config(root / "config.yaml").policy.model if root else config.policy.model
    if not (Path(like) / "config.json").is_file():
        raise UserError(
            f"expected the HF folder that '{folder}' was trained from, found none at '{like}': set policy.model to it"
        )
    return Checkpoint(folder, Path(like), home)


def to_hf_folder(checkpoint: Checkpoint) -> Path:
    """The HF folder itself; weights of another form are written once as ``model`` among the records."""
    if checkpoint.like is None:
        return checkpoint.folder
    target = checkpoint.home / "model"
    if not target.exists():
        say(f"writing {checkpoint.folder} as a Hugging Face folder to {target}")
        target.parent.mkdir(parents=True, exist_ok=True)
        megatron_to_hf(checkpoint.folder, target, checkpoint.like)
    return target


def digest(folder: Path) -> str:
    """Of the weights and the tokenizer in an HF folder: other records belong to other weights."""
    total = hashlib.blake2b(digest_size=16)
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("tokenizer*.json"), folder / "config.json"]):
        if path.is_file():
            with path.open("rb") as file:
                total.update(path.name.encode() + hashlib.file_digest(file, "blake2b").digest())
    return total.hexdigest()


def _run_root(folder: Path) -> Path | None:
    """The run that the folder is, or lies in: RUN, RUN/hf, RUN/checkpoints/STEP or RUN/checkpoints/STEP/policy."""
    for candidate in (folder, *list(folder.resolve().parents)[:3]):
        if (candidate / "config.yaml").is_file() and (
            (candidate / "checkpoints").is_dir() or (candidate / "hf").is_dir()
        ):
            return candidate
    return None


def _weights(named: Path, run: RunFolder | None) -> Path:
    if run is not None and named == run.root:
        newest = run.latest_checkpoint()
        if not run.hf.is_dir() and newest is None:
            raise UserError(f"expected hf/ or a checkpoint in the run '{named}', found neither: train it first")
        # a resumed run writes new checkpoints beside the hf/ of its first end
        if newest is None or (run.hf.is_dir() and run.hf.stat().st_mtime >= newest.stat().st_mtime):
            return run.hf
        return newest / "policy"
    if is_run_checkpoint(named / "policy"):
        return named / "policy"
    if is_run_checkpoint(named) or is_megatron_folder(named) or (named / "config.json").is_file():
        return named
    raise UserError(
        f"expected config.json, a run's config.yaml, policy.json or Megatron's .metadata in '{named}', found none: "
        "name an HF folder, a run's folder or a checkpoint"
    )
