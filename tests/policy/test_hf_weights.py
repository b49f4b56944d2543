"""HF weights through Megatron and back: bit by bit at several layouts, and what a wrong folder is told."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny_models import LLAMA3_SCALING, write_tiny_model
from trace_megatron.config import PolicyConfig
from trace_megatron.errors import UserError
from trace_megatron.policy import hf_files
from trace_megatron.policy.hf_config import read_hf_config
from trace_megatron.policy.hf_weights import export_hf, hf_tensor_infos, iter_hf_weights, load_hf_weights
from trace_megatron.policy.model import build_model

NUM_RANKS = 4
# 261 rows are padded to 262 or 264; one or two key-value heads are fewer than four ranks
MODELS = {
    "llama": {"family": "llama", "tied": False, "vocab": 261, "rope_scaling": LLAMA3_SCALING},
    "llama-tied": {"family": "llama", "tied": True, "vocab": 264, "kv_heads": 4},
    "qwen3": {"family": "qwen3", "tied": False, "vocab": 264, "kv_heads": 1},
    "qwen3-tied": {"family": "qwen3", "tied": True, "vocab": 261, "head_dim": 32},
}


def run_ranks(script: Path, argument: Path, num_ranks: int, timeout_s: float) -> None:
    """Run ``script`` as torchrun would, and fail with the first rank's words that ends badly."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "OMP_NUM_THREADS": "1",
    }
    logs = [argument / f"rank{rank}.log" for rank in range(num_ranks)]
    processes = []
    for rank, log in enumerate(logs):
        environment = os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log.open("w") as output:
            command = [sys.executable, str(script), str(argument)]
            processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = [log.read_text()[-3000:] for log, code in zip(logs, codes, strict=True) if code]
    assert not failed, failed[0]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory) -> Path:
    """The working folder of one launch of four ranks through all layouts."""
    work = tmp_path_factory.mktemp("layouts")
    for index, (name, options) in enumerate(MODELS.items()):
        folder = write_tiny_model(work / name, seed=index, **options)
        save_file(reference_pass(folder, options["vocab"]), work / f"{name}.safetensors")
    run_ranks(Path(__file__).with_name("model_ranks.py"), work, NUM_RANKS, timeout_s=240)
    return work


def reference_pass(folder: Path, vocab_size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(vocab_size, (1, 48), generator=generator)
    upstream = torch.randn(1, 48, vocab_size, generator=generator)
    model = AutoModelForCausalLM.from_pretrained(folder)
    logits = model(tokens).logits
    logits.backward(upstream)
    gradients = {f"grad.{name}": parameter.grad for name, parameter in model.named_parameters()}
    return {"tokens": tokens, "logits": logits.detach(), "upstream": upstream} | gradients


@pytest.fixture(scope="module")
def findings(layouts) -> list[dict]:
    merged: dict[tuple[str, str], dict] = {}
    for rank in range(NUM_RANKS):
        for finding in json.loads((layouts / f"result.{rank}.json").read_text()):
            assert finding.pop("only_names", True)
            merged.setdefault((finding["layout"], finding["model"]), {}).update(finding)
    assert len(merged) == 5 * len(MODELS)
    return list(merged.values())


def test_logits_equal_transformers_at_every_layout(findings):
    for finding in findings:
        tolerance = 0.03 if finding["layout"] == "bf16" else 1e-5
        assert finding["logits_error"] < tolerance, finding


def test_gradients_equal_transformers_also_with_fewer_key_value_heads_than_ranks(findings):
    checked = [finding for finding in findings if "gradient_error" in finding]
    assert {finding["layout"] for finding in checked} == {"tp2", "tp4"}
    for finding in checked:
        assert finding["gradient_error"][0] < 1e-4, finding


def test_padded_rows_never_receive_probability(findings):
    assert {finding["padded_rows"] for finding in findings} == {0, 1, 3}
    assert {finding["padded_mass"] for finding in findings} == {0.0}


def test_round_trip_is_bitwise_at_every_layout(findings):
    for finding in findings:
        assert finding["same_names"] and not finding["unequal"], finding


@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp2pp2sp", "tp4", "bf16"])
def test_the_exported_folder_is_an_ordinary_hf_model(layout, layouts):
    source, export = layouts / "qwen3-tied", layouts / f"export-{layout}"
    dtype = torch.bfloat16 if layout == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(export, dtype="auto")
    assert model.dtype is dtype
    expected = load_file(source / "model.safetensors")
    assert set(load_file(export / "model.safetensors")) == set(expected)
    for name, tensor in model.state_dict().items():
        if name in expected:  # transformers lists the tied head as well
            assert torch.equal(tensor, expected[name].to(dtype)), name
    messages = [{"role": "user", "content": "2+3=?"}]
    templates = [AutoTokenizer.from_pretrained(folder).apply_chat_template(messages) for folder in (source, export)]
    assert templates[0] == templates[1]
    assert read_hf_config(export).rope_theta == read_hf_config(source).rope_theta
    assert not list(layouts.glob(".export*"))


@pytest.fixture
def tiny(one_rank, tmp_path):
    """A folder with its config and a model that waits for weights."""
    folder = write_tiny_model(tmp_path / "tiny", "qwen3", tied=False)
    hf = read_hf_config(folder)
    return folder, hf, build_model(hf, PolicyConfig(dtype="float32"))


def rewrite(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.k_norm.weight"), "model.layers.1.self_attn.k_norm.weight"),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(2)}), "model.layers.2.mlp.up_proj"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}), "q_proj.bias"),
        (lambda t: t.update({"model.norm.weight": torch.ones(65)}), r"model.norm.weight.*\(65,\)"),
        (lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}), "model.norm.weight.*I8"),
    ],
)
def test_a_wrong_tensor_is_named(change, named, tiny):
    folder, hf, chunks = tiny
    rewrite(folder, change)
    with pytest.raises(UserError, match=named):
        load_hf_weights(chunks, folder, hf)


def test_a_wrong_file_is_named(tiny):
    folder, hf, chunks = tiny
    weights, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    tensors = load_file(weights)
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(UserError, match=r"tiny/model\.safetensors"):
        load_hf_weights(chunks, folder, hf)
    weights.unlink()
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json.*found neither"):
        load_hf_weights(chunks, folder, hf)
    weight_map = dict.fromkeys(tensors, "a.safetensors")
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match=r"tiny/a\.safetensors"):
        load_hf_weights(chunks, folder, hf)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "a.safetensors")
    with pytest.raises(UserError, match=r"model\.norm\.weight.*a\.safetensors"):
        load_hf_weights(chunks, folder, hf)
    index.write_text("{}")
    with pytest.raises(UserError, match=r"index\.json"):
        load_hf_weights(chunks, folder, hf)


def test_redundant_tensors_of_old_checkpoints_are_left_alone(one_rank, tmp_path):
    folder = write_tiny_model(tmp_path / "old", "llama", tied=True)
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    rewrite(folder, lambda t: t.update(frequencies, **{"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    hf = read_hf_config(folder)
    chunks = build_model(hf, PolicyConfig(dtype="float32"))
    load_hf_weights(chunks, folder, hf)
    assert "lm_head.weight" not in dict(iter_hf_weights(chunks, hf))


def test_a_sharded_export_loads_again(tiny, tmp_path, monkeypatch):
    folder, hf, chunks = tiny
    load_hf_weights(chunks, folder, hf)
    monkeypatch.setattr(hf_files, "SHARD_BYTES", 60_000)
    export_hf(chunks, hf, folder, tmp_path / "new" / "export")
    files = sorted(path.name for path in (tmp_path / "new" / "export").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    expected = {info.name: info.shape for info in hf_tensor_infos(hf, torch.float32)}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "export")
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == expected
    again = build_model(hf, PolicyConfig(dtype="float32"))
    load_hf_weights(again, tmp_path / "new" / "export", hf)
    for (name, found), (_, wanted) in zip(iter_hf_weights(again, hf), iter_hf_weights(chunks, hf), strict=True):
        assert torch.equal(found, wanted), name


def test_an_export_that_fails_leaves_nothing(tiny, tmp_path):
    folder, hf, chunks = tiny
    (folder / "config.json").unlink()
    with pytest.raises((UserError, OSError)):
        export_hf(chunks, hf, folder, tmp_path / "out" / "export")
    assert not list((tmp_path / "out").iterdir())
