"""The tensors of an HF folder, and whether two folders hold the same."""

from pathlib import Path

import torch
from safetensors.torch import load_file


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype and torch.equal(found[name], tensor), name
