"""Generation speed of the rollout engine: tokens/s by dtype and number of concurrent requests.

    python tools/bench/bench_generation.py [--model FOLDER] [--dtypes bfloat16,float32] [--concurrency 16,64,128]

Each request has a prompt of its own (nothing comes from the prefix cache) and a seed, as in a run. Per setting: tokens
per second of wall time, and per CPU second of the engine's process, which says more where the cores are shared.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass

import psutil

from trace_megatron.config import EngineConfig
from trace_megatron.rollout.engine import SamplingSettings
from trace_megatron.rollout.engine_process import processes_below
from trace_megatron.rollout.vllm_engine import VLLMEngine


@dataclass(frozen=True, slots=True)
class Speed:
    per_second: float
    """Tokens."""
    per_cpu_second: float
    """Tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2-135m-instruct")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--concurrency", default="16,64,128")
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--prompt-tokens", type=int, default=80)
    parser.add_argument("--new-tokens", type=int, default=48)
    arguments = parser.parse_args()
    levels = [int(level) for level in arguments.concurrency.split(",")]
    print(f"load average before: {psutil.getloadavg()[0]:.1f} on {psutil.cpu_count()} cores")
    print("| dtype | start s | " + " | ".join(f"{level} requests" for level in levels) + " |")
    print("|---" * (len(levels) + 2) + "|")
    for dtype in arguments.dtypes.split(","):
        start_s, speeds = asyncio.run(measure(arguments, dtype, levels))
        cells = " | ".join(f"{speed.per_second:.0f} ({speed.per_cpu_second:.0f})" for speed in speeds)
        print(f"| {dtype} | {start_s:.1f} | {cells} |", flush=True)


async def measure(arguments: argparse.Namespace, dtype: str, levels: list[int]) -> tuple[float, list[Speed]]:
    """Seconds until the engine serves, and its speed at each level."""
    config = EngineConfig(dtype=dtype, max_num_seqs=max(levels), threads=arguments.threads)
    engine = VLLMEngine(arguments.model, config, max_model_len=arguments.prompt_tokens + arguments.new_tokens)
    started = time.perf_counter()
    await engine.start()
    start_s = time.perf_counter() - started
    try:
        await generate(engine, 1, arguments)
        return start_s, [await generate(engine, level, arguments) for level in levels]
    finally:
        await engine.close()


async def generate(engine: VLLMEngine, level: int, arguments: argparse.Namespace) -> Speed:
    settings = SamplingSettings(1.0, 1.0, arguments.new_tokens, ())
    prompts = [
        [1 + (level * 7919 + index * 31 + position * 17) % 4000 for position in range(arguments.prompt_tokens)]
        for index in range(level)
    ]
    started, started_cpu = time.perf_counter(), engine_cpu_s()
    await asyncio.gather(*(engine.generate(prompt, settings, seed) for seed, prompt in enumerate(prompts)))
    num_tokens = level * arguments.new_tokens
    return Speed(num_tokens / (time.perf_counter() - started), num_tokens / (engine_cpu_s() - started_cpu))


def engine_cpu_s() -> float:
    """CPU seconds so far of the engine's processes: all that this process has started."""
    times = [process.cpu_times() for process in processes_below([psutil.Process().pid])[1:]]
    return sum(time.user + time.system for time in times)


if __name__ == "__main__":
    main()
