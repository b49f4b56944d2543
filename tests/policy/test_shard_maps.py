"""The layouts of the paper's models: every number of every weight is on some rank, and none of them on two."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trace_megatron.policy.hf_config import parse_hf_config
from trace_megatron.policy.names import model_weights

CASES = [
    ("Llama-3.2-3B-Instruct", 1, 1),
    ("Llama-3.2-3B-Instruct", 2, 1),
    ("Qwen3-8B", 2, 1),
    ("Qwen3-8B", 4, 1),
    ("Qwen3-14B", 4, 2),
    ("Qwen3-32B", 8, 4),
]
"""Model, tensor and pipeline parallel."""


@pytest.fixture(scope="module")
def maps(trace_data):
    configs = trace_data / "models" / "configs"
    arguments = [f"{configs / model}.json:{tensor}:{pipeline}" for model, tensor, pipeline in CASES]
    script = Path(__file__).with_name("shard_maps.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()[-len(CASES) :]), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_ranks_hold_everything_once(trace_data, maps, case):
    num_held = 0
    for key, entry in maps[case].items():
        sizes = [math.prod(shape) for _, shape in entry["parts"]]
        num_held += sum(sizes)
        assert sum(sizes) == math.prod(entry["shape"]), key
        corners = np.array([offset for offset, _ in entry["parts"]])
        assert len(np.unique(corners, axis=0)) == len(corners), key
    values = json.loads((trace_data / "models" / "configs" / f"{case[0]}.json").read_text())
    weights = model_weights(parse_hf_config(values, case[0]))
    shapes = [shape for weight in weights if not weight.is_copy for shape in weight.hf.values()]
    assert num_held == sum(map(math.prod, shapes))
