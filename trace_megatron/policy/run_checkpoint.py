"""The weights of a run's own checkpoint, read one tensor at a time without ranks: what policy/checkpoint.py wrote.

Its files hold the same parts of the same global tensors as a distributed checkpoint, under the same keys, but as
safetensors named ``key|offset``; the optimizer's are passed over.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError, safe_open

from trace_megatron.errors import UserError
from trace_megatron.policy.dist_files import MegatronFolder
from trace_megatron.policy.dist_index import Part

DESCRIPTION = "policy.json"
"""Says what the checkpoint is of; written last."""
_OPTIMIZER = "optimizer."
_DTYPES = {"F32": "float32", "BF16": "bfloat16"}


def is_run_checkpoint(folder: str | Path) -> bool:
    """Whether it is the ``policy`` of a run's checkpoint."""
    return (Path(folder) / DESCRIPTION).is_file()


def check_files(folder: Path, sizes: Mapping[str, int]) -> None:
    """Raise UserError unless the folder's files are there with these sizes in bytes."""
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            raise UserError(f"expected '{file}' of {size} bytes, found it missing or cut: choose another checkpoint")


class RunCheckpoint(MegatronFolder):
    """As its base class, of a folder that ``policy/checkpoint.py`` wrote at any layout."""

    index_name = DESCRIPTION

    def _read_index(self) -> tuple[dict[str, list[Part]], dict[str, tuple[int, ...]]]:
        try:
            files = json.loads((self._folder / DESCRIPTION).read_text())["files"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"expected the description of a checkpoint in '{self._folder / DESCRIPTION}'") from error
        check_files(self._folder, files)
        parts: dict[str, list[Part]] = defaultdict(list)
        for path in (self._folder / name for name in sorted(files)):
            for part in _stored_parts(path):
                parts[part.key].append(part)
        return parts, {key: self._whole_shape(own) for key, own in parts.items()}

    def _whole_shape(self, parts: list[Part]) -> tuple[int, ...]:
        try:
            ends = [map(sum, zip(part.offset, part.shape, strict=True)) for part in parts]
            return tuple(map(max, zip(*ends, strict=True)))
        except ValueError as error:
            raise UserError(
                f"expected parts of one tensor as '{parts[0].key}' in '{self._folder}', found others: copy it again"
            ) from error

    def _open(self, part: Part, stack: ExitStack) -> tuple[BinaryIO, int]:
        return stack.enter_context((self._folder / part.file).open("rb", buffering=0)), part.start


def _stored_parts(path: Path) -> list[Part]:
    """Weights of one file, by the header of safetensors: its length in 8 bytes, then JSON."""
    parts = []
    try:
        with safe_open(path, framework="pt"):
            pass  # the library checks that shapes and places agree
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, entry in header.items():
            key, _, offset_text = name.rpartition("|")
            if not key or key.startswith(_OPTIMIZER):
                continue
            offset = tuple(map(int, offset_text.split(",")))
            shape = (1,) * (len(offset) - len(entry["shape"])) + tuple(entry["shape"])
            start, end = (8 + length + place for place in entry["data_offsets"])
            parts.append(Part(key, offset, shape, _DTYPES[entry["dtype"]], path.name, start, end - start))
    except (SafetensorError, ValueError, KeyError) as error:
        raise UserError(f"expected safetensors of a checkpoint in '{path}', found: {error}: copy it again") from error
    return parts
