"""A weight sync by part, beside this machine's memory bandwidth in the same run: our part alone, then end to end.

    python tools/bench/bench_sync.py [--model FOLDER] [--dtype bfloat16] [--buckets 64,512]
    python tools/bench/bench_sync.py --config CONFIG.json                      # weights of those shapes, our part alone
    python tools/bench/bench_sync.py --config CONFIG.json --scratch FOLDER     # written there for an engine, end to end

Our part: taking HF tensors out of Megatron's fused parameters as at TP 1 (gather), and the copies into shared memory
(write). Alone, no engine loads beside it. Then vLLM's part alone: what a CPU's engine does to the weight of every
linear layer and of the output head, with nothing around it. A copy of as many bytes is timed in turn with each, by
torch, with as many threads as cores. Medians of five; the first push into an engine, through vLLM's own loader, is
printed by itself. At last the same buckets are sent again and again, so that the trainer neither gathers nor writes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import psutil
import torch
from safetensors.torch import load_file
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from trace_megatron.config import EngineConfig, SyncConfig
from trace_megatron.memory import keep_freed_memory
from trace_megatron.policy.hf_config import HFModelConfig, parse_hf_config, read_hf_config
from trace_megatron.policy.hf_files import HFWriter
from trace_megatron.policy.names import Weight, exported_weights, from_shards, to_shard
from trace_megatron.rollout.vllm_engine import VLLMEngine
from trace_megatron.types import TensorInfo
from trace_megatron.weight_sync.push import WeightSync
from trace_megatron.weight_sync.sender import SharedMemorySender, SharedMemoryTrainerInfo
from trace_megatron.weight_sync.shared_memory import Bucket, MappedBucket
from trace_megatron.weight_sync.source import PolicySource
from trace_megatron.weight_sync.transfer import EngineClient

PUSHES = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2-135m-instruct")
    parser.add_argument("--config", type=Path, help="of a model whose weights are ones, instead of --model")
    parser.add_argument("--scratch", type=Path, help="a folder for the model of --config, for the time of the run")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--buckets", default="64,512", help="MiB")
    arguments = parser.parse_args()
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
    print(f"load average before: {psutil.getloadavg()[0]:.1f} on {psutil.cpu_count()} cores")
    for bucket_mib in map(int, arguments.buckets.split(",")):
        measure_alone(hf, tensors, bucket_mib)
    measure_packing(hf, tensors)
    if not arguments.config:
        asyncio.run(measure(arguments.model, arguments, tensors))
    elif arguments.scratch:
        arguments.scratch.mkdir()
        try:
            infos = [TensorInfo(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
            writer = HFWriter(arguments.scratch, infos)
            for name, tensor in tensors.items():
                writer.write(name, tensor)
            writer.close()
            shutil.copy(arguments.config, arguments.scratch / "config.json")
            asyncio.run(measure(arguments.scratch, arguments, tensors))
        finally:
            shutil.rmtree(arguments.scratch)


def measure_alone(hf: HFModelConfig, tensors: dict[str, torch.Tensor], bucket_mib: int) -> None:
    """Our part, through the product's sender, for an engine that returns every bucket at once."""
    infos = [TensorInfo(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    fused = [(w, to_shard(w, [tensors[name] for name in w.hf], hf, 0, 1)) for w in exported_weights(hf)]
    source = PolicySource()
    info = SharedMemoryTrainerInfo(rank=0, bucket_bytes=bucket_mib * 2**20)
    sender = SharedMemorySender(client=ReturningClient(), source=source, info=info)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    plain = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.zeros_like(plain)
    copies, gathers, writes = [], [], []
    for _ in range(PUSHES + 1):  # the first one maps the memory
        started = time.perf_counter()
        target.copy_(plain)
        copies.append(time.perf_counter() - started)
        source.renew(infos, unfuse(fused, hf))
        sender.send_weights()
        gathers.append(sender.parts.gather_s)
        writes.append(sender.parts.write_s)
    sender.close()
    copy_s, gather_s, write_s = (statistics.median(seconds[1:]) for seconds in (copies, gathers, writes))
    print(
        f"alone, {num_bytes / 2**20:.0f} MiB in buckets of {bucket_mib} MiB, ms: memcpy {copy_s * 1e3:.0f} "
        f"({num_bytes / copy_s / 1e9:.1f} GB/s), gather {gather_s * 1e3:.0f}, write {write_s * 1e3:.0f} "
        f"({writes[0] * 1e3:.0f} the first time): {100 * copy_s / (gather_s + write_s):.0f} % of memcpy's speed",
        flush=True,
    )


def measure_packing(hf: HFModelConfig, tensors: dict[str, torch.Tensor]) -> None:
    """vLLM's packing of the model's matrices, fused as it fuses them too, in memory that is used again."""
    keep_freed_memory()
    fused = [to_shard(w, [tensors[name] for name in w.hf], hf, 0, 1) for w in exported_weights(hf)]
    layers = [torch.nn.Module() for shard in fused if shard.ndim == 2]
    method = UnquantizedLinearMethod()
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    plain = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.zeros_like(plain)
    copies, packs = [], []
    for _ in range(PUSHES + 1):
        started = time.perf_counter()
        target.copy_(plain)
        copies.append(time.perf_counter() - started)
        weights = [torch.nn.Parameter(shard, requires_grad=False) for shard in fused if shard.ndim == 2]
        started = time.perf_counter()
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight = weight
            method.process_weights_after_loading(layer)
        packs.append(time.perf_counter() - started)
    copy_s, pack_s = (statistics.median(seconds[1:]) for seconds in (copies, packs))
    print(f"vLLM's packing alone, ms: memcpy {copy_s * 1e3:.0f}, {len(layers)} matrices {pack_s * 1e3:.0f}", flush=True)


def unfuse(fused: list[tuple[Weight, torch.Tensor]], hf: HFModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """What ``iter_hf_weights`` does for one rank."""
    for weight, shard in fused:
        yield from zip(weight.hf, from_shards(weight, [shard], hf), strict=True)


class ReturningClient:
    """An engine whose workers let go of every bucket as they get it."""

    def __init__(self) -> None:
        self._mapped: dict[str, MappedBucket] = {}

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, info: dict) -> None:
        bucket = SimpleNamespace(**info)
        if bucket.key not in self._mapped:
            self._mapped[bucket.key] = MappedBucket(bucket.path, bucket.length)
        assert self._mapped[bucket.key].try_return(0)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass


async def measure(model: str | Path, arguments: argparse.Namespace, tensors: dict[str, torch.Tensor]) -> None:
    config = EngineConfig(dtype=arguments.dtype, kv_cache_gib=0.5)
    engine = VLLMEngine(model, config, max_model_len=256)
    infos = [TensorInfo(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    plain = torch.ones(sum(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8)
    target = torch.zeros_like(plain)
    await engine.start()
    try:
        for bucket_mib in map(int, arguments.buckets.split(",")):
            sync = WeightSync(engine, SyncConfig(bucket_mib=bucket_mib))
            pushes, copies = [], []
            for version in range(PUSHES + 1):
                started = time.perf_counter()
                target.copy_(plain)
                copies.append(time.perf_counter() - started)
                pushes.append(asdict(await sync.push(infos, tensors.items(), version)))
            first_s, copy_s = pushes.pop(0)["seconds"], statistics.median(copies[1:])
            parts = {name: statistics.median(push[name] for push in pushes) for name in pushes[0] if name != "bytes"}
            text = ", ".join(f"{name.removesuffix('_s')} {value * 1e3:.0f}" for name, value in parts.items())
            print(
                f"end to end in buckets of {bucket_mib} MiB, ms: memcpy {copy_s * 1e3:.0f}, {text} "
                f"({first_s * 1e3:.0f} the first time): {100 * copy_s / parts['seconds']:.0f} % of memcpy's speed",
                flush=True,
            )
            await measure_unwritten(engine, infos, tensors, bucket_mib)
    finally:
        await engine.close()


async def measure_unwritten(
    engine: VLLMEngine, infos: list[TensorInfo], tensors: dict[str, torch.Tensor], bucket_mib: int
) -> None:
    """What is left of a push where the trainer has nothing to do."""
    client, source = EngineClient([engine], asyncio.get_running_loop()), PolicySource()
    client.paused = Future()
    client.paused.set_result(None)
    info = SharedMemoryTrainerInfo(rank=0, bucket_bytes=bucket_mib * 2**20)
    sender = await asyncio.to_thread(RepeatingSender.trainer_init, info, client=client, source=source)
    plain = torch.ones(sum(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8)
    target = torch.zeros_like(plain)
    copies, pushes = [], []
    for _ in range(PUSHES + 1):
        started = time.perf_counter()
        target.copy_(plain)
        copies.append(time.perf_counter() - started)
        started = time.perf_counter()
        await engine.control("pause_generation", mode="keep", clear_cache=True)
        source.renew(infos, tensors.items())
        await asyncio.to_thread(sender.send_weights)
        await engine.control("reset_prefix_cache")
        await engine.control("resume_generation")
        pushes.append(time.perf_counter() - started)
    sender.close()
    copy_s, push_s = (statistics.median(seconds[1:]) for seconds in (copies, pushes))
    print(
        f"the same without gathering and writing, ms: memcpy {copy_s * 1e3:.0f}, seconds {push_s * 1e3:.0f}: "
        f"{100 * copy_s / push_s:.0f} % of memcpy's speed",
        flush=True,
    )


class RepeatingSender(SharedMemorySender):
    """Sends what it wrote the first time."""

    def _send_buckets(self) -> None:
        self._written = iter(list(self._buckets))
        super()._send_buckets()

    def _fill(self, tensors, capacity: int) -> Bucket:
        bucket = next(self._written, None)
        if bucket is None:
            return super()._fill(tensors, capacity)
        for _ in bucket.entries:
            tensors.take()
        bucket.lend()
        return bucket

    def _free_bucket(self, capacity: int) -> Bucket:
        """Another one for each, so that all stay as they are."""
        bucket = Bucket(capacity)
        self._buckets.append(bucket)
        return bucket


if __name__ == "__main__":
    main()
