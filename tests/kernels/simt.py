"""Runs csrc/kernels/*.cu on the CPU: g++ compiles them against csrc/simt, ctypes calls them. csrc/simt/README.md."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
FLAGS = [
    "-std=c++20",
    "-O1",
    "-g1",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-DTRACE_SIMT",
    "-fno-gnu-unique",
]
_GUARD = 4096  # bytes on either side of an array that belong to none: a step out of bounds falls into them
_POISON = 0xCC
_C_TYPES = {
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "bool": ctypes.c_bool,
}


class KernelFault(Exception):
    """A race, an access out of bounds, a read of what was never written, a deadlock: what the runner saw."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one call: bytes of global memory read and written, m16n8k16 tensor-core products, barriers of all blocks."""

    bytes_read: int
    bytes_written: int
    tensor_products: int
    barriers: int


class Kernel:
    """One .cu file, and the launch functions in it. Sources: the file itself, its headers, csrc/simt."""

    def __init__(self, source: str | Path) -> None:
        self.source = Path(source) if Path(source).is_absolute() else ROOT / "csrc/kernels" / source
        self._library = ctypes.CDLL(str(build(self.source)))
        self._library.simt_error.restype = self._library.simt_syncs.restype = ctypes.c_char_p
        headers = "".join(path.read_text() for path in sorted(self.source.parent.glob("*.h")))
        self._text = headers + self.source.read_text()
        self.counts = Counts(0, 0, 0, 0)

    def run(
        self, name: str, params: str, fields: dict[str, object], *, seed: int = 0, drop: str = ""
    ) -> dict[str, torch.Tensor]:
        """Call ``int name(const params*, stream)`` and return what it wrote, by field.

        ``fields`` gives every field of the struct ``params``, as declared in the source or in a header beside it: a
        number; a tensor, for a pointer to const (input) or to memory that the kernel changes; or ``(shape, dtype)``
        for an output, poisoned before. None is a null pointer. ``seed`` orders the threads. ``drop``: the
        synchronisation at this "file.cu:line" does nothing. Raises KernelFault, or ValueError with a CUDA error code.
        """
        library = self._library
        library.simt_reset(ctypes.c_uint64(seed))
        library.simt_drop(drop.encode())
        types = self._fields(params)
        if set(types) != set(fields):
            raise TypeError(f"expected the fields of {params}, {sorted(types)}, found {sorted(fields)}")
        struct = type(
            params, (ctypes.Structure,), {"_fields_": [(field, kind) for field, (kind, _) in types.items()]}
        )()
        arrays: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for field, (kind, is_input) in types.items():
            value = fields[field]
            if kind is not ctypes.c_void_p:
                setattr(struct, field, value)
            elif value is not None:
                guarded, inner = _guarded(value)
                arrays[field] = guarded, inner
                setattr(struct, field, inner.data_ptr())
                library.simt_region(
                    field.encode(),
                    ctypes.c_void_p(inner.data_ptr()),
                    ctypes.c_size_t(inner.numel() * inner.element_size()),
                    ctypes.c_size_t(inner.element_size()),
                    not is_input,
                    isinstance(value, torch.Tensor),
                )
        code = getattr(library, name)(ctypes.byref(struct), None)
        error = library.simt_error().decode()
        if error:
            raise KernelFault(error)
        if code:
            raise ValueError(f"expected success of {name}, found CUDA error {code}")
        numbers = (ctypes.c_uint64 * 4)()
        library.simt_counts(numbers)
        self.counts = Counts(*numbers)
        return {field: inner.clone() for field, (_, inner) in arrays.items() if not types[field][1]}

    def syncs(self) -> list[str]:
        """Every barrier, warp synchronisation and cp.async wait met so far, as "file.cu:line"."""
        return self._library.simt_syncs().decode().split()

    def _fields(self, params: str) -> dict[str, tuple[type, bool]]:
        body = re.search(rf"struct {params} {{(.*?)\n}};", self._text, re.DOTALL)
        if body is None:
            raise TypeError(f"expected struct {params} in {self.source.name} or a header beside it, found none")
        fields = {}
        for line in re.sub(r"//[^\n]*", "", body[1]).split(";"):
            pointer = re.fullmatch(r"\s*Global<(const )?[\w:]+> (.+)", line, re.DOTALL)
            plain = re.fullmatch(r"\s*(\w+) (.+)", line, re.DOTALL)
            if pointer:
                fields |= {name.strip(): (ctypes.c_void_p, bool(pointer[1])) for name in pointer[2].split(",")}
            elif plain:
                fields |= {name.strip(): (_C_TYPES[plain[1]], False) for name in plain[2].split(",")}
            elif line.strip():
                raise TypeError(f"expected 'type name, name;' in struct {params}, found '{line.strip()}'")
        return fields


@functools.cache
def _struct(name: str, layout: tuple[tuple[str, type], ...]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": layout})


def _guarded(value: torch.Tensor | tuple) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory with guards on both sides, and the array in its middle, on 256 bytes as cudaMalloc gives it."""
    shape, dtype = (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value
    size = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    memory = torch.full((size + 2 * _GUARD + 256,), _POISON, dtype=torch.uint8)
    first = _GUARD + -(memory.data_ptr() + _GUARD) % 256
    inner = memory[first : first + size].view(dtype).view(shape)
    if isinstance(value, torch.Tensor):
        inner.copy_(value)
    return memory, inner


def build(source: Path, *flags: str) -> Path:
    """The library of this source, from a cache by content."""
    headers = [path for folder in (source.parent, ROOT / "csrc/kernels") for path in folder.glob("*.*h")]
    used = [source, *sorted(headers), *sorted((ROOT / "csrc/simt").glob("*.h"))]
    used += [ROOT / "csrc" / path for path in re.findall(r'#include "(\w+/\w+\.c\w+)"', source.read_text())]
    words = " ".join([*FLAGS, *flags]).encode()
    digest = hashlib.sha256(words + b"".join(path.read_bytes() for path in used)).hexdigest()[:20]
    folder = Path(tempfile.gettempdir()) / f"trace_megatron_simt_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{source.stem}_{digest}.so"
    if not library.exists():
        unfinished = folder / f"{library.name}.{os.getpid()}"
        compiler = os.environ.get("CXX", "g++")
        command = [compiler, *FLAGS, "-I", str(ROOT / "csrc"), "-x", "c++", str(source), "-o", str(unfinished), *flags]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"expected {source.name} to compile, found\n{done.stderr}")
        unfinished.replace(library)
    return library
