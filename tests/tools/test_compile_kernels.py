"""tools/compile_kernels.py: what it reads from ptxas, and that a spill fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import compile_kernels  # noqa: E402

PTXAS = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN14trace_megatron12_GLOBAL__N_114scale_kernelENS_6ParamsE' for 'sm_80'
ptxas info    : Function properties for _ZN14trace_megatron12_GLOBAL__N_114scale_kernelENS_6ParamsE
    8 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 48 registers, used 1 barriers, 128 bytes smem, 416 bytes cmem[0]
ptxas info    : Compiling entry function '_ZN5trace11sum_kernelILi64E6__halfEEvNS_6ParamsE' for 'sm_90a'
ptxas info    : Function properties for _ZN5trace11sum_kernelILi64E6__halfEEvNS_6ParamsE
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers
"""

SPILLS = """
__global__ void __launch_bounds__(1024, 2) wide_kernel(float* x) {
  float kept[64];
  for (int i = 0; i < 64; ++i) kept[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
  for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = kept[63 - i] * kept[i];
}
"""


def test_reads_ptxas():
    usages = compile_kernels.read_usages(PTXAS)
    assert usages[0] == compile_kernels.Usage("scale_kernel", "sm_80", 48, 128, 44)
    assert (usages[1].architecture, usages[1].registers, usages[1].spill_bytes) == ("sm_90a", 255, 0)
    assert usages[1].kernel.startswith("sum_kernel<64")


@pytest.mark.skipif(compile_kernels.find_nvcc() is None, reason="no nvcc")
def test_a_spill_fails_and_so_does_what_does_not_compile(tmp_path, capsys):
    (tmp_path / "wide.cu").write_text(SPILLS)
    assert compile_kernels.main([str(tmp_path / "wide.cu")]) == 1
    captured = capsys.readouterr()
    assert "wide_kernel" in captured.out and "found them in wide_kernel on sm_80" in captured.err
    (tmp_path / "wide.cu").write_text("__global__ void wide_kernel() { nothing(); }")
    with pytest.raises(RuntimeError, match=r"identifier .nothing. is undefined"):
        compile_kernels.main([str(tmp_path / "wide.cu")])


def test_without_nvcc_the_remedy_is_named(monkeypatch, capsys):
    monkeypatch.setattr(compile_kernels, "find_nvcc", lambda: None)
    assert compile_kernels.main([]) == 2
    assert "requirements-nvcc.txt" in capsys.readouterr().err


def test_a_source_that_is_not_there_is_named(capsys):
    assert compile_kernels.main(["nowhere.cu"]) == 2
    assert "found no file at 'nowhere.cu'" in capsys.readouterr().err
