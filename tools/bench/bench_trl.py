"""A packed optimizer step beside TRL's GRPOTrainer on identical masked tokens, every leaf a row of its own.

    pip install --no-deps trl datasets multiprocess dill xxhash pyarrow pandas
    python tools/bench/bench_trl.py [--shapes qa maths bfcl] [--steps 2] [--threads 1] [--rows 4]

Shapes and model of bench_packing.py. TRL trains the leaves as rows of padded batches of ``--rows``, with gradients
accumulated; its loss and clipping are GRPO's, its optimizer AdamW. Both losses are printed: they must agree.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from bench_packing import SHAPES, VOCABULARY, build_tree, write_model

from trace_megatron.algorithm.tree import build_structure, node_ids
from trace_megatron.types import RolloutTree

LEARNING_RATE = 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=4, help="leaves in a padded batch of TRL")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a single measurement, in a process of its own
    parser.add_argument("--model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        measure(arguments)
        return
    print("shape      r | CPU s a step: packed   TRL ratio /r | padded tokens of TRL / tokens | losses")
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        write_tokenizer(Path(folder))
        for name in arguments.shapes:
            packed, trl = (run(arguments, folder, name, side) for side in ("packed", "trl"))
            r, ratio = trl["tokens"] / packed["tokens"], trl["seconds"] / packed["seconds"]
            print(
                f"{name:6s} {r:5.2f} |               {packed['seconds']:6.2f} {trl['seconds']:5.2f} {ratio:5.2f} "
                f"{ratio / r:4.2f} | {trl['padded'] / trl['tokens']:29.2f} | {packed['loss']:.6f} {trl['loss']:.6f}",
                flush=True,
            )


def run(arguments: argparse.Namespace, folder: str, name: str, side: str) -> dict:
    command = [sys.executable, __file__, f"--one={name}:{side}", f"--model={folder}", f"--rows={arguments.rows}"]
    command += [f"--steps={arguments.steps}", f"--threads={arguments.threads}"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}  # nothing is asked of the hub: do not wait for it
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def measure(arguments: argparse.Namespace) -> None:
    """Processor time of all threads: other work on the machine changes it little."""
    name, side = arguments.one.split(":")
    tree = build_tree(SHAPES[name])
    structure = build_structure(tree)
    advantages = np.random.default_rng(1).choice([-1.0, 1.0], (len(structure.leaves), structure.num_nodes))
    torch.set_num_threads(arguments.threads)
    build = packed_side if side == "packed" else trl_side
    step, sizes = build(arguments, tree, advantages)
    loss = step()  # the first one allocates; the loss is that of the weights as they were
    seconds = []
    for _ in range(arguments.steps):
        start_s = time.process_time()
        step()
        seconds.append(time.process_time() - start_s)
    print(json.dumps({"seconds": statistics.median(seconds), "loss": loss, **sizes}))


def packed_side(arguments: argparse.Namespace, tree: RolloutTree, advantages: np.ndarray):
    from trace_megatron.algorithm.pack import pack_trees
    from trace_megatron.config import LossConfig, OptimizerConfig, PolicyConfig
    from trace_megatron.policy.worker import Policy

    batch = pack_trees([tree], [advantages])
    options = OptimizerConfig(learning_rate=LEARNING_RATE)
    policy = Policy(PolicyConfig(arguments.model, "float32"), options, LossConfig())
    torch.set_num_threads(arguments.threads)
    return lambda: policy.train_step([[batch]]).loss, {"tokens": batch.num_tokens}


def trl_side(arguments: argparse.Namespace, tree: RolloutTree, advantages: np.ndarray) -> tuple[Callable, dict]:
    from datasets import IterableDataset
    from datasets.iterable_dataset import ExamplesIterable
    from trl import GRPOConfig, GRPOTrainer

    rows = [leaf(tree, advantages, row) for row in range(advantages.shape[0])]
    batches = [collate(tree, rows[i : i + arguments.rows]) for i in range(0, len(rows), arguments.rows)]
    config = GRPOConfig(
        output_dir=arguments.model,
        use_cpu=True,
        bf16=False,
        beta=0.0,
        loss_type="grpo",
        epsilon=0.2,
        epsilon_high=0.28,
        learning_rate=LEARNING_RATE,
        weight_decay=0.0,
        per_device_train_batch_size=arguments.rows,
        num_generations=arguments.rows,
        gradient_checkpointing=False,
        max_steps=1,
        report_to="none",
        model_init_kwargs={"dtype": "float32"},
    )
    prompts = IterableDataset(ExamplesIterable(lambda: iter([(0, {"prompt": "a"})]), {}))  # never asked
    trainer = GRPOTrainer(arguments.model, reward_funcs=lambda **_: [0.0], args=config, train_dataset=prompts)
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = len(batches)
    trainer.model.train()
    torch.set_num_threads(arguments.threads)

    def step() -> float:
        total = 0.0
        for batch in batches:
            loss = trainer._compute_loss(trainer.model, batch)
            trainer.accelerator.backward(loss)
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return total

    prompt = len(tree.prompt.token_ids)
    padded = sum(batch["completion_ids"].numel() + prompt * batch["completion_ids"].size(0) for batch in batches)
    return step, {"tokens": sum(prompt + len(tokens) for tokens, _, _ in rows), "padded": padded}


def leaf(tree: RolloutTree, advantages: np.ndarray, row: int) -> tuple[list[int], list[int], list[float]]:
    """Tokens after the prompt, 1 where the policy sampled them, and every token's advantage."""
    structure = build_structure(tree)
    tokens, mask, values = [], [], []
    for node in structure.paths[row][1:]:
        ids, sampled = node_ids(structure, node), len(structure.turns[node].action_ids)
        tokens += ids
        mask += [1] * sampled + [0] * (len(ids) - sampled)
        values += [advantages[row, node]] * len(ids)
    return tokens, mask, values


def collate(tree: RolloutTree, rows: list[tuple[list[int], list[int], list[float]]]) -> dict[str, torch.Tensor]:
    length = max(len(tokens) for tokens, _, _ in rows)

    def padded(values: list) -> torch.Tensor:
        return torch.stack([torch.tensor(list(value) + [0] * (length - len(value))) for value in values])

    prompt = torch.tensor(tree.prompt.token_ids).expand(len(rows), -1)
    completions = padded([tokens for tokens, _, _ in rows])
    return {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": completions,
        "completion_mask": padded([[1] * len(tokens) for tokens, _, _ in rows]),
        "tool_mask": padded([mask for _, mask, _ in rows]),
        "advantages": padded([values for _, _, values in rows]).float(),
        "old_per_token_logps": torch.full(completions.shape, -8.0),  # as build_tree has them
        "num_items_in_batch": torch.tensor(1.0),
    }


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"a": 0, "<pad>": 1, "<eos>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


if __name__ == "__main__":
    main()
