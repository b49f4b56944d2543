"""A training step in many parallel layouts on real processes, against an HF model trained trajectory by trajectory."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.policy.layout_ranks import CELLS, EXPERTS, FAMILIES, LOSSES, step_batches
from tests.policy.step_examples import engine_logprobs, example_advantages, example_trees, expected_step, with_logprobs
from tests.tiny_models import write_tiny_model
from trace_megatron.launch.local import run_ranks

TOLERANCE = 1e-5
"""Of the largest entry of each gradient, and of loss and norm; float32 against float64."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, trees and what the four processes made of them."""
    folder = tmp_path_factory.mktemp("layouts")
    shape = {"num_layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 261}
    for seed, suffix in ((0, ""), (1, "-reference")):
        write_tiny_model(folder / f"llama-tied{suffix}", "llama", tied=True, seed=seed, **shape)
        write_tiny_model(folder / f"qwen3-untied{suffix}", "qwen3", tied=False, head_dim=12, seed=seed, **shape)
        write_tiny_model(folder / f"{EXPERTS[0]}{suffix}", "qwen3_moe", tied=False, seed=seed, **shape)
    for family in (*FAMILIES, *EXPERTS):
        logprobs = engine_logprobs(example_trees(vocab_size=200), hf_model(folder / family))
        text = {",".join(map(str, key)): value for key, value in logprobs.items()}
        (folder / f"{family}-engine.json").write_text(json.dumps(text))
    os.environ["OMP_NUM_THREADS"] = "1"
    script = Path(__file__).with_name("layout_ranks.py")
    assert run_ranks([sys.executable, str(script), str(folder)], num_ranks=4) == 0
    return folder


def hf_model(folder):
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}  # the others are for float32 at most
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **plain)


@pytest.fixture(scope="module")
def expected(folder):
    """By family, loss and tree."""
    results = {}

    def compute(family, loss, only_tree):
        key = family, loss, only_tree
        if key not in results:
            trees = read_trees(folder, family)
            advantages = example_advantages(trees)
            if only_tree is not None:
                trees, advantages = trees[only_tree:][:1], advantages[only_tree:][:1]
            reference = hf_model(folder / f"{family}-reference") if LOSSES[loss].kl_coef else None
            results[key] = expected_step(hf_model(folder / family), trees, advantages, LOSSES[loss], reference)
        return results[key]

    return compute


def read_trees(folder, family):
    stored = json.loads((folder / f"{family}-engine.json").read_text())
    return with_logprobs(
        example_trees(vocab_size=200), {tuple(map(int, key.split(","))): value for key, value in stored.items()}
    )


@pytest.mark.parametrize(("family", "layout"), CELLS, ids=lambda value: getattr(value, "name", value))
def test_step_equals_unpacked_trajectories(folder, expected, family, layout):
    want = expected(family, layout.loss, layout.only_tree)
    stats = json.loads((folder / f"{family}-{layout.name}.json").read_text())
    assert stats["loss"] == pytest.approx(want.loss, rel=TOLERANCE)
    assert stats["grad_norm"] == pytest.approx(want.grad_norm, rel=TOLERANCE)
    is_whole = layout.packed and layout.num_packs == 1 and layout.policy.get("data_parallel", 1) == 1
    for name, value in want.statistics.items():
        if name == "clip_share" and not is_whole:
            continue  # a shared token that is cut counts only with the leaves of its own piece
        assert stats[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert len(stats["peak_memory_gib"]) == layout.world_size and min(stats["peak_memory_gib"]) > 0.05
    assert stats["flop_utilisation"] > 0 and stats["tokens_per_s"] > 0
    tensors = load_file(folder / f"{family}-{layout.name}.safetensors")
    gradients = {name: values for name, values in tensors.items() if name.startswith("gradients.")}
    assert len(gradients) == (0 if layout.is_sharded else len(want.gradients))
    for name, values in gradients.items():
        reference = want.gradients[name.removeprefix("gradients.")]
        error = float((values.double() - reference).abs().max() / reference.abs().max())
        assert error <= TOLERANCE, (name, error)


@pytest.mark.parametrize(("family", "layout"), CELLS, ids=lambda value: getattr(value, "name", value))
def test_logprobs_equal_unpacked_trajectories(folder, expected, family, layout):
    # A token is known by what the engine said of it: packs change its place, and repeat it where a tree is cut.
    want = {np.float32(engine): value for engine, value in expected(family, layout.loss, layout.only_tree).logprobs}
    tensors = load_file(folder / f"{family}-{layout.name}.safetensors")
    seen = set()
    for i, row in enumerate(step_batches(folder, family, layout)):
        for j, batch in enumerate(row):
            values = tensors[f"logprobs.{i}.{j}"]
            assert values.shape == (batch.num_tokens,)
            for engine, weight, value in zip(batch.rollout_logprobs, batch.weight, values, strict=True):
                assert float(value) == pytest.approx(want[np.float32(engine)] if weight > 0 else 0.0, abs=1e-5)
                seen |= {np.float32(engine)} if weight > 0 else set()
    assert seen == want.keys()


def test_gradients_of_all_layouts_reach_every_sign_and_bound(folder, expected):
    """The examples are worth their name: clipped tokens, and losses that differ where they should."""
    for family in FAMILIES:
        plain, dual = (expected(family, loss, None) for loss in ("plain", "dual_clip"))
        assert 0.2 < plain.statistics["clip_share"] < dual.statistics["clip_share"] < 0.8
        assert abs(plain.loss - dual.loss) > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("distributed", [True, False])
def test_adam_equals_torch(folder, dtype, distributed):
    assert (folder / f"adam-{dtype}-{distributed}.ok").exists()


def test_vocabulary_parallel_logprobs(folder):
    assert all((folder / f"vocabulary-{process}.ok").exists() for process in range(4))


def test_a_step_that_is_not_finite_changes_nothing(folder):
    assert all((folder / f"not-finite-{process}.ok").exists() for process in range(2))
