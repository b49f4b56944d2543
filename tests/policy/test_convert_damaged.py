"""Conversion of what is damaged, or of another model: one sentence that names what is wrong, and nothing left."""

import dataclasses
import io
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.policy.stored_tensors import assert_same, tensors_of
from trace_megatron.errors import UserError
from trace_megatron.policy import dist_index
from trace_megatron.policy.convert import hf_to_megatron, megatron_to_hf
from trace_megatron.policy.names import ParallelSizes


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def cut(path: Path, num_bytes: int = 5) -> None:
    os.truncate(path, path.stat().st_size - num_bytes)


def blot(path: Path, text: bytes, other: bytes = b"") -> None:
    path.write_bytes(path.read_bytes().replace(text, other or b"\xff" * len(text)))


def edit_config(folder: Path, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda f: cut(f / "model.safetensors"), r"model\.safetensors"),
        (lambda f: (f / "model.safetensors").unlink(), r"model\.safetensors"),
        (lambda f: rewrite(f, lambda t: t.pop(NORM)), NORM),
        (lambda f: rewrite(f, lambda t: t.update({NORM: t[NORM].bfloat16()})), NORM),
        (lambda f: rewrite(f, lambda t: t.update({NORM: t[NORM].to(torch.int8)})), f"{NORM}.*I8"),
        (lambda f: edit_config(f, hidden_size=128), "model.embed_tokens.weight"),
        (lambda f: edit_config(f, num_hidden_layers=3), r"model\.layers\.2"),
        (lambda f: edit_config(f, num_hidden_layers=1), r"model\.layers\.1"),
        (lambda f: edit_config(f, architectures=["Gemma3ForCausalLM"]), "Gemma3ForCausalLM"),
    ],
)
def test_a_wrong_hf_folder_is_named_and_leaves_nothing(spoil, named, tiny, tmp_path):
    spoil(tiny)
    with pytest.raises(UserError, match=named):
        hf_to_megatron(tiny, tmp_path / "m", ParallelSizes())
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/owned",)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda f: cut(f / "__1_0.distcp"), "__1_0.distcp"),
        (lambda f: (f / "__0_0.distcp").unlink(), "__0_0.distcp"),
        (lambda f: cut(f / ".metadata"), ".metadata"),
        (lambda f: (f / ".metadata").unlink(), "distributed checkpoint"),
        (lambda f: (f / ".metadata").write_bytes(pickle.dumps(Evil())), "posix.system"),
        (lambda f: (f / ".metadata").write_bytes(b"\x8e" + b"\xff" * 8), ".metadata.*maximum size"),
        (lambda f: blot(f / "__0_0.distcp", b"_rebuild_tensor_v2"), "embedding.word.*broken data: 'utf-8' codec"),
        (lambda f: blot(f / "__0_0.distcp", b"Rq\x0b.", b"Rr\x0b."), "embedding.word.*broken data: unpack requires"),
        (lambda f: (f / "__0_0.distcp").write_bytes(b"x" * (f / "__0_0.distcp").stat().st_size), "embedding.word"),
        (lambda f: edit_config(f, num_hidden_layers=3), r"\(3, .*decoder\.layers"),
        (lambda f: edit_config(f, vocab_size=1000), "embedding.word_embeddings"),
        (lambda f: edit_config(f, tie_word_embeddings=True), "output_layer.weight"),
        (lambda f: edit_config(f, architectures=["LlamaForCausalLM"]), "linear_qkv.bias"),
        (lambda f: edit_config(f, architectures=["Qwen3ForCausalLM"]), "q_layernorm"),
        (lambda f: (f / "config.json").unlink(), "config.json"),
    ],
)
def test_a_wrong_checkpoint_is_named_and_leaves_nothing(spoil, named, converted, tmp_path):
    spoil(converted)
    with pytest.raises(UserError, match=named) as error:
        megatron_to_hf(converted, tmp_path / "back")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "back").exists() and not list(tmp_path.glob(".*"))


def test_a_checkpoint_in_a_dtype_of_no_model_is_named(converted, tmp_path):
    stored = [part for own in dist_index.read_index(converted)[0].values() for part in own]
    others = [dataclasses.replace(part, dtype="float64" if "proj" in part.key else part.dtype) for part in stored]
    (converted / ".metadata").write_bytes(dist_index.index_bytes(others))
    with pytest.raises(UserError, match=r"linear_proj\.weight.*found float64"):
        megatron_to_hf(converted, tmp_path / "back")
    assert not list(tmp_path.glob("*back*"))


def run_checkpoint(converted: Path, folder: Path) -> Path:
    """The same parts as a run's own checkpoint holds them."""
    tensors = {}
    for key, parts in dist_index.read_index(converted)[0].items():
        for part in parts:
            stored = (converted / part.file).read_bytes()[part.start : part.start + part.length]
            tensors[f"{key}|{','.join(map(str, part.offset))}"] = torch.load(io.BytesIO(stored))
    folder.mkdir()
    save_file(tensors, folder / "rank_00000.safetensors")
    size = (folder / "rank_00000.safetensors").stat().st_size
    (folder / "policy.json").write_text(json.dumps({"files": {"rank_00000.safetensors": size}}))
    return folder


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (b'"data_offsets":[0,', b'"data_offsets":[8,', "safetensors"),
        (
            b"linear_fc1.weight|0,96,0",
            b"linear_fc1.weight|0,95,0",
            "all parts of 'decoder.layers.mlp.linear_fc1.weight",
        ),
        (b"linear_fc1.weight|0,96,0", b"linear_fc1.weight|0,9600", "parts of one tensor as 'decoder.layers.mlp.linear"),
    ],
)
def test_a_damaged_checkpoint_of_a_run_is_named(old, new, named, tiny, converted, tmp_path):
    folder = run_checkpoint(converted, tmp_path / "policy")
    megatron_to_hf(folder, tmp_path / "back", like=tiny)
    assert_same(tensors_of(tmp_path / "back"), tensors_of(tiny))
    path = folder / "rank_00000.safetensors"
    assert path.read_bytes().count(old) == 1
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(UserError, match=named):
        megatron_to_hf(folder, tmp_path / "other", like=tiny)


def test_parts_of_one_tensor_in_two_dtypes_are_refused(tiny, converted, tmp_path):
    path = run_checkpoint(converted, tmp_path / "policy") / "rank_00000.safetensors"
    tensors = load_file(path)
    name = "decoder.layers.mlp.linear_fc1.weight|0,96,0"
    save_file(tensors | {name: tensors[name].bfloat16()}, path)
    (path.parent / "policy.json").write_text(json.dumps({"files": {path.name: path.stat().st_size}}))
    with pytest.raises(UserError, match=r"linear_fc1\.weight' .*found bfloat16 and float32"):
        megatron_to_hf(path.parent, tmp_path / "back", like=tiny)
