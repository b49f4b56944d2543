"""What rank 0 waits for before a push can send: weights gathered over gloo, and read where the ranks keep them.

    python tools/bench/bench_gather.py [--model FOLDER] [--dtype bfloat16] [--pipeline 2]

Ranks on this machine, without GPUs. A copy of as many bytes by rank 0's threads is timed in turn; medians of five.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import deque

import torch

from trace_megatron.config import LossConfig, OptimizerConfig, PolicyConfig
from trace_megatron.launch.local import run_ranks

ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--pipeline", type=int, default=2)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)  # one of the ranks
    arguments = parser.parse_args()
    if arguments.rank:
        measure(arguments)
    else:
        raise SystemExit(run_ranks([sys.executable, __file__, *sys.argv[1:], "--rank"], arguments.pipeline))


def measure(arguments: argparse.Namespace) -> None:
    from trace_megatron.policy.worker import Policy

    config = PolicyConfig(arguments.model, arguments.dtype, pipeline_parallel=arguments.pipeline)
    with Policy(config, OptimizerConfig(), LossConfig()) as policy:
        if not policy.is_driver:
            policy.serve()
            return
        num_bytes = sum(tensor.nbytes for _, tensor in policy.weights()[1])
        plain = torch.ones(num_bytes, dtype=torch.uint8)
        target = torch.zeros_like(plain)
        calls = {
            "memcpy": lambda: target.copy_(plain),
            "gathered": lambda: deque(policy.weights()[1], maxlen=0),
            "in place": lambda: deque(policy.weights_in_place()[1], maxlen=0),
        }
        seconds = {name: [] for name in calls}
        for _ in range(ROUNDS + 1):  # the first one warms up
            for name, call in calls.items():
                started = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - started)
        text = ", ".join(f"{name} {statistics.median(times[1:]) * 1e3:.0f}" for name, times in seconds.items())
        print(f"PP {arguments.pipeline}, {num_bytes / 2**20:.0f} MiB, ms: {text}", flush=True)


if __name__ == "__main__":
    main()
