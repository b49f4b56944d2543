"""Two steps, a checkpoint and two more steps, against the last two in fresh processes: same layout and others."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.policy.checkpoint_ranks import EXPERTS, MODEL, RESHARDED, SAVED, START
from tests.policy.step_examples import engine_logprobs, example_trees
from tests.tiny_models import write_tiny_model
from trace_megatron.config import PolicyConfig
from trace_megatron.errors import UserError
from trace_megatron.launch.local import run_ranks
from trace_megatron.policy import checkpoint
from trace_megatron.policy.convert import megatron_to_hf
from trace_megatron.policy.hf_config import read_hf_config

SAVED_DTYPES = {False: torch.float32, True: torch.bfloat16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    # 261 rows of vocabulary: padded at TP 2, not at TP 1
    shape = {"num_layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 261}
    write_tiny_model(folder / MODEL, "llama", tied=True, **shape)
    write_tiny_model(folder / EXPERTS, "qwen3_moe", tied=False, **shape)
    for name in (MODEL, EXPERTS):
        model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        logprobs = engine_logprobs(example_trees(vocab_size=200), model)
        text = {",".join(map(str, key)): value for key, value in logprobs.items()}
        (folder / f"{name}-engine.json").write_text(json.dumps(text))
    script = str(Path(__file__).with_name("checkpoint_ranks.py"))
    for stage in ("save", "load"):
        assert run_ranks([sys.executable, script, str(folder), stage], num_ranks=2) == 0
    return folder


def read_steps(folder, name):
    steps = json.loads((folder / f"{name}.json").read_text())
    for step in steps:
        for measured in ("tokens_per_s", "flop_utilisation", "peak_memory_gib"):
            del step[measured]
    return steps, load_file(folder / f"{name}.safetensors")


@pytest.mark.parametrize("name", SAVED)
def test_resumed_steps_are_the_same(folder, name):
    steps, weights = read_steps(folder, f"{name}-whole")
    resumed_steps, resumed_weights = read_steps(folder, f"{name}-resumed")
    assert resumed_steps == steps
    assert all(torch.equal(weights[key], resumed_weights[key]) for key in weights)
    assert steps[0]["loss"] != steps[1]["loss"]  # the learning rate is not so small that anything would pass


@pytest.mark.parametrize("name", RESHARDED)
def test_another_layout_continues(folder, name):
    source = RESHARDED[name][1]
    steps, weights = read_steps(folder, f"{source}-whole")
    resumed_steps, resumed_weights = read_steps(folder, f"{source}-at-{name}")
    for step, resumed in zip(steps, resumed_steps, strict=True):
        for key in ("loss", "grad_norm", "entropy", "learning_rate"):
            assert resumed[key] == pytest.approx(step[key], rel=1e-4), key
    # Adam turns noise of float32 into whole steps of the learning rate (1e-2) where a gradient is close to 0
    for key in weights:
        assert float((weights[key] - resumed_weights[key]).abs().mean()) < 1e-5


def test_errors_change_nothing(folder):
    assert (folder / "refused.ok").exists()
    AutoModelForCausalLM.from_pretrained(folder / "exported")


@pytest.mark.parametrize("name", ["pp2", "dp2-bf16", "tp2-sp-bf16-replicated", "experts-ep2-dp2"])
def test_a_checkpoint_becomes_an_hf_folder_without_ranks(folder, tmp_path, name):
    """Two steps on from the start: not the model that the run began with, and the very numbers it held."""
    model = folder / (EXPERTS if "experts" in name else MODEL)
    megatron_to_hf(folder / f"{name}-checkpoint", tmp_path / "hf", model)
    found = load_file(tmp_path / "hf" / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert loaded.dtype == SAVED_DTYPES[name.endswith(("bf16", "replicated"))]
    megatron_to_hf(folder / f"{name}-{START}", tmp_path / "start", model)
    before = load_file(model / "model.safetensors")
    for key, value in load_file(tmp_path / "start" / "model.safetensors").items():
        assert torch.equal(value, before[key].to(value.dtype)), key
        assert not torch.equal(value, found[key]), key


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "rank_00001.safetensors").unlink(), "rank_00001.safetensors' of .* missing or cut"),
        (lambda folder: (folder / "rank_00000.safetensors").write_bytes(b"short"), "missing or cut"),
        (lambda folder: os.truncate(folder / "rank_00001.safetensors", 20_000), "missing or cut"),
    ],
)
def test_a_broken_checkpoint_is_not_converted(folder, tmp_path, change, words):
    copy = shutil.copytree(folder / "tp2-sp-bf16-replicated-checkpoint", tmp_path / "copy")
    change(copy)
    with pytest.raises(UserError, match=words):
        megatron_to_hf(copy, tmp_path / "hf", folder / MODEL)
    assert not (tmp_path / "hf").exists()


def test_files_are_complete_and_named(folder):
    names = {path.name for path in (folder / "pp2-checkpoint").iterdir()}
    assert names == {"policy.json", "rank_00000.safetensors", "rank_00001.safetensors"}
    assert not list(folder.glob(".*partial"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "policy.json").unlink(), "no policy.json"),
        (lambda folder: (folder / "policy.json").write_text("{"), "expected JSON"),
        (lambda folder: (folder / "policy.json").write_text("[]"), "expected a checkpoint with format 1"),
        (lambda folder: (folder / "rank_00001.safetensors").unlink(), "rank_00001.safetensors"),
        (lambda folder: (folder / "rank_00000.safetensors").write_bytes(b"short"), "missing or cut"),
        (lambda folder: edit(folder, "model", "hidden_size", 64), "model.hidden_size 32, found 64"),
        (lambda folder: edit(folder, "model", "num_layers", 3), "model.num_layers 4, found 3"),
    ],
)
def test_unreadable_checkpoints_are_refused_in_a_sentence(folder, tmp_path, change, words):
    copy = shutil.copytree(folder / "pp2-checkpoint", tmp_path / "copy")
    config = PolicyConfig(model=str(folder / MODEL), dtype="float32", pipeline_parallel=2)
    expected = checkpoint.describe(read_hf_config(folder / MODEL), config)
    checkpoint.check(copy, expected)
    change(copy)
    with pytest.raises(UserError) as error:
        checkpoint.check(copy, expected)
    assert words in str(error.value) and "\n" not in str(error.value)


def edit(folder, section, key, value):
    path = folder / "policy.json"
    description = json.loads(path.read_text())
    description[section][key] = value
    path.write_text(json.dumps(description))
