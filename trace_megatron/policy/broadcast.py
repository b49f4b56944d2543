"""How rank 0 tells the other ranks what to do: a JSON header and the bytes of the batches, over a CPU group."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from trace_megatron.types import TreeBatch

_DRIVER = 0
# Every tensor starts at a multiple of this many bytes, so that its bytes can be viewed as any dtype.
_ALIGNMENT = 8
_DTYPES = {str(dtype): dtype for dtype in (torch.int64, torch.int32, torch.float64, torch.float32)}
_TENSOR_FIELDS = tuple(f.name for f in dataclasses.fields(TreeBatch) if f.name != "num_unpacked_tokens")


@dataclass(frozen=True, slots=True)
class Command:
    """One call of the driver, repeated by every rank."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """JSON values."""
    micro_batches: Sequence[Sequence[TreeBatch]] = ()
    """[data_parallel][num_micro_batches]."""
    tensors: Sequence[torch.Tensor] = ()
    """int64, int32, float64 or float32; what calls of other parts need."""


def send_command(command: Command, group: dist.ProcessGroup) -> None:
    """Called on rank 0; every other rank of ``group`` is in ``receive_command``."""
    message = encode(command)
    dist.broadcast(torch.tensor([message.numel()]), src=_DRIVER, group=group)
    dist.broadcast(message, src=_DRIVER, group=group)


def receive_command(group: dist.ProcessGroup) -> Command:
    """Block, without using the processor, until rank 0 sends the next command."""
    num_bytes = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(num_bytes, src=_DRIVER, group=group)
    message = torch.empty(int(num_bytes), dtype=torch.uint8)
    dist.broadcast(message, src=_DRIVER, group=group)
    return decode(message)


def encode(command: Command) -> torch.Tensor:
    """The command as uint8: eight bytes of header length, the JSON header, then the tensors' bytes."""
    batches = [batch for row in command.micro_batches for batch in row]
    tensors = [getattr(batch, name).contiguous() for batch in batches for name in _TENSOR_FIELDS]
    tensors += [tensor.contiguous() for tensor in command.tensors]
    header = {
        "name": command.name,
        "arguments": dict(command.arguments),
        "row_lengths": [len(row) for row in command.micro_batches],
        "num_unpacked_tokens": [batch.num_unpacked_tokens for batch in batches],
        "tensors": [[str(tensor.dtype), list(tensor.shape)] for tensor in tensors],
    }
    text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
    parts = [torch.tensor([text.numel()]).view(torch.uint8), *_aligned(text)]
    for tensor in tensors:
        parts += _aligned(_bytes(tensor))
    return torch.cat(parts)


def decode(message: torch.Tensor) -> Command:
    """The inverse of ``encode``; the tensors are views of ``message``."""
    header_bytes = int(message[:8].view(torch.int64))
    header = json.loads(message[8 : 8 + header_bytes].numpy().tobytes())
    offset = 8 + header_bytes + _padding(header_bytes)
    tensors = []
    for dtype_name, shape in header["tensors"]:
        dtype = _DTYPES[dtype_name]
        num_bytes = dtype.itemsize * torch.Size(shape).numel()
        tensors.append(message[offset : offset + num_bytes].view(dtype).view(shape))
        offset += num_bytes + _padding(num_bytes)
    fields = iter(tensors)
    unpacked = iter(header["num_unpacked_tokens"])
    micro_batches = [
        [TreeBatch(*(next(fields) for _ in _TENSOR_FIELDS), next(unpacked)) for _ in range(length)]
        for length in header["row_lengths"]
    ]
    return Command(header["name"], header["arguments"], micro_batches, list(fields))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():  # NumPy gives an empty array the stride 0, which cannot be viewed as bytes
        return torch.empty(0, dtype=torch.uint8)
    return tensor.cpu().view(-1).view(torch.uint8)


def _padding(num_bytes: int) -> int:
    return -num_bytes % _ALIGNMENT


def _aligned(data: torch.Tensor) -> list[torch.Tensor]:
    return [data, data.new_zeros(_padding(data.numel()))]
