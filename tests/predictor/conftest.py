from pathlib import Path

import pytest
from tiny_models import write_tiny_model


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "llama", num_layers=3)


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", tied=False, head_dim=32, seed=1)
