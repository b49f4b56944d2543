"""Whole runs of a tiny policy that answers: what tests of `train` and `launch` share."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from answering_policy import teach_answers
from tiny_models import write_tiny_model

from trace_megatron.config import EnvConfig, load_config
from trace_megatron.envs import build_environment

TASKS = {"letter_counting": {"min_words": 1, "max_words": 3}}  # answers are mostly 0, 1 or 2


def write_answering_model(folder: Path) -> Path:
    """A tiny policy that answers in the asked form, with a digit at random: some answers are right, some are not."""
    write_tiny_model(folder, family="qwen3", tied=False, head_dim=32)
    environment = build_environment(EnvConfig(params={"tasks": TASKS}))
    tasks = [environment.tasks("train")[index] for index in range(48)]
    teach_answers(folder, tasks, [f"Answer: {number % 3}" for number in range(48)])
    return folder


def write_config(folder: Path, model: Path, **sections) -> Path:
    values = {
        "run": {"name": "run", "output_dir": str(folder), "steps": 4, "seed": 3, "checkpoint_every": 2},
        "policy": {"model": str(model), "dtype": "float32", "pipeline_parallel": 2, "tokens_per_micro_batch": 1024},
        "optimizer": {"learning_rate": 1e-3},
        "method": {"selector": "trace", "advantage": "tree_rpo"},
        "budget": {"candidates": 6, "rollouts": 8, "continuations": 2},
        "predictor": {"kind": "model", "model": str(model), "num_layers": 1, "dtype": "float32", "learning_rate": 1e-3},
        "rollout": {"max_turns": 3, "max_new_tokens": 16, "max_prompt_tokens": 512, "max_response_tokens": 512},
        "engine": {"dtype": "float32", "max_num_seqs": 32, "kv_cache_gib": 0.25},
        "env": {"name": "reasoning_gym", "params": {"tasks": TASKS}},
        "validation": {"every": 4, "prompts": 8},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    load_config(path)
    return path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "trace_megatron.cli", *arguments]


def read_metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def without_clock(line: dict) -> dict:
    """A step's numbers without those that a clock made."""
    return {
        key: value
        for key, value in line.items()
        if not (key.startswith("seconds/") or key.endswith(("_s", "seconds", "predictor_share", "peak_memory_gib")))
    }


def approximately(value):
    """Nested JSON with every float compared to 1e-5, everything else exactly."""
    if isinstance(value, dict):
        return {key: approximately(item) for key, item in value.items()}
    if isinstance(value, list):
        return [approximately(item) for item in value]
    return pytest.approx(value, rel=1e-5, abs=1e-5) if isinstance(value, float) else value
