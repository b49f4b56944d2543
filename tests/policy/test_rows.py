"""Tensors cut into rectangles in files: copied between any two cuts, against the tensor itself."""

import itertools
import random
from contextlib import ExitStack

import pytest
import torch

from tests.tiny_models import write_tiny_model
from trace_megatron.errors import UserError
from trace_megatron.policy import rows as rows_module
from trace_megatron.policy.hf_config import read_hf_config
from trace_megatron.policy.names import exported_weights, row_runs, to_shard
from trace_megatron.policy.rows import Piece, Rows, TargetFile, copy_rows, read_tensor, write_tensor


def random_cut(num_rows: int, width: int, itemsize: int, folder, stack: ExitStack, dice: random.Random) -> Rows:
    """Bands of rows, each cut into columns at its own places, each piece somewhere in one of two files."""
    files = [stack.enter_context(TargetFile.cut(folder / f"{dice.random()}", b"", 0)) for _ in range(2)]
    ends = [dice.randrange(5), dice.randrange(5)]
    pieces = []
    edges = sorted({0, num_rows, *dice.sample(range(num_rows), min(3, num_rows))})
    for first, stop in itertools.pairwise(edges):
        columns = [itemsize * place for place in dice.choices(range(width // itemsize), k=dice.randrange(3))]
        columns = sorted({0, width, *columns})
        for left, right in itertools.pairwise(columns):
            index = dice.randrange(2)
            pieces.append(Piece(files[index], ends[index], range(first, stop), range(left, right)))
            ends[index] += (stop - first) * (right - left) + dice.randrange(3)
    dice.shuffle(pieces)
    return Rows(num_rows, width, pieces)


@pytest.mark.parametrize("block_bytes", [1, 100, 1000, 2**20])
def test_a_copy_between_any_two_cuts(block_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "_BLOCK_BYTES", block_bytes)  # also less than a row
    monkeypatch.setattr(rows_module, "_STRETCH_BYTES", 300)
    dice = random.Random(block_bytes)
    for shape, dtype in (((37, 24), torch.float32), ((40,), torch.bfloat16), ((7, 3, 4), torch.float16)):
        tensor = torch.randn(shape).to(dtype)
        row_bytes = tensor[0].nbytes
        with ExitStack() as stack:
            one, other = (random_cut(len(tensor), row_bytes, dtype.itemsize, tmp_path, stack, dice) for _ in range(2))
            write_tensor(one, tensor)
            copy_rows(one, other)
            assert torch.equal(read_tensor(other, shape, dtype), tensor)
            for piece in other.pieces:  # and where they say it is
                piece.file.seek(piece.start)
                found = torch.frombuffer(bytearray(piece.file.read(len(piece.rows) * len(piece.columns))), dtype=dtype)
                whole = tensor.view(len(tensor), -1)[piece.rows.start : piece.rows.stop]
                columns = slice(piece.columns.start // dtype.itemsize, piece.columns.stop // dtype.itemsize)
                assert torch.equal(found, whole[:, columns].flatten())


def test_a_file_that_ends_early(tmp_path):
    (tmp_path / "short").write_bytes(b"x" * 10)
    with (
        (tmp_path / "short").open("rb", buffering=0) as file,
        pytest.raises(UserError, match=r"2 more bytes in .*short"),
    ):
        read_tensor(Rows.at(file, 0, (3,), 4), (3,), torch.float32)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_runs_of_rows_are_what_the_mapping_does(family, tmp_path):
    hf = read_hf_config(write_tiny_model(tmp_path / "tiny", family, vocab=261, tied=False))
    for weight in exported_weights(hf):
        tensors = [torch.randn(shape) for shape in weight.hf.values()]
        runs = row_runs(weight, hf)
        rebuilt = torch.cat([tensors[run.tensor][run.first : run.first + run.count] for run in runs])
        assert torch.equal(rebuilt, to_shard(weight, tensors, hf, 0, 1))
        assert [run.start for run in runs] == [sum(run.count for run in runs[:index]) for index in range(len(runs))]
