"""A model's tensor as its owners keep it, before anything is copied together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass(frozen=True, slots=True)
class SplitTensor:
    """One tensor of a model where it is kept: in parts that follow each other along ``axis``."""

    shape: tuple[int, ...]
    """Of the whole."""
    parts: tuple[torch.Tensor, ...]
    """A part may have a dimension more: the first two are then the first of the whole."""
    axis: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor) -> SplitTensor:
        """A tensor in one piece."""
        return cls(tuple(tensor.shape), (tensor,))

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def part_shape(self, part: torch.Tensor) -> tuple[int, ...]:
        """Of a part, with as many dimensions as the whole has."""
        if part.ndim == len(self.shape):
            return tuple(part.shape)
        return (part.shape[0] * part.shape[1], *part.shape[2:])

    def starts(self) -> list[int]:
        """Where along ``axis`` each part begins in the whole."""
        if len(self.parts) == 1:
            return [0]
        return list(accumulate((self.part_shape(part)[self.axis] for part in self.parts[:-1]), initial=0))

    def join(self) -> torch.Tensor:
        """The whole; a view of its only part where it can be."""
        parts = [part.reshape(self.part_shape(part)) for part in self.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.axis)

    def copy_to(self, whole: torch.Tensor) -> None:
        """Copy all parts into a contiguous tensor of ``shape``."""
        for part, start in zip(self.parts, self.starts(), strict=True):
            if len(self.parts) > 1:
                target = whole.narrow(self.axis, start, self.part_shape(part)[self.axis])
            else:
                target = whole
            target.view(part.shape).copy_(part)
