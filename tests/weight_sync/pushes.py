"""What tests of pushes into a live engine share: random models, and whether the engine samples from one of them."""

import asyncio
import threading
from contextlib import contextmanager

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.tiny_models import write_tiny_model
from trace_megatron.rollout.engine import SamplingSettings
from trace_megatron.types import TensorInfo

SHAPE = {"tied": True, "hidden": 128, "ffn": 256, "head_dim": 32, "vocab": 300, "initializer_range": 0.15}
PROMPTS = [[(7 * index + position) % 250 for position in range(70)] for index in range(4)]
"""Longer than two blocks: the engine caches their prefixes."""

WITHHELD = "model.layers.1.self_attn.v_proj.weight"


def settings(temperature=1.0):
    return SamplingSettings(temperature, 1.0, 12, (258,))


class Weights:
    """A random model: its tensors, and the logprobs that transformers gives."""

    def __init__(self, folder, seed):
        self.folder = write_tiny_model(folder, "llama", seed=seed, **SHAPE)
        self.tensors = load_file(self.folder / "model.safetensors")
        self.infos = [TensorInfo(name, tuple(value.shape), value.dtype) for name, value in self.tensors.items()]
        self._model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float64)

    @torch.no_grad()
    def score(self, pairs, temperature=1.0):
        scores = []
        for prompt, completion in pairs:
            logits = self._model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
            logprobs = (logits / temperature).log_softmax(-1)
            scores.append(logprobs.gather(1, torch.tensor(completion)[:, None])[:, 0].tolist())
        return scores


def sample(loop, engine, temperature=1.0):
    async def all_prompts():
        requests = [engine.generate(prompt, settings(temperature), seed) for seed, prompt in enumerate(PROMPTS)]
        return await asyncio.gather(*requests)

    return loop.run(all_prompts())


def assert_samples_from(loop, engine, weights, version):
    for temperature in (1.0, 0.7):
        for _ in range(2):  # the second time from cached prefixes
            completions = sample(loop, engine, temperature)
            pairs = [(prompt, completion.token_ids) for prompt, completion in zip(PROMPTS, completions, strict=True)]
            expected = [logprob for scores in weights.score(pairs, temperature) for logprob in scores]
            found = [logprob for completion in completions for logprob in completion.logprobs]
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-4, rtol=0)
            assert {completion.weight_version for completion in completions} == {version}


def push(loop, sync, weights, version, tensors=None, infos=None):
    tensors = weights.tensors.items() if tensors is None else tensors
    return loop.run(sync.push(weights.infos if infos is None else infos, tensors, version))


def withheld(weights):
    return [item for item in weights.tensors.items() if item[0] != WITHHELD], weights.infos


@contextmanager
def held_back(tensors):
    """The tensors' iterator, which waits before its last one, and the event that lets it go on."""
    go_on = threading.Event()

    def iterate():
        *most, last = tensors
        yield from most
        assert go_on.wait(30)
        yield last

    try:
        yield iterate(), go_on
    finally:
        go_on.set()
