"""Conversion of small models: bit by bit through every layout, and after an interruption."""

import dataclasses
import errno
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.policy.stored_tensors import assert_same, tensors_of
from tests.tiny_models import CLASSES, write_tiny_model
from trace_megatron.errors import UserError
from trace_megatron.policy import convert, dist_files, dist_index, hf_files, rows
from trace_megatron.policy.convert import hf_to_megatron, megatron_to_hf
from trace_megatron.policy.hf_config import read_hf_config
from trace_megatron.policy.names import ParallelSizes, model_weights
from trace_megatron.policy.rows import Rows, read_tensor
from trace_megatron.policy.stored_tensor import Window, stored_tensor

LAYOUTS = [(tp, pp) for tp, pp in itertools.product(range(1, 5), repeat=2) if tp * pp <= 4]
SHAPE = {"num_layers": 4, "hidden": 24, "heads": 12, "head_dim": 12, "ffn": 24}  # divided by 1, 2, 3 and 4 ranks


def write_family(folder: Path, family: str, **options) -> Path:
    shape = SHAPE | ({"head_dim": None, "hidden": 144} if family == "qwen2" else {}) | options
    return write_tiny_model(folder, family, **shape)


@pytest.mark.parametrize("family", CLASSES)
def test_there_and_back_at_every_layout(family, tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "_BLOCK_BYTES", 1500)  # several blocks of a tensor, some of a single row
    variants = [
        {"tied": True, "vocab": 261, "kv_heads": 1},  # padded rows; one key-value head for up to four ranks
        {"tied": False, "vocab": 264, "kv_heads": 12, "dtype": torch.bfloat16},
    ]
    for index, options in enumerate(variants):
        source = write_family(tmp_path / f"source{index}", family, seed=index, **options)
        expected = tensors_of(source)
        for tp, pp in LAYOUTS:
            ep = tp if family == "qwen3_moe" and 4 % tp == 0 else 1
            converted, back = tmp_path / f"{index}-{tp}{pp}{ep}", tmp_path / f"{index}-{tp}{pp}{ep}-back"
            hf_to_megatron(source, converted, ParallelSizes(tp, pp, ep))
            assert len(list(converted.glob("*.distcp"))) == max(tp, ep) * pp
            megatron_to_hf(converted, back)
            assert_same(tensors_of(back), expected)
            assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())


def test_companions_travel_and_files_of_a_tokenizer_without_json_too(tiny, tmp_path):
    (tiny / "tokenizer.json").unlink()
    (tiny / "tokenizer.model").write_bytes(b"pieces")  # SentencePiece's
    hf_to_megatron(tiny, tmp_path / "m", ParallelSizes())
    megatron_to_hf(tmp_path / "m", tmp_path / "back")
    kept = {"tokenizer.model", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    for name in kept:
        assert (tmp_path / "back" / name).read_bytes() == (tiny / name).read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_several_files_with_an_index_in_and_out(tiny, tmp_path, monkeypatch):
    expected = tensors_of(tiny)
    monkeypatch.setattr(hf_files, "SHARD_BYTES", 60_000)
    hf_to_megatron(tiny, tmp_path / "a", ParallelSizes(2, 1))
    megatron_to_hf(tmp_path / "a", tmp_path / "sharded")
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert_same(tensors_of(tmp_path / "sharded"), expected)
    hf_to_megatron(tmp_path / "sharded", tmp_path / "b", ParallelSizes(1, 2))
    monkeypatch.undo()
    megatron_to_hf(tmp_path / "b", tmp_path / "back")
    assert [path.name for path in (tmp_path / "back").glob("*.safetensors")] == ["model.safetensors"]
    assert_same(tensors_of(tmp_path / "back"), expected)


def test_an_existing_target_is_refused(tiny, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("there", "link"):
        with pytest.raises(UserError, match=name):
            hf_to_megatron(tiny, tmp_path / name, ParallelSizes())
    assert not list((tmp_path / "there").iterdir())


def test_a_place_that_cannot_be_written_is_named(tiny, tmp_path):
    with pytest.raises(UserError, match=r"config\.json/\.m\.partial', found: Not a directory"):
        hf_to_megatron(tiny, tiny / "config.json" / "m", ParallelSizes())


@pytest.mark.parametrize("call", ["pwrite", "rename"])  # in the middle, and at the very end
def test_after_a_disk_that_became_full_the_same_conversion_goes_on_and_no_other(call, tiny, tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    hf_to_megatron(tiny, tmp_path / "m", ParallelSizes(2, 1))
    monkeypatch.setattr(convert, "_COMMIT_BYTES", 1000)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(UserError, match=r"No space left on device.*\.back\.partial"):
            megatron_to_hf(tmp_path / "m", tmp_path / "back")
    config = (tmp_path / "m" / "config.json").stat()
    os.utime(tmp_path / "m" / "config.json", (1, 1))
    with pytest.raises(UserError, match="other options or a changed source"):
        megatron_to_hf(tmp_path / "m", tmp_path / "back")
    os.utime(tmp_path / "m" / "config.json", ns=(config.st_atime_ns, config.st_mtime_ns))
    with monkeypatch.context() as patch:
        patch.setattr(convert.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))
        with pytest.raises(UserError, match="free disk"):
            megatron_to_hf(tmp_path / "m", tmp_path / "back")
    assert (tmp_path / ".back.partial").exists() == (call == "rename")  # what is there stays
    monkeypatch.setattr(os, "posix_fadvise", fail)  # nobody needs it
    monkeypatch.setattr(rows, "_BLOCK_BYTES", 1000)
    megatron_to_hf(tmp_path / "m", tmp_path / "back")
    assert_same(tensors_of(tmp_path / "back"), tensors_of(tiny))
    assert not list((tmp_path / "back").glob("conversion*"))


def test_a_full_disk_is_told_before_anything_is_written(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))
    (tmp_path / ".m.partial").mkdir()
    with (tmp_path / ".m.partial" / "interrupted").open("w") as file:
        file.truncate(10**10)  # all of it a hole: nothing is there
    with pytest.raises(UserError, match="free disk"):
        hf_to_megatron(tiny, tmp_path / "m", ParallelSizes())
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


@pytest.mark.parametrize(("sizes", "named"), [((3, 1, 1), "--tp"), ((1, 3, 1), "--pp"), ((1, 1, 2), "--ep")])
def test_a_layout_that_the_shapes_forbid(sizes, named, tiny, tmp_path):
    with pytest.raises(UserError, match=named):
        hf_to_megatron(tiny, tmp_path / "m", ParallelSizes(*sizes))
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


KILLED = """
import os, signal, sys, time
from pathlib import Path
from trace_megatron.policy import convert, hf_files, dist_files
from trace_megatron.policy.convert import hf_to_megatron, megatron_to_hf
from trace_megatron.policy.names import ParallelSizes

convert._COMMIT_BYTES = 100_000
reader, num_left = {"hf": hf_files.HFFolder, "megatron": dist_files.MegatronFolder}[sys.argv[1]], int(sys.argv[4])
rows = reader.rows
target = Path(sys.argv[3])
journal = target.with_name(f".{target.name}.partial") / "conversion.jsonl"

def rows_until_killed(self, weight, stack):
    global num_left
    num_left -= 1
    if num_left < 0:
        while not (journal.exists() and journal.stat().st_size):  # something is on the disk
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return rows(self, weight, stack)

reader.rows = rows_until_killed
if sys.argv[1] == "hf":
    hf_to_megatron(sys.argv[2], sys.argv[3], ParallelSizes(2, 1))
else:
    megatron_to_hf(sys.argv[2], sys.argv[3])
"""


@pytest.mark.parametrize("source", ["hf", "megatron"])
def test_a_killed_conversion_goes_on(source, tiny, tmp_path, monkeypatch):
    expected = tensors_of(tiny)
    folder, target = tiny, tmp_path / "target"
    if source == "megatron":
        folder = tmp_path / "m"
        hf_to_megatron(tiny, folder, ParallelSizes(1, 2))
    killed = subprocess.run([sys.executable, "-c", KILLED, source, folder, target, "13"], env=os.environ, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not target.exists()
    partial = tmp_path / ".target.partial"
    num_done = len((partial / "conversion.jsonl").read_text().splitlines())
    assert 0 < num_done < 13
    with (partial / "conversion.jsonl").open("a") as journal:
        journal.write('[{"key": "cut wi')  # within a line
    with pytest.raises(UserError, match="other options or a changed source"):
        hf_to_megatron(tiny, target, ParallelSizes(1, 1))
    reader = hf_files.HFFolder if source == "hf" else dist_files.MegatronFolder
    reads, find = [], reader.rows
    with monkeypatch.context() as patch:
        patch.setattr(reader, "rows", lambda self, weight, stack: (reads.append(weight), find(self, weight, stack))[1])
        if source == "hf":
            hf_to_megatron(folder, target, ParallelSizes(2, 1))
        else:
            megatron_to_hf(folder, target)
    assert not partial.exists()
    assert len(reads) == sum(not weight.is_copy for weight in model_weights(read_hf_config(tiny))) - num_done
    if source == "hf":
        megatron_to_hf(target, tmp_path / "back")
        target = tmp_path / "back"
    assert_same(tensors_of(target), expected)


def test_a_changed_source_does_not_go_on(tiny, tmp_path, monkeypatch):
    def fail(self, weight, stack):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hf_files.HFFolder, "rows", fail)
        with pytest.raises(KeyboardInterrupt):
            hf_to_megatron(tiny, tmp_path / "m", ParallelSizes())
    os.utime(tiny / "model.safetensors", (1, 1))
    with pytest.raises(UserError, match="remove"):
        hf_to_megatron(tiny, tmp_path / "m", ParallelSizes())
    shutil.rmtree(tmp_path / ".m.partial")
    hf_to_megatron(tiny, tmp_path / "m", ParallelSizes())


def test_a_part_that_was_saved_as_a_view(converted, tiny, tmp_path):
    parts = dist_index.read_index(converted)[0]
    stored = [part for own in parts.values() for part in own]
    (part,) = (p for p in parts["decoder.layers.self_attention.linear_proj.weight"] if p.offset == (1, 0, 32))
    columns = torch.load(io.BytesIO((converted / part.file).read_bytes()[part.start : part.start + part.length]))
    saved = io.BytesIO()
    torch.save(columns.transpose(1, 2).contiguous().transpose(1, 2), saved)
    (converted / "view.distcp").write_bytes(saved.getbuffer())
    moved = dataclasses.replace(part, file="view.distcp", start=0, length=len(saved.getbuffer()))
    others = [other for other in stored if other != part]
    (converted / ".metadata").write_bytes(dist_index.index_bytes([*others, moved]))
    megatron_to_hf(converted, tmp_path / "back")
    assert_same(tensors_of(tmp_path / "back"), tensors_of(tiny))


def test_two_conversions_at_once(tiny, tmp_path, monkeypatch):
    find = hf_files.HFFolder.rows

    def second_meanwhile(self, weight, stack):
        monkeypatch.setattr(hf_files.HFFolder, "rows", find)
        with pytest.raises(UserError, match="at work"):
            hf_to_megatron(tiny, tmp_path / "m", ParallelSizes())
        return find(self, weight, stack)

    monkeypatch.setattr(hf_files.HFFolder, "rows", second_meanwhile)
    hf_to_megatron(tiny, tmp_path / "m", ParallelSizes())
    megatron_to_hf(tmp_path / "m", tmp_path / "back")
    assert_same(tensors_of(tmp_path / "back"), tensors_of(tiny))


def test_the_index_is_read_by_its_list_alone(converted):
    parts, sizes = dist_index.read_index(converted)
    assert sizes["decoder.layers.mlp.linear_fc1.weight"] == (2, 192, 64)
    assert len(parts["decoder.layers.mlp.linear_fc1.weight"]) == 2 * 2 * 2


@pytest.mark.parametrize("dtype", ["float64", "bool", "int32", "float8_e4m3fn"])
def test_other_tensors_of_a_checkpoint_may_be_of_any_dtype(dtype, converted):
    index = dist_index.index_bytes([dist_index.Part("optimizer.x", (0,), (2,), dtype, "file", 0, 10)])
    (converted / ".metadata").write_bytes(index)
    assert dist_index.read_index(converted)[0]["optimizer.x"][0].dtype == dtype


@pytest.mark.parametrize(
    ("saved", "readable"),
    [
        (torch.arange(6.0).view(2, 3), True),
        (torch.arange(6).bfloat16().view(3, 2), True),
        (torch.arange(6.0).view(2, 3).T, False),  # for torch.load, which the rest is left to
        (torch.arange(8.0)[2:], False),
        (torch.arange(6), False),
        ([None], False),
        (torch.nn.Parameter(torch.ones(2)), False),
    ],
)
def test_a_stored_tensor_is_found_without_its_numbers(saved, readable, tmp_path):
    stored = io.BytesIO()
    torch.save(saved, stored)
    path = tmp_path / "file"
    path.write_bytes(b"before" + stored.getvalue() + b"after")
    with path.open("rb", buffering=0) as file:
        found = stored_tensor(Window(file, len(b"before"), len(stored.getvalue())))
        assert (found is not None) == readable
        if readable:
            shape, dtype, start = found
            rows = Rows.at(file, len(b"before") + start, shape, dtype.itemsize)
            assert torch.equal(read_tensor(rows, shape, dtype), saved)
            beyond = Rows.at(file, 0, (10**4, 2), dtype.itemsize)
            with pytest.raises(UserError, match="more bytes in"):
                read_tensor(beyond, (10**4, 2), dtype)
