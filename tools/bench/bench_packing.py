"""A packed optimizer step beside the same attention with every leaf as a root of its own: time and peak memory.

    python tools/bench/bench_packing.py [--shapes qa maths bfcl] [--rounds 5] [--steps 3] [--threads 1]
    python tools/bench/bench_packing.py --crossover

The shapes are those of ALGORITHMS.md section 4 with token counts divided by 16: one prompt with 4 bare rollouts and 2
continuations of each at random prefixes. r = unpacked / packed tokens. ``--crossover`` shortens the shared prefix until
there is nothing left to share. Every measurement runs in a process of its own: a random 256-wide Llama of 4 layers,
float32, one micro-batch, so that peak memory is that of the whole pack. Time is processor time of all threads. Packed
and unpacked take turns for ``--rounds`` rounds; medians are printed, of the ratios too: rounds differ by a tenth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from peak_memory import peak_kib, reset_peak

from trace_megatron.types import ROOT, Anchor, Prompt, Rollout, RolloutStatus, RolloutTree, Task, Turn

VOCABULARY = 4096
NUM_BARE, NUM_CONTINUATIONS = 4, 2


@dataclass(frozen=True)
class Shape:
    prompt: int
    response: int
    """Tokens of a whole bare rollout, half of them observations."""
    turns: int
    bare: int = NUM_BARE
    continuations: int = NUM_CONTINUATIONS


SHAPES = {
    "qa": Shape(prompt=2048 // 16, response=6144 // 16, turns=5),
    "maths": Shape(prompt=2048 // 16, response=14336 // 16, turns=5),
    "bfcl": Shape(prompt=12800 // 16, response=8192 // 16, turns=40),
}
CROSSOVER = {f"prefix {length}": Shape(length, 128, 1, bare=16, continuations=0) for length in (1, 16, 128)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--crossover", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a single measurement, in a process of its own
    parser.add_argument("--model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        measure(arguments)
        return
    names = list(CROSSOVER) if arguments.crossover else arguments.shapes
    print(
        "shape       tokens: packed unpacked     r | CPU s: packed unpacked ratio /r | MiB:    packed unpacked ratio /r"
    )
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for name in names:
            rounds = [
                [run(arguments, folder, name, form) for form in ("packed", "unpacked")] for _ in range(arguments.rounds)
            ]
            print(describe(name, rounds), flush=True)


def run(arguments: argparse.Namespace, folder: str, name: str, form: str) -> dict:
    command = [sys.executable, __file__, f"--one={name}:{form}", f"--model={folder}"]
    command += [f"--steps={arguments.steps}", f"--threads={arguments.threads}"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def describe(name: str, rounds: list[list[dict]]) -> str:
    def median(key: str) -> tuple[float, float, float]:
        """Of packed, of unpacked, of their ratio in one round."""
        values = np.array([[form[key] for form in pair] for pair in rounds])
        return *np.median(values, axis=0), np.median(values[:, 1] / values[:, 0])

    packed_tokens, unpacked_tokens, r = median("tokens")
    packed_s, unpacked_s, time_ratio = median("seconds")
    packed_mib, unpacked_mib, memory_ratio = median("activation_mib")
    return (
        f"{name:12s} {packed_tokens:13.0f} {unpacked_tokens:8.0f} {r:5.2f} |      {packed_s:7.2f} {unpacked_s:8.2f} "
        f"{time_ratio:5.2f} {time_ratio / r:4.2f} |          {packed_mib:7.0f} {unpacked_mib:8.0f} "
        f"{memory_ratio:5.2f} {memory_ratio / r:4.2f}"
    )


def measure(arguments: argparse.Namespace) -> None:
    from trace_megatron.algorithm.pack import pack_trees
    from trace_megatron.config import LossConfig, OptimizerConfig, PolicyConfig
    from trace_megatron.policy.worker import Policy

    name, form = arguments.one.split(":")
    tree = build_tree((SHAPES | CROSSOVER)[name])
    shape = len(tree.rollouts), 1 + sum(len(rollout.turns) for rollout in tree.rollouts)
    advantages = np.random.default_rng(1).choice([-1.0, 1.0], shape)
    batch = pack_trees([tree], [advantages], packed=form == "packed")
    config = PolicyConfig(arguments.model, "float32")
    with Policy(config, OptimizerConfig(), LossConfig()) as policy:
        torch.set_num_threads(arguments.threads)
        policy.train_step([[batch]])  # the first one allocates
        before = reset_peak()
        seconds = []
        for _ in range(arguments.steps):
            start_s = time.process_time()
            policy.train_step([[batch]])
            seconds.append(time.process_time() - start_s)
        result = {"tokens": batch.num_tokens, "seconds": statistics.median(seconds)}
        print(json.dumps(result | {"activation_mib": (peak_kib() - before) / 1024}))


def build_tree(shape: Shape) -> RolloutTree:
    rng = np.random.default_rng(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(int(token) for token in rng.integers(0, VOCABULARY, count))

    def turns(count: int) -> tuple[Turn, ...]:
        size = shape.response // shape.turns
        if shape.turns == 1:
            return (Turn(ids(size), (-8.0,) * size, (), 0),)
        return tuple(Turn(ids(size // 2), (-8.0,) * (size // 2), ids(size - size // 2), 0) for _ in range(count))

    rollouts = [Rollout(ROOT, turns(shape.turns), 0.0, RolloutStatus.FINISHED) for _ in range(shape.bare)]
    for parent in range(shape.bare):
        for _ in range(shape.continuations):
            turn = int(rng.integers(1, shape.turns))
            anchor = Anchor(parent, turn)
            rollouts.append(Rollout(anchor, turns(shape.turns - turn), 0.0, RolloutStatus.FINISHED))
    return RolloutTree(Prompt("bench", Task("bench", (), {}), ids(shape.prompt)), tuple(rollouts))


def write_model(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    main()
