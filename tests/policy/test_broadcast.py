"""Commands survive the way through bytes; the way between processes is part of test_layouts.py."""

import dataclasses

import pytest
import torch

from trace_megatron.policy.broadcast import Command, decode, encode
from trace_megatron.types import TreeBatch


def random_batch(num_tokens: int, seed: int) -> TreeBatch:
    generator = torch.Generator().manual_seed(seed)

    def integers(dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31 - 1, (num_tokens,), generator=generator).to(dtype)

    def floats(dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(num_tokens, generator=generator, dtype=dtype)

    return TreeBatch(
        tokens=integers(torch.int64),
        position_ids=integers(torch.int64),
        subtree_end=integers(torch.int32),
        predecessor=integers(torch.int32),
        positive_mass=floats(torch.float64),
        negative_mass=floats(torch.float64),
        weight=floats(torch.float64),
        rollout_logprobs=floats(torch.float32),
        old_logprobs=floats(torch.float32),
        reference_logprobs=floats(torch.float32),
        num_unpacked_tokens=seed,
    )


@pytest.mark.parametrize("lengths", [[], [[1]], [[5, 3], [1, 64]], [[0, 7]]])
def test_decode_inverts_encode(lengths):
    batches = [[random_batch(size, 10 * i + j) for j, size in enumerate(row)] for i, row in enumerate(lengths)]
    command = Command("train_step", {"folder": "über/ordner", "n": 3, "x": None}, batches)
    found = decode(encode(command))
    assert (found.name, found.arguments) == (command.name, command.arguments)
    assert [len(row) for row in found.micro_batches] == [len(row) for row in batches]
    flat = ([batch for row in rows for batch in row] for rows in (batches, found.micro_batches))
    for expected, got in zip(*flat, strict=True):
        for field in dataclasses.fields(TreeBatch):
            a, b = getattr(expected, field.name), getattr(got, field.name)
            if isinstance(a, torch.Tensor):
                assert a.dtype == b.dtype and torch.equal(a, b), field.name
            else:
                assert a == b


def test_views_are_sent_as_what_they_show():
    batch = random_batch(8, 0)
    strided = dataclasses.replace(batch, weight=torch.arange(16, dtype=torch.float64)[::2])
    (row,) = decode(encode(Command("x", {}, [[strided]]))).micro_batches
    assert torch.equal(row[0].weight, strided.weight)
