"""vLLM alone: start, generate, sleep, wake, generate the same. Usage: engine_case.py MODEL_FOLDER"""

from __future__ import annotations

import sys

import torch
from vllm import LLM, SamplingParams

PROMPTS = [{"prompt_token_ids": [(7 * index + position) % 250 for position in range(70)]} for index in range(4)]


def main(model: str) -> None:
    llm = LLM(model, enable_sleep_mode=True, gpu_memory_utilization=0.4, max_model_len=1024, seed=0)
    settings = SamplingParams(temperature=0.0, max_tokens=16)
    before = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, settings, use_tqdm=False)]
    awake = torch.cuda.mem_get_info()[0]
    llm.sleep(level=1)
    freed_gib = (torch.cuda.mem_get_info()[0] - awake) / 2**30
    llm.wake_up()
    after = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, settings, use_tqdm=False)]
    assert freed_gib > 1.0, f"expected sleep to free memory, found {freed_gib:.2f} GiB"
    assert list(map(list, before)) == list(map(list, after)), "expected the same tokens after waking up"
    print(f"the same tokens after a sleep that freed {freed_gib:.1f} GiB")


if __name__ == "__main__":
    main(sys.argv[1])
