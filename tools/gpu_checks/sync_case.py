"""A policy's weights pushed into a live engine by one backend. Usage: sync_case.py BACKEND

A small random model; the engine starts from other weights, and after the push its logprobs must be those of
transformers on what the policy exports.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
import prove_sync  # noqa: E402

from tests.tiny_models import write_tiny_model  # noqa: E402
from trace_megatron.config import EngineConfig, LossConfig, OptimizerConfig, PolicyConfig, SyncConfig  # noqa: E402
from trace_megatron.launch.local import run_ranks  # noqa: E402

_TOLERANCE = 2e-3  # kernels of engine and transformers differ, in float32


def main(backend: str, folder: Path | None) -> int:
    if folder is not None:
        run_rank(backend, folder)
        return 0
    with tempfile.TemporaryDirectory() as name:
        for seed, which in enumerate(("old", "new")):
            write_tiny_model(Path(name) / which, "qwen3", seed=seed, tied=True, **prove_sync.SHAPE)
        return run_ranks([sys.executable, __file__, backend, name], 1)


def run_rank(backend: str, folder: Path) -> None:
    from trace_megatron.policy.worker import Policy

    config = PolicyConfig(model=str(folder / "new"), dtype="float32")
    with Policy(config, OptimizerConfig(), LossConfig()) as policy:
        policy.export_hf(folder / "export")
        if backend == "nccl":  # wants engine and trainer on devices of their own; this process has taken the first
            os.environ["CUDA_VISIBLE_DEVICES"] = "1"
        asyncio.run(push(policy, backend, folder))


async def push(policy, backend: str, folder: Path) -> None:
    from trace_megatron.rollout.vllm_engine import VLLMEngine
    from trace_megatron.weight_sync.push import WeightSync

    config = EngineConfig(dtype="float32", kv_cache_gib=0.1, threads=1, gpu_memory_utilization=0.2)
    engine = VLLMEngine(folder / "old", config, max_model_len=256, weight_backend=backend)
    await engine.start()
    try:
        sync = WeightSync(engine, SyncConfig(bucket_mib=1))
        before = await prove_sync.logprob_error(engine, folder / "export")
        for version in (1, 2):
            await sync.push(*policy.weights(), version=version)
        after = await prove_sync.logprob_error(engine, folder / "export")
    finally:
        await engine.close()
    assert before > 0.1 and after < _TOLERANCE, f"logprobs off by {before:.2f} before, {after:.1e} after"
    print(f"logprobs off by {before:.2f} before, {after:.1e} after two pushes", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]) if sys.argv[2:] else None))
