"""Builds the native ops (csrc/) beside the Python package; everything else is in pyproject.toml.

TRACE_BUILD=cpu builds the CPU ops, TRACE_BUILD=cuda those and the CUDA ones, and a failure is an error;
TRACE_BUILD=none builds nothing. Unset: the CPU ops are built where torch and a C++20 compiler are found, the CUDA ones
where torch is a CUDA build and its toolkit's nvcc is found too, and where not, the ops run on their torch references.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

BUILD = os.environ.get("TRACE_BUILD", "")
ROOT = Path(__file__).parent
CPU_SOURCES = ["csrc/bindings.cpp", *(f"csrc/{folder}/*.cpp" for folder in ("api", "cpu"))]
CUDA_SOURCES = ["csrc/cuda/*.cpp", "csrc/kernels/*.cu"]
CUDA_ARCHITECTURES = "8.0;9.0a;10.0+PTX"  # where no GPU is at hand to ask and TORCH_CUDA_ARCH_LIST does not say


def import_cpp_extension():
    """torch's build helper, or None. pip hides the environment's torch from an isolated build; it is the right one."""
    sys.path.append(sysconfig.get_path("purelib"))
    try:
        from torch.utils import cpp_extension
    except ImportError as error:
        if BUILD:
            sys.exit(f"error: TRACE_BUILD={BUILD} expects torch in this environment, found: {error}")
        return None
    return cpp_extension


def wants_cuda(cpp_extension) -> bool:
    """Whether the CUDA ops are built. Where that was asked for and cannot be, the reason ends the build."""
    import torch

    found = f"torch for CUDA {torch.version.cuda}, toolkit {cpp_extension.CUDA_HOME}"
    is_possible = torch.version.cuda is not None and cpp_extension.CUDA_HOME is not None
    if BUILD == "cuda" and not is_possible:
        sys.exit(f"error: TRACE_BUILD=cuda expects a CUDA build of torch and its toolkit in CUDA_HOME, found {found}")
    if is_possible and not torch.cuda.is_available():
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", CUDA_ARCHITECTURES)
    return is_possible and BUILD in ("", "cuda")


def native_extension(cpp_extension) -> Extension:
    flags = ["-std=c++20", "-O3", "-g0", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi"]
    if os.name == "nt":
        flags = ["/std:c++20", "/O2"]
    elif sys.platform.startswith("linux") and compiler_is_gcc():
        # Compiled for OpenMP, yet not linked to a runtime: torch brings GCC's, and two would fight for the cores.
        # Other compilers' code calls other runtimes: without the flag, the ops start threads of their own.
        flags.append("-fopenmp")
    with_cuda = wants_cuda(cpp_extension)
    patterns = CPU_SOURCES + (CUDA_SOURCES if with_cuda else [])
    sources = sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))
    headers = sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("csrc/**/*.h"), *ROOT.glob("csrc/**/*.cuh")])
    extension = cpp_extension.CUDAExtension if with_cuda else cpp_extension.CppExtension
    compile_args = {"cxx": flags, "nvcc": ["-std=c++20", "-O3"]}
    return extension("trace_megatron.ops._native", sources, depends=headers, extra_compile_args=compile_args)


def compiler_is_gcc() -> bool:
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    try:
        macros = subprocess.run(
            [*compiler, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True
        ).stdout
    except OSError:
        return False
    return "__GNUC__" in macros and "__clang__" not in macros


def build_command(cpp_extension) -> type:
    class BuildExtension(cpp_extension.BuildExtension):
        def run(self):
            try:
                super().run()
            except Exception as error:
                if BUILD:
                    raise
                print(f"warning: the native ops were not built, their torch references will run: {error}")
                self.extensions = []  # nothing to copy or to pack

    return BuildExtension


def native_parts() -> dict:
    if BUILD not in ("", "cpu", "cuda", "none"):
        sys.exit(f"error: expected TRACE_BUILD as cpu, cuda or none, found '{BUILD}'")
    cpp_extension = import_cpp_extension() if BUILD != "none" else None
    if cpp_extension is None:
        return {}
    return {
        "ext_modules": [native_extension(cpp_extension)],
        "cmdclass": {"build_ext": build_command(cpp_extension)},
    }


setup(**native_parts())
