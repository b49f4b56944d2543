"""A weight sync end to end, by part, beside this machine's memory bandwidth in the same run.

    python tools/bench/bench_sync.py [--model FOLDER] [--dtype bfloat16] [--buckets 64,512]

The tensors come from memory, so that the policy's own gathering is not in it. The median of five pushes.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from trace_megatron.config import EngineConfig, SyncConfig
from trace_megatron.rollout.vllm_engine import VLLMEngine
from trace_megatron.types import TensorInfo
from trace_megatron.weight_sync.push import WeightSync
from trace_megatron.weight_sync.shared_memory import Bucket

PUSHES = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--buckets", default="64,512", help="MiB")
    arguments = parser.parse_args()
    files = sorted(Path(arguments.model).glob("*.safetensors"))
    dtype = getattr(torch, arguments.dtype)
    tensors = {name: value.to(dtype) for file in files for name, value in load_file(file).items()}
    print(f"load average before: {psutil.getloadavg()[0]:.1f} on {psutil.cpu_count()} cores")
    print_bandwidth(sum(tensor.nbytes for tensor in tensors.values()))
    asyncio.run(measure(arguments, tensors))


def print_bandwidth(num_bytes: int) -> None:
    """Copying as many bytes within this process, and into fresh shared memory."""
    source = torch.zeros(num_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    copy_s = median_s(lambda: target.copy_(source))
    fresh_s = median_s(lambda: Bucket(num_bytes).close())
    bucket = Bucket(num_bytes)
    write_s = median_s(lambda: fill(bucket, source))
    bucket.close()
    print(f"{num_bytes / 2**20:.0f} MiB: memcpy {num_bytes / copy_s / 1e9:.1f} GB/s ({copy_s * 1e3:.0f} ms), ", end="")
    print(f"into shared memory {num_bytes / write_s / 1e9:.1f} GB/s, its first mapping {fresh_s * 1e3:.0f} ms")


def fill(bucket: Bucket, source: torch.Tensor) -> None:
    bucket.clear()
    assert bucket.add("bytes", source)


def median_s(work) -> float:
    seconds = []
    for _ in range(PUSHES):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


async def measure(arguments: argparse.Namespace, tensors: dict[str, torch.Tensor]) -> None:
    config = EngineConfig(dtype=arguments.dtype, kv_cache_gib=0.5)
    engine = VLLMEngine(arguments.model, config, max_model_len=256)
    infos = [TensorInfo(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    await engine.start()
    try:
        for bucket_mib in map(int, arguments.buckets.split(",")):
            sync = WeightSync(engine, SyncConfig(bucket_mib=bucket_mib))
            pushes = [asdict(await sync.push(infos, tensors.items(), version)) for version in range(PUSHES)]
            parts = {name: statistics.median(push[name] for push in pushes) for name in pushes[0] if name != "bytes"}
            text = ", ".join(f"{name.removesuffix('_s')} {value * 1e3:.0f}" for name, value in parts.items())
            print(f"buckets of {bucket_mib} MiB, ms: {text}", flush=True)
    finally:
        await engine.close()


if __name__ == "__main__":
    main()
