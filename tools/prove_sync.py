"""Live weights from Megatron at TP x PP into vLLM at TP 1, 2 and 4, against transformers on the exported folder.

    python tools/prove_sync.py [--pushes 50]

A small random model of each family that is cheap to run; the engine starts from other weights. After the push its
logprobs must be those of transformers (float64) on what the policy exports. Then all ranks scale their parameters, in
place, before one push after the other, and before the last scale them back: the logprobs must be the same once more,
and the memory of trainer and engine must not have grown. With --gather rank 0 gathers the weights, as it does where
ranks are on several machines. Takes a few minutes; prints a line per layout.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import tempfile
from pathlib import Path

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.tiny_models import write_tiny_model
from trace_megatron.config import EngineConfig, LossConfig, OptimizerConfig, PolicyConfig, SyncConfig
from trace_megatron.launch.local import run_ranks

SHAPE = {"hidden": 128, "ffn": 256, "head_dim": 32, "vocab": 320, "initializer_range": 0.15, "num_layers": 4}
CASES = [
    (family, tp, pp, engine_tp)
    for family, (tp, pp, engine_tp) in zip(
        itertools.cycle(("qwen3", "qwen2", "llama")), itertools.product((1, 2), (1, 2), (1, 2)), strict=False
    )
] + [("qwen3", 1, 2, 4)]  # four engine ranks share two key-value heads
PROMPTS = [[(7 * index + position) % 250 for position in range(70)] for index in range(4)]
TOLERANCE, MAX_GROWTH = 1e-4, 8 * 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pushes", type=int, default=50)
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)))
    parser.add_argument("--gather", action="store_true")
    parser.add_argument("--case", type=int, help="run as one rank of this case")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.case is not None:
        run_rank(options)
        return
    failed = []
    for case in options.cases:
        family, tp, pp, _ = CASES[case]
        with tempfile.TemporaryDirectory() as folder:
            for seed, name in enumerate(("old", "new")):
                write_tiny_model(Path(folder) / name, family, seed=seed, tied=case % 2 == 0, **SHAPE)
            command = [sys.executable, __file__, "--case", str(case), "--folder", folder]
            command += ["--pushes", str(options.pushes), *["--gather"] * options.gather]
            if run_ranks(command, tp * pp):
                failed.append(CASES[case])
    if failed:
        raise SystemExit(f"failed: {failed}")
    print(f"{len(options.cases)} cases hold")


def run_rank(options: argparse.Namespace) -> None:
    from trace_megatron.policy.worker import Policy

    _, tp, pp, engine_tp = CASES[options.case]
    config = PolicyConfig(model=str(options.folder / "new"), dtype="float32", tensor_parallel=tp, pipeline_parallel=pp)
    with Policy(config, OptimizerConfig(), LossConfig()) as policy:
        if not policy.is_driver:
            policy.serve(lambda arguments, _: scale(policy, arguments["factor"]))
            return
        policy.export_hf(options.folder / "export")
        asyncio.run(drive(policy, options, engine_tp))


async def drive(policy, options: argparse.Namespace, engine_tp: int) -> None:
    from trace_megatron.rollout.vllm_engine import VLLMEngine
    from trace_megatron.weight_sync.push import WeightSync

    weights = policy.weights if options.gather else policy.weights_in_place
    engine_config = EngineConfig(dtype="float32", kv_cache_gib=0.1, threads=2, tensor_parallel=engine_tp)
    engine = VLLMEngine(options.folder / "old", engine_config, max_model_len=256)
    await engine.start()
    try:
        sync = WeightSync(engine, SyncConfig(bucket_mib=1))
        before = await logprob_error(engine, options.folder / "export")
        await sync.push(*weights(), version=1)
        after = await logprob_error(engine, options.folder / "export")
        memory, factor = [], 1.0
        for version in range(2, options.pushes + 1):
            # Powers of two: nothing is lost. What the last push sends is what the first one did.
            step = 1 / factor if version == options.pushes else (-2.0, 0.25)[version % 2]
            factor *= step
            policy.shared_ranks.send({"factor": step}, ())
            scale(policy, step)
            await sync.push(*weights(), version)
            memory.append(resident_bytes())
        last = await logprob_error(engine, options.folder / "export")
    finally:
        await engine.close()
    warm = max(memory[: len(memory) // 2])
    growth = max(memory[len(memory) // 2 :]) - warm
    family, tp, pp, _ = CASES[options.case]
    print(
        f"{family}: Megatron TP {tp} x PP {pp} -> engine TP {engine_tp}: logprobs off by {before:.2f} before, "
        f"{after:.1e} after one push, {last:.1e} after {options.pushes}; second half of the pushes takes "
        f"{growth / 2**20:+.1f} MiB of {warm / 2**20:.0f}",
        flush=True,
    )
    assert before > 0.1 and max(after, last) < TOLERANCE and growth < MAX_GROWTH


@torch.no_grad()
def scale(policy, factor: float) -> None:
    """This rank's parameters."""
    for chunk in policy._trainer.model_chunks:
        for parameter in chunk.parameters():
            parameter *= factor


async def logprob_error(engine, folder: Path) -> float:
    """The largest difference to transformers on sampled tokens."""
    from transformers import AutoModelForCausalLM

    from trace_megatron.rollout.engine import SamplingSettings

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    settings = SamplingSettings(1.0, 1.0, 12, (258,))
    requests = (engine.generate(prompt, settings, seed) for seed, prompt in enumerate(PROMPTS))
    worst = 0.0
    for prompt, completion in zip(PROMPTS, await asyncio.gather(*requests), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        worst = max(worst, float((torch.tensor(completion.logprobs) - expected).abs().max()))
    return worst


def resident_bytes() -> int:
    """Of this process and the engine's, what they share counted once."""
    family = [psutil.Process(os.getpid()), *psutil.Process(os.getpid()).children(recursive=True)]
    return sum(process.memory_full_info().pss for process in family)


if __name__ == "__main__":
    main()
