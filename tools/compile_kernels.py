"""Compiles csrc/kernels/*.cu for sm_80, sm_90a and sm_100; prints registers, shared memory and spills. No GPU needed.

Usage: tools/compile_kernels.py [FILE.cu ...]
Without files csrc/cuda/*.cpp, which binds the kernels to torch, is compiled as well.
nvcc is $NVCC, or the one in $CUDA_HOME, in PATH, or in this Python's packages (pip install --no-deps -r
requirements-nvcc.txt). Exit code 1 where a kernel spills registers or does not compile, 2 where there is no nvcc or no
such file.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ARCHITECTURES = ("80", "90a", "100")
# As torch.utils.cpp_extension compiles them for the extension.
FLAGS = ("-std=c++20", "-O3", "--expt-relaxed-constexpr", "-D__CUDA_NO_HALF_OPERATORS__")
FLAGS += ("-D__CUDA_NO_HALF_CONVERSIONS__", "-D__CUDA_NO_HALF2_OPERATORS__", "-D__CUDA_NO_BFLOAT16_CONVERSIONS__")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True, slots=True)
class Usage:
    """What one kernel takes on one architecture."""

    kernel: str
    architecture: str
    registers: int
    """Of a thread."""
    static_shared_bytes: int
    """Of a block; dynamic shared memory is asked for at the launch."""
    spill_bytes: int
    """Stores and loads of registers that did not fit, and the stack frame."""


def find_nvcc() -> str | None:
    """The path of nvcc, or None."""
    candidates = [os.environ.get("NVCC"), shutil.which("nvcc")]
    if os.environ.get("CUDA_HOME"):
        candidates.insert(1, str(Path(os.environ["CUDA_HOME"]) / "bin/nvcc"))
    package = importlib.util.find_spec("nvidia")
    for folder in package.submodule_search_locations if package else []:
        candidates += sorted(str(path) for path in Path(folder).glob("cu*/bin/nvcc"))
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


def compile_kernels(nvcc: str, source: Path) -> list[Usage]:
    """Compile one source, its launch functions too, for all architectures. Raises RuntimeError with nvcc's words."""
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc, *FLAGS, "-Xptxas", "-v", "-c", str(source), "-o", f"{folder}/kernels.o"]
        for arch in ARCHITECTURES:
            command += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"expected {source.name} to compile, found\n{done.stdout}{done.stderr}")
    usages = read_usages(done.stdout + done.stderr)
    if {usage.architecture for usage in usages} != {f"sm_{arch}" for arch in ARCHITECTURES}:
        raise RuntimeError(f"expected kernels of {source.name} for {ARCHITECTURES}, found {usages}")
    return usages


def check_binding(nvcc: str, source: Path) -> None:
    """Compile a source of csrc/cuda against the headers of torch and CUDA. Raises RuntimeError as above."""
    from torch.utils.cpp_extension import include_paths

    headers = [*include_paths(), sysconfig.get_path("include")]
    with tempfile.TemporaryDirectory() as folder:
        # torch's build writes this header for CUDA only; all of its contents are choices of how torch was linked
        missing = Path(folder) / "c10/cuda/impl/cuda_cmake_macros.h"
        missing.parent.mkdir(parents=True)
        missing.write_text("#define C10_CUDA_BUILD_SHARED_LIBS\n")
        command = [nvcc, "-std=c++20", "-Xcompiler", "-fsyntax-only", "-c", str(source), "-o", f"{folder}/none.o"]
        for path in [*headers, folder]:
            command += ["-isystem", path]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"expected {source.name} to compile, found\n{done.stderr}")


def read_usages(text: str) -> list[Usage]:
    """The lines of ``ptxas -v``, by kernel and architecture."""
    usages = []
    for part in re.split(r"(?=ptxas info\s+: Compiling entry function)", text):
        entry, used, spills = ENTRY.search(part), USED.search(part), SPILLS.search(part)
        if entry and used and spills:
            shared = SHARED.search(part)
            spill_bytes = sum(int(number) for number in spills.groups())
            usages.append(
                Usage(short_name(entry[1]), entry[2], int(used[1]), int(shared[1]) if shared else 0, spill_bytes)
            )
    return usages


def short_name(mangled: str) -> str:
    """ "scale_kernel<64>" from "_ZN3foo12scale_kernelILi64EEEvNS_6ParamsE"."""
    name = re.search(r"(?<=\d)[a-z][a-z_]*_kernel", mangled)
    if name is None:
        return mangled
    numbers = re.match(r"I(.*?)EEv", mangled[name.end() :])
    arguments = re.findall(r"L[a-z](\d+)E|\d+([a-z]\w*)", numbers[1] + "E") if numbers else []
    return name[0] + (f"<{', '.join(a or b for a, b in arguments)}>" if arguments else "")


def main(arguments: list[str]) -> int:
    missing = [path for path in arguments if not Path(path).is_file()]
    if missing:
        print(
            f"error: expected a source, found no file at '{missing[0]}': tools/compile_kernels.py [FILE.cu ...]",
            file=sys.stderr,
        )
        return 2
    nvcc = find_nvcc()
    if nvcc is None:
        print(
            "error: expected nvcc in $NVCC, $CUDA_HOME, PATH or this Python's packages, found none: "
            "pip install --no-deps -r requirements-nvcc.txt",
            file=sys.stderr,
        )
        return 2
    sources = [Path(path) for path in arguments] or sorted((ROOT / "csrc/kernels").glob("*.cu"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        binding = [] if arguments else sorted((ROOT / "csrc/cuda").glob("*.cpp"))
        checks = [pool.submit(check_binding, nvcc, source) for source in binding]
        usages = [usage for batch in pool.map(lambda source: compile_kernels(nvcc, source), sources) for usage in batch]
        for check in checks:
            check.result()
    print(f"{'kernel':<42} {'':<8} registers  static shared  spills")
    for usage in sorted(usages, key=lambda usage: usage.kernel):
        print(
            f"{usage.kernel:<42} {usage.architecture:<8} {usage.registers:>9} {usage.static_shared_bytes:>12} B"
            f" {usage.spill_bytes:>5} B"
        )
    if binding:
        print(f"csrc/cuda: {len(binding)} files compile")
    spilling = [f"{usage.kernel} on {usage.architecture}" for usage in usages if usage.spill_bytes]
    if spilling:
        print(f"error: expected no spills, found them in {', '.join(spilling)}", file=sys.stderr)
    return 1 if spilling else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
