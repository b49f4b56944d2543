"""Folders of safetensors as Hugging Face writes them, read and written one tensor at a time.

The safetensors library maps whole files and serializes whole dictionaries. Here a process holds the tensor at hand and
no more, so that a model larger than the memory can be converted.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from trace_megatron.errors import UserError
from trace_megatron.policy.names import Weight
from trace_megatron.policy.rows import Rows, TargetFile, read_tensor, write_tensor
from trace_megatron.types import TensorInfo

SHARD_BYTES = 5 * 10**9
"""Largest file of a folder, as HF's own were for years."""

COMPANIONS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
)
"""What belongs to a model beside weights and config.json."""

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor's bytes lie."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype_name: str


class HFFolder:
    """The tensors of a folder, all of which are known to be there, of the right shape and whole, before one is read."""

    def __init__(self, folder: str | Path, weights: Sequence[Weight]):
        """Raises UserError that names the file or tensor that is missing, left over, cut, or of another shape."""
        self._folder = Path(folder)
        self._places = _find_tensors(self._folder)
        self._check(weights)

    def read(self, weight: Weight) -> list[torch.Tensor]:
        """The HF tensors of one weight, each in memory of its own."""
        with ExitStack() as stack:
            stored = zip(weight.hf, self.rows(weight, stack), strict=True)
            return [read_tensor(rows, weight.hf[name], self.dtype(name)) for name, rows in stored]

    def rows(self, weight: Weight, stack: ExitStack) -> list[Rows]:
        """Where the HF tensors of one weight lie, in files that ``stack`` closes."""
        places = [self._places[name] for name in weight.hf]
        files = [stack.enter_context(place.path.open("rb", buffering=0)) for place in places]
        return [
            Rows.at(file, place.offset, place.shape, _DTYPES[place.dtype_name].itemsize)
            for file, place in zip(files, places, strict=True)
        ]

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[self._places[name].dtype_name]

    def stamp(self) -> list[tuple[str, int, int]]:
        """Names, sizes and times of the files: different if one was replaced."""
        return file_stamp({place.path for place in self._places.values()} | {self._folder / "config.json"})

    def _check(self, weights: Sequence[Weight]) -> None:
        expected = {name: shape for weight in weights for name, shape in weight.hf.items()}
        for name, shape in expected.items():
            if name not in self._places:
                raise UserError(
                    f"expected tensor '{name}' in '{self._folder}', found none: config.json is of another model"
                )
            place = self._places[name]
            if place.shape != shape:
                raise UserError(
                    f"expected shape {shape} of tensor '{name}' in '{self._folder}', found {place.shape}: "
                    "config.json is of another model"
                )
            if place.dtype_name not in _DTYPES:
                raise UserError(
                    f"expected tensor '{name}' in '{self._folder}' as {', '.join(_DTYPES)}, found {place.dtype_name}"
                )
        for name in self._places:
            # old Llama checkpoints store RoPE's frequencies, and some tied ones a copy of the embedding
            redundant = name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and weights[-1].is_copy)
            if name not in expected and not redundant:
                raise UserError(f"expected no tensor '{name}' in '{self._folder}': config.json is of another model")


class HFWriter:
    """Writes tensors in the order of ``infos`` into safetensors files of at most SHARD_BYTES, with an index."""

    def __init__(self, folder: Path, infos: Sequence[TensorInfo], num_done: int = 0):
        """``num_done`` tensors are there, flushed by a writer that did not come to its end."""
        self._folder = folder
        self._shards = _deal_shards(infos)
        self._files = [
            f"model-{index:05}-of-{len(self._shards):05}.safetensors" for index in range(1, len(self._shards) + 1)
        ]
        if len(self._shards) == 1:
            self._files = [_SINGLE]
        self._open: dict[int, TargetFile] = {}
        self._waiting = self._places()
        for _ in range(num_done):
            next(self._waiting)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """The next tensor, on any device."""
        write_tensor(self.place(TensorInfo(name, tuple(tensor.shape), tensor.dtype)), tensor)

    def place(self, info: TensorInfo) -> Rows:
        """Where the next tensor goes."""
        index, offset, expected = next(self._waiting)
        assert info == expected, (info, expected)
        if index not in self._open:
            self._open[index] = TargetFile.cut(self._folder / self._files[index], _header(self._shards[index]), offset)
        return Rows.at(self._open[index], offset, info.shape, info.dtype.itemsize)

    def open_files(self) -> list[int]:
        """Descriptors of what may not be on the disk yet."""
        return [file.fileno() for file in self._open.values()]

    def close(self) -> None:
        """After the last tensor: write the index where there are several files."""
        assert next(self._waiting, None) is None
        for file in self._open.values():
            os.fdatasync(file.fileno())
            file.close()
        if len(self._shards) > 1:
            weight_map = {info.name: self._files[index] for index, shard in enumerate(self._shards) for info in shard}
            total = sum(_num_bytes(info) for shard in self._shards for info in shard)
            values = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self._folder / _INDEX).write_text(json.dumps(values, indent=2) + "\n")

    def _places(self) -> Iterator[tuple[int, int, TensorInfo]]:
        """Every tensor with the index of its file and its offset there."""
        for index, shard in enumerate(self._shards):
            offset = len(_header(shard))
            for info in shard:
                yield index, offset, info
                offset += _num_bytes(info)


def copy_companions(source: Path, target: Path, dtype: torch.dtype | None) -> None:
    """Tokenizer, chat template and generation config as they are, config.json with the dtype of the new weights."""
    for pattern in COMPANIONS:
        for path in sorted(source.glob(pattern)):
            if path.is_dir():
                shutil.copytree(path, target / path.name, dirs_exist_ok=True)
            else:
                shutil.copy(path, target / path.name)
    values = json.loads((source / "config.json").read_text())
    if dtype is not None:
        values.pop("torch_dtype", None)
        values["dtype"] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def file_stamp(paths: set[Path]) -> list[tuple[str, int, int]]:
    """Name, size and time of change of each file."""
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(paths)]


def _num_bytes(info: TensorInfo) -> int:
    return info.dtype.itemsize * math.prod(info.shape)


def _deal_shards(infos: Sequence[TensorInfo]) -> list[list[TensorInfo]]:
    shards: list[list[TensorInfo]] = [[]]
    room = SHARD_BYTES
    for info in infos:
        if shards[-1] and _num_bytes(info) > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(info)
        room -= _num_bytes(info)
    return shards


def _header(shard: Sequence[TensorInfo]) -> bytes:
    """What precedes the tensors in a file: the length of a JSON text, and the text, padded to eight bytes."""
    values: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for info in shard:
        end = start + _num_bytes(info)
        values[info.name] = {
            "dtype": _DTYPE_NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(values, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _find_tensors(folder: Path) -> dict[str, _Place]:
    weight_map = {}
    if (folder / _INDEX).is_file():
        weight_map = _read_weight_map(folder / _INDEX)
        files = sorted(set(weight_map.values()))
    elif (folder / _SINGLE).is_file():
        files = [_SINGLE]
    else:
        raise UserError(
            f"expected {_SINGLE} or {_INDEX} in '{folder}', found neither: save the model with safe serialization"
        )
    places: dict[str, _Place] = {}
    for file in files:
        places |= _read_header(folder / file)
    for name in weight_map:
        if name not in places:
            raise UserError(f"expected tensor '{name}' in '{folder / weight_map[name]}', found none: download it again")
    return places


def _read_weight_map(path: Path) -> dict[str, str]:
    """File name by tensor name."""
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"expected a mapping 'weight_map' in '{path}', found none: download it again") from error


def _read_header(path: Path) -> dict[str, _Place]:
    try:
        with safe_open(path, framework="pt"):
            pass  # the library checks the header, and that the tensors fill the file to its last byte
        with path.open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            values = json.loads(file.read(num_bytes))
    except (OSError, SafetensorError) as error:
        raise UserError(f"expected safetensors in '{path}', found: {error}: download it again") from error
    values.pop("__metadata__", None)
    return {
        name: _Place(path, 8 + num_bytes + value["data_offsets"][0], tuple(value["shape"]), value["dtype"])
        for name, value in values.items()
    }
