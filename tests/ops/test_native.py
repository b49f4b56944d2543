"""What happens where the native ops are missing, and what the build says to wrong wishes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

WITHOUT_EXTENSION = """
import sys, warnings
sys.modules["trace_megatron.ops._native"] = None  # as if it were not there
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    from trace_megatron import ops
    end = torch.tensor([3, 2, 3], dtype=torch.int32)
    x = torch.randn(3, 2, 16, requires_grad=True)
    ops.tree_attention(x, x, x, end, 1.0).sum().backward()
    ops.tree_block_mask(end)
    ops.pack_tree(torch.arange(3), torch.tensor([0, 1, 3]), torch.tensor([-1, 0]))
    ops.allocate_roots(torch.tensor([0.5]), torch.tensor([2]))
    ops.value_head(x[:, 0], torch.tensor([1]), torch.ones(16), torch.ones(16))
    ops.swiglu(ops.rms_norm(x, torch.ones(16), 1e-5))
    logits, labels = torch.randn(2, 9), torch.tensor([1, 2])
    ops.softmax_gradient(logits, labels, *ops.softmax_statistics(logits, labels, 1.0)[:2], 1.0)
mine = [str(w.message) for w in caught if "native CPU ops" in str(w.message)]
assert len(mine) == 1 and "references run instead" in mine[0] and "TRACE_BUILD=cpu" in mine[0], mine
"""


def test_without_the_extension_everything_runs_after_one_warning():
    subprocess.run([sys.executable, "-c", WITHOUT_EXTENSION], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        pytest.param(
            "cuda",
            "expects a CUDA build of torch and its toolkit in CUDA_HOME, found torch for CUDA None",
            marks=pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is one"),
        ),
        ("gpu", "expected TRACE_BUILD as cpu, cuda or none"),
    ],
)
def test_builds_that_do_not_exist(wish, message):
    command = [sys.executable, "setup.py", "--version"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"TRACE_BUILD": wish}, capture_output=True, text=True)
    assert done.returncode != 0 and message in done.stderr
