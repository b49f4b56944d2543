"""A weight sync by part, beside this machine's memory bandwidth in the same run: our part alone, then end to end.

    python tools/bench/bench_sync.py [--model FOLDER] [--dtype bfloat16] [--buckets 64,512]
    python tools/bench/bench_sync.py --config CONFIG.json                      # weights of those shapes, our part alone
    python tools/bench/bench_sync.py --config CONFIG.json --scratch FOLDER     # written there for an engine, end to end

Our part: taking HF tensors out of Megatron's fused parameters as at TP 1 (gather), and the copies into shared memory
(write). Alone, no engine loads beside it. Then vLLM's part alone: what a CPU's engine does to the weight of every
linear layer and of the output head, with nothing around it. At last end to end: parameters that the engine reads where
the trainer keeps them, as all are while engine and ranks are on one machine without GPUs, and parameters that are
copied for it, as they are where a rank is on another machine. A copy of as many bytes is timed in turn with each, by
torch, with as many threads as cores. Medians of five; the first push into an engine, through vLLM's own loader, is
printed by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from trace_megatron.config import EngineConfig, SyncConfig
from trace_megatron.memfd import share
from trace_megatron.memory import keep_freed_memory
from trace_megatron.policy.hf_config import HFModelConfig, parse_hf_config, read_hf_config
from trace_megatron.policy.hf_files import HFWriter
from trace_megatron.policy.names import Weight, exported_weights, split_tensors, to_shard
from trace_megatron.rollout.vllm_engine import VLLMEngine
from trace_megatron.split_tensor import SplitTensor
from trace_megatron.types import TensorInfo
from trace_megatron.weight_sync.push import WeightSync
from trace_megatron.weight_sync.sender import SharedMemorySender, SharedMemoryTrainerInfo
from trace_megatron.weight_sync.shared_memory import MappedBucket
from trace_megatron.weight_sync.source import PolicySource

PUSHES = 5

Weights = list[tuple[Weight, torch.Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2-135m-instruct")
    parser.add_argument("--config", type=Path, help="of a model whose weights are ones, instead of --model")
    parser.add_argument("--scratch", type=Path, help="a folder for the model of --config, for the time of the run")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--buckets", default="64,512", help="MiB")
    arguments = parser.parse_args()
    if arguments.scratch and not arguments.config:
        parser.error("--scratch is for the model of --config")
    dtype = getattr(torch, arguments.dtype)
    if arguments.config:
        hf = parse_hf_config(json.loads(arguments.config.read_text()), str(arguments.config))
        shapes = {name: shape for weight in exported_weights(hf) for name, shape in weight.hf.items()}
        tensors = {name: torch.ones(shape, dtype=dtype) for name, shape in shapes.items()}
    else:
        hf = read_hf_config(arguments.model)
        files = sorted(Path(arguments.model).glob("*.safetensors"))
        loaded = {name: value for file in files for name, value in load_file(file).items()}
        tensors = {name: loaded[name].to(dtype) for weight in exported_weights(hf) for name in weight.hf}
    infos = [TensorInfo(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    if not arguments.scratch:
        measure(arguments, hf, infos, tensors)
        return
    arguments.scratch.mkdir()
    try:
        writer = HFWriter(arguments.scratch, infos)
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.close()
        shutil.copy(arguments.config, arguments.scratch / "config.json")
        measure(arguments, hf, infos, tensors)
    finally:
        shutil.rmtree(arguments.scratch)


def measure(
    arguments: argparse.Namespace, hf: HFModelConfig, infos: list[TensorInfo], tensors: dict[str, torch.Tensor]
) -> None:
    """All parts; takes the tensors away."""
    fused = [(w, to_shard(w, [tensors.pop(name) for name in w.hf], hf, 0, 1)) for w in exported_weights(hf)]
    memcpy = Memcpy(sum(shard.nbytes for _, shard in fused))
    print(f"load average before: {psutil.getloadavg()[0]:.1f} on {psutil.cpu_count()} cores")
    for bucket_mib in map(int, arguments.buckets.split(",")):
        measure_alone(hf, infos, fused, memcpy, bucket_mib)
    measure_packing(fused, memcpy)
    if not arguments.config or arguments.scratch:
        asyncio.run(measure_end_to_end(arguments, hf, infos, fused, memcpy))


class Memcpy:
    """Of so many bytes, by torch's threads."""

    def __init__(self, num_bytes: int):
        self._source = torch.ones(num_bytes, dtype=torch.uint8)
        self._target = torch.zeros_like(self._source)

    def time(self) -> float:
        """Seconds."""
        started = time.perf_counter()
        self._target.copy_(self._source)
        return time.perf_counter() - started


def measure_alone(hf: HFModelConfig, infos: list[TensorInfo], fused: Weights, memcpy: Memcpy, bucket_mib: int) -> None:
    """Our part, through the product's sender, for an engine that returns every bucket at once."""
    source = PolicySource(split=True)
    info = SharedMemoryTrainerInfo(rank=0, bucket_bytes=bucket_mib * 2**20)
    sender = SharedMemorySender(client=ReturningClient(), source=source, info=info)
    copies, gathers, writes = [], [], []
    for _ in range(PUSHES + 1):  # the first one maps the memory
        copies.append(memcpy.time())
        source.renew(infos, unfuse(fused, hf))
        sender.send_weights()
        gathers.append(sender.parts.gather_s)
        writes.append(sender.parts.write_s)
    sender.close()
    copy_s, gather_s, write_s = (statistics.median(seconds[1:]) for seconds in (copies, gathers, writes))
    num_bytes = source.num_bytes
    print(
        f"alone, {num_bytes / 2**20:.0f} MiB in buckets of {bucket_mib} MiB, ms: memcpy {copy_s * 1e3:.0f} "
        f"({num_bytes / copy_s / 1e9:.1f} GB/s), gather {gather_s * 1e3:.0f}, write {write_s * 1e3:.0f} "
        f"({writes[0] * 1e3:.0f} the first time): {100 * copy_s / (gather_s + write_s):.0f} % of memcpy's speed",
        flush=True,
    )


def measure_packing(fused: Weights, memcpy: Memcpy) -> None:
    """vLLM's packing of the model's matrices, fused as it fuses them too, in memory that is used again."""
    keep_freed_memory()
    matrices = [shard for _, shard in fused if shard.ndim == 2]
    layers = [torch.nn.Module() for _ in matrices]
    method = UnquantizedLinearMethod()
    copies, packs = [], []
    for _ in range(PUSHES + 1):
        copies.append(memcpy.time())
        weights = [torch.nn.Parameter(shard, requires_grad=False) for shard in matrices]
        started = time.perf_counter()
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight = weight
            method.process_weights_after_loading(layer)
        packs.append(time.perf_counter() - started)
    copy_s, pack_s = (statistics.median(seconds[1:]) for seconds in (copies, packs))
    print(f"vLLM's packing alone, ms: memcpy {copy_s * 1e3:.0f}, {len(layers)} matrices {pack_s * 1e3:.0f}", flush=True)


def unfuse(fused: Weights, hf: HFModelConfig) -> Iterator[tuple[str, SplitTensor]]:
    """What ``SharedWeights`` does for one rank."""
    for weight, shard in fused:
        yield from zip(weight.hf, split_tensors(weight, [shard], hf), strict=True)


class ReturningClient:
    """An engine whose workers let go of every bucket as they get it."""

    def __init__(self) -> None:
        self._mapped: dict[str, MappedBucket] = {}

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, info: dict) -> None:
        memory = info["memory"]
        if memory.key not in self._mapped:
            self._mapped[memory.key] = MappedBucket(memory)
        assert self._mapped[memory.key].try_return(0)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass


async def measure_end_to_end(
    arguments: argparse.Namespace, hf: HFModelConfig, infos: list[TensorInfo], fused: Weights, memcpy: Memcpy
) -> None:
    config = EngineConfig(dtype=arguments.dtype, kv_cache_gib=0.5)
    engine = VLLMEngine(arguments.scratch or arguments.model, config, max_model_len=256)
    await engine.start()
    buckets = [int(bucket_mib) for bucket_mib in arguments.buckets.split(",")]
    try:
        for bucket_mib in buckets:
            what = f"copied, in buckets of {bucket_mib} MiB"
            await measure_pushes(engine, hf, infos, fused, memcpy, what, bucket_mib)
        fused[:] = [(weight, torch.nn.Parameter(shard, requires_grad=False)) for weight, shard in fused]
        share(parameter for _, parameter in fused)
        await measure_pushes(engine, hf, infos, fused, memcpy, "read in place", buckets[0])
    finally:
        await engine.close()


async def measure_pushes(
    engine: VLLMEngine,
    hf: HFModelConfig,
    infos: list[TensorInfo],
    weights: Weights,
    memcpy: Memcpy,
    what: str,
    bucket_mib: int,
) -> None:
    """End to end, through the product's own push."""
    sync = WeightSync(engine, SyncConfig(bucket_mib=bucket_mib))
    pushes, copies = [], []
    for version in range(PUSHES + 1):
        copies.append(memcpy.time())
        pushes.append(asdict(await sync.push(infos, unfuse(weights, hf), version)))
    first_s, copy_s = pushes.pop(0)["seconds"], statistics.median(copies[1:])
    parts = {name: statistics.median(push[name] for push in pushes) for name in pushes[0] if name != "bytes"}
    text = ", ".join(f"{name.removesuffix('_s')} {value * 1e3:.0f}" for name, value in parts.items())
    print(
        f"end to end, {what}, ms: memcpy {copy_s * 1e3:.0f}, {text} ({first_s * 1e3:.0f} the first time): "
        f"{100 * copy_s / parts['seconds']:.0f} % of memcpy's speed",
        flush=True,
    )


if __name__ == "__main__":
    main()
