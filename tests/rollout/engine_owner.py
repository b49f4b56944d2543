"""A trainer rank with an engine, as torchrun would start it: answers into a file, then generates until it is killed.

engine_owner.py MODEL OTHER_MODEL ANSWERS
"""

import asyncio
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.tiny_models import build_tokenizer
from trace_megatron.config import EngineConfig, SyncConfig
from trace_megatron.rollout.engine import EngineError, SamplingSettings
from trace_megatron.rollout.react import ReActEngine, ReActRenderer
from trace_megatron.rollout.vllm_engine import VLLMEngine
from trace_megatron.types import TensorInfo
from trace_megatron.weight_sync.push import WeightSync

if __name__ == "__mp_main__":
    sys.exit("an engine process imported its owner's main module")

MAX_MODEL_LEN = 256
PROMPTS = [[(13 * index + 5 * position) % 250 for position in range(20 + 9 * index)] for index in range(8)]
PLAIN = SamplingSettings(1.0, 1.0, 16, ())
SETTINGS = {
    "plain": PLAIN,
    "cool": SamplingSettings(0.7, 1.0, 16, ()),
    "nucleus": SamplingSettings(0.9, 0.6, 16, ()),
}


async def answers(engine, other_model):
    async def ask(settings, order, prompts=PROMPTS):
        requests = [engine.generate(prompts[index], settings, 1000 + index) for index in order]
        completions = await asyncio.gather(*requests)
        return [asdict(completions[order.index(index)]) for index in range(len(order))]

    every = list(range(len(PROMPTS)))
    found = {name: await ask(settings, every) for name, settings in SETTINGS.items()}
    found["backwards"] = await ask(PLAIN, every[::-1])
    found["alone"] = [asdict(await engine.generate(PROMPTS[index], PLAIN, 1000 + index)) for index in every]
    found["crowded"] = (await ask(PLAIN, list(range(24)), prompts=PROMPTS * 3))[: len(PROMPTS)]
    found["other seeds"] = [asdict(await engine.generate(PROMPTS[index], PLAIN, 2000 + index)) for index in every]

    stop = found["plain"][0]["token_ids"][5]
    found["stopped"] = asdict(await engine.generate(PROMPTS[0], SamplingSettings(1.0, 1.0, 16, (stop,)), 1000))
    long_prompt = [index % 250 for index in range(MAX_MODEL_LEN - 4)]
    found["cut"] = asdict(await engine.generate(long_prompt, PLAIN, 0))
    try:
        await engine.generate(long_prompt * 2, PLAIN, 0)
    except EngineError as error:
        found["too long"] = str(error)

    sharp, react = SamplingSettings(0.01, 1.0, 81, ()), ReActRenderer(build_tokenizer())
    found["greedy"] = asdict(await engine.generate(PROMPTS[0], sharp, 0))
    found["in pieces"] = asdict(await ReActEngine(engine, react).generate(PROMPTS[0], sharp, 0))

    tensors = load_file(other_model / "model.safetensors")
    infos = [TensorInfo(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    await WeightSync(engine, SyncConfig()).push(infos, tensors.items(), version=1)
    found["other model"] = await ask(PLAIN, every)
    return found


async def main(model, other_model, path):
    environment, threads = dict(os.environ), torch.get_num_threads()
    engine = VLLMEngine(
        model, EngineConfig(dtype="float32", kv_cache_gib=0.1, threads=1), max_model_len=MAX_MODEL_LEN, seed=5
    )
    await engine.start()
    assert dict(os.environ) == environment
    assert torch.get_num_threads() == threads
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert ones.tolist() == [1.0, 1.0, 1.0]
    path.write_text(json.dumps(await answers(engine, other_model)))
    core = engine._llm.engine_core.resources.engine_manager.processes[0]
    print(core.pid, engine._folder.name, flush=True)
    while True:
        await engine.generate(PROMPTS[0], PLAIN, 0)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])))
