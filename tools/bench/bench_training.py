"""Training speed beside HF's on the same model and tokens: tokens/s of an optimizer step (forward, backward, AdamW).

    python tools/bench/bench_training.py [--model FOLDER] [--sequences 4] [--length 1024] [--steps 3]

Every configuration runs in processes of its own and uses all cores: one process with all threads, or one process per
rank with the cores divided. Both sides train on every token of plain causal sequences, at temperature 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from trace_megatron.launch.local import run_ranks

MEGATRON_LAYOUTS = {"megatron TP1 PP1": (1, 1), "megatron PP2": (1, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/smollm2-135m-instruct")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a single measurement, in a process of its own
    arguments = parser.parse_args()
    if arguments.one:
        measure(arguments)
        return
    print(
        f"{arguments.sequences} x {arguments.length} tokens a step, {os.cpu_count()} cores, median of {arguments.steps}"
    )
    for dtype in ("float32", "bfloat16"):
        for name in ("hf", *MEGATRON_LAYOUTS):
            ranks = MEGATRON_LAYOUTS.get(name, (1, 1))
            options = [f"--{key}={getattr(arguments, key)}" for key in ("model", "sequences", "length", "steps")]
            run_ranks([sys.executable, __file__, *options, f"--one={name}:{dtype}"], ranks[0] * ranks[1])


def measure(arguments: argparse.Namespace) -> None:
    name, dtype = arguments.one.split(":")
    vocab_size = json.loads((Path(arguments.model) / "config.json").read_text())["vocab_size"]
    tokens = np.random.default_rng(0).integers(0, vocab_size, (arguments.sequences, arguments.length))
    if name == "hf":
        report(name, dtype, tokens.size, hf_step(arguments.model, dtype, tokens), arguments.steps)
        return
    from trace_megatron.config import LossConfig, OptimizerConfig, PolicyConfig
    from trace_megatron.policy.worker import Policy

    tensor, pipeline = MEGATRON_LAYOUTS[name]
    config = PolicyConfig(arguments.model, dtype, tensor_parallel=tensor, pipeline_parallel=pipeline)
    with Policy(config, OptimizerConfig(), LossConfig()) as policy:
        if policy.is_driver:
            batch = packs(tokens)
            report(name, dtype, tokens.size, lambda: policy.train_step([batch]), arguments.steps)
        else:
            policy.serve()


def report(name: str, dtype: str, num_tokens: int, step: Callable[[], object], num_steps: int) -> None:
    step()  # the first one allocates
    seconds = []
    for _ in range(num_steps):
        start_s = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start_s)
    print(f"{name:18s} {dtype:9s} {num_tokens / statistics.median(seconds):7.1f} tokens/s", flush=True)


def hf_step(folder: str, dtype: str, tokens: np.ndarray) -> Callable[[], object]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    rows = torch.from_numpy(tokens)

    def step() -> None:
        for row in rows:  # one sequence at a time, as the micro-batches of the other side
            logits = model(row[None]).logits[0, :-1].float()
            (torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum") / rows.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def packs(tokens: np.ndarray) -> list:
    from trace_megatron.algorithm.pack import pack_trees
    from trace_megatron.types import ROOT, Prompt, Rollout, RolloutStatus, RolloutTree, Task, Turn

    def pack(row: list[int]):
        turn = Turn(tuple(row[1:]), (0.0,) * (len(row) - 1), (), 0)
        rollout = Rollout(ROOT, (turn,), 1.0, RolloutStatus.FINISHED)
        tree = RolloutTree(Prompt("bench", Task("bench", (), {}), (row[0],)), (rollout,))
        return pack_trees([tree], [np.array([[0.0, 1.0]])])

    return [pack(row.tolist()) for row in tokens]


if __name__ == "__main__":
    main()
