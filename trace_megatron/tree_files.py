"""Rollout trees on disk: ``trees/step_000001.jsonl.zst``, one tree a line, ids and logprobs as sampled."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zstandard

from trace_megatron.errors import UserError
from trace_megatron.types import Anchor, Prompt, Rollout, RolloutStatus, RolloutTree, Task, Turn


def write_trees(path: Path, trees: Sequence[RolloutTree]) -> None:
    """Write one step's trees; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    lines = "".join(json.dumps(dataclasses.asdict(tree)) + "\n" for tree in trees)
    partial.write_bytes(zstandard.ZstdCompressor(level=3).compress(lines.encode()))
    partial.rename(path)


def read_trees(path: Path) -> list[RolloutTree]:
    """The trees of one step, as they were."""
    text = zstandard.ZstdDecompressor().decompress(path.read_bytes()).decode()
    return [_tree(json.loads(line)) for line in text.split("\n") if line]


def read_step(folder: Path, step: int = 0) -> list[RolloutTree]:
    """The trees of one step of a run's ``trees`` folder; 0: of the last. Raises UserError where there are none."""
    files = sorted(folder.glob("step_*.jsonl.zst"))
    if step:
        files = [file for file in files if file.name == f"step_{step:06d}.jsonl.zst"]
    if not files:
        raise UserError(f"expected trees of {f'step {step}' if step else 'a step'} in '{folder}', found none")
    return read_trees(files[-1])


def as_prompt(values: dict[str, Any]) -> Prompt:
    """The prompt whose ``dataclasses.asdict`` these JSON values were."""
    return Prompt(values["prompt_id"], as_task(values["task"]), tuple(values["token_ids"]))


def as_task(values: dict[str, Any]) -> Task:
    """The task whose ``dataclasses.asdict`` these JSON values were."""
    return Task(values["task_id"], tuple(values["messages"]), values["payload"], tuple(values.get("tools", ())))


def _tree(values: dict[str, Any]) -> RolloutTree:
    return RolloutTree(
        prompt=as_prompt(values["prompt"]),
        rollouts=tuple(_rollout(rollout) for rollout in values["rollouts"]),
        prefix_probs=tuple(values["prefix_probs"]),
    )


def _rollout(values: dict[str, Any]) -> Rollout:
    return Rollout(
        anchor=Anchor(**values["anchor"]),
        turns=tuple(
            Turn(
                action_ids=tuple(turn["action_ids"]),
                action_logprobs=tuple(turn["action_logprobs"]),
                observation_ids=tuple(turn["observation_ids"]),
                weight_version=turn["weight_version"],
            )
            for turn in values["turns"]
        ),
        reward=values["reward"],
        status=RolloutStatus(values["status"]),
        trained=values["trained"],
        info=values["info"],
    )
