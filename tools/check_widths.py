"""One packed training step at a model's true widths, with few layers and a small vocabulary: does the layout hold?

    python tools/check_widths.py CONFIG.json [--layers 2] [--vocab 4096] [--tensor 2] [--pipeline 2] [--tokens 256]

CONFIG.json is a Hugging Face configuration; weights are random bfloat16. All ranks run on this machine. In bytes, every
parameter takes 18: weight 2, gradient 4, main weight 4, Adam's moments 8.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from trace_megatron.launch.local import run_ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument("--pipeline", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256, help="of the packed tree, at least 16")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # of a rank that this script started
    arguments = parser.parse_args()
    if arguments.folder:
        run_step(arguments)
        return
    if not arguments.config.is_file():
        parser.error(f"expected a model's config.json, found no file at '{arguments.config}': download it from the Hub")
    with tempfile.TemporaryDirectory() as folder:
        write_model(arguments, Path(folder))
        num_ranks = arguments.tensor * arguments.pipeline
        sys.exit(run_ranks([sys.executable, __file__, *sys.argv[1:], f"--folder={folder}"], num_ranks))


def write_model(arguments: argparse.Namespace, folder: Path) -> None:
    """Random weights under the names that the policy expects, one tensor at a time."""
    from safetensors.torch import save_file

    from trace_megatron.policy.hf_config import parse_hf_config
    from trace_megatron.policy.names import model_weights

    values = json.loads(arguments.config.read_text())
    values |= {"num_hidden_layers": arguments.layers, "vocab_size": arguments.vocab}
    values.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(values))
    files = {}
    for weight in model_weights(parse_hf_config(values, str(arguments.config))):
        for name, shape in weight.hf.items():
            # A thousand numbers over and over: only their sizes matter, and drawing a billion takes a minute.
            scale = 0.02 * torch.randn(1000)
            tensor = scale.repeat(-(-torch.Size(shape).numel() // 1000))[: torch.Size(shape).numel()].view(shape)
            tensor = torch.ones(shape) if name.endswith("norm.weight") else tensor
            files[name] = f"model-{len(files):05}.safetensors"
            save_file({name: tensor.to(torch.bfloat16)}, folder / files[name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def run_step(arguments: argparse.Namespace) -> None:
    from trace_megatron.config import LossConfig, OptimizerConfig, PolicyConfig
    from trace_megatron.policy.worker import Policy

    start_s = time.perf_counter()
    config = PolicyConfig(
        arguments.folder,
        "bfloat16",
        tensor_parallel=arguments.tensor,
        pipeline_parallel=arguments.pipeline,
        sequence_parallel=arguments.tensor > 1,
    )
    with Policy(config, OptimizerConfig(), LossConfig()) as policy:
        if not policy.is_driver:
            policy.serve()
            return
        print(f"built in {time.perf_counter() - start_s:.1f} s", flush=True)
        packs = [[tree_pack(arguments, seed) for seed in range(arguments.pipeline)]]
        start_s = time.perf_counter()
        stats = policy.train_step(packs)
        seconds = time.perf_counter() - start_s
        print(
            f"one step of {stats.num_tokens} packed tokens ({stats.num_unpacked_tokens} unpacked) in {seconds:.1f} s "
            f"on {os.cpu_count()} cores: loss {stats.loss:.6f}, gradient norm {stats.grad_norm:.4f}"
        )
        print("peak memory by rank, GiB: " + ", ".join(f"{gib:.2f}" for gib in stats.peak_memory_gib))


def tree_pack(arguments: argparse.Namespace, seed: int):
    """A prompt with two bare rollouts and a continuation of each, of ``arguments.tokens`` tokens together."""
    from trace_megatron.algorithm.pack import pack_trees
    from trace_megatron.types import ROOT, Anchor, Prompt, Rollout, RolloutStatus, RolloutTree, Task, Turn

    rng = np.random.default_rng(seed)
    size = (arguments.tokens + 4 * seed) // 8  # packs of different lengths

    def turns(count: int) -> tuple[Turn, ...]:
        return tuple(
            Turn(tuple(rng.integers(0, arguments.vocab, size).tolist()), (-8.0,) * size, (), 0) for _ in range(count)
        )

    anchors = [(ROOT, 2), (ROOT, 2), (Anchor(0, 1), 1), (Anchor(1, 1), 1)]
    rollouts = tuple(Rollout(anchor, turns(count), 0.0, RolloutStatus.FINISHED) for anchor, count in anchors)
    prompt = tuple(rng.integers(0, arguments.vocab, 2 * size).tolist())
    tree = RolloutTree(Prompt("widths", Task("widths", (), {}), prompt), rollouts)
    return pack_trees([tree], [rng.choice([-1.0, 1.0], (4, 7))])


if __name__ == "__main__":
    main()
