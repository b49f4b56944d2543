"""The predictor on disk: one safetensors file whose header carries the small state as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trace_megatron.errors import UserError

if TYPE_CHECKING:  # whose transformers this needs not
    from trace_megatron.predictor.model import ValueModel

_FILE = "predictor.safetensors"
_ADAM = ("step", "exp_avg", "exp_avg_sq")


def copy_training_state(model: ValueModel, optimizer: torch.optim.Adam) -> dict[str, torch.Tensor]:
    """Weights, head and Adam's moments as they are now, in host memory."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter
        tensors |= {f"{kind}.{name}": tensor for kind, tensor in optimizer.state.get(parameter, {}).items()}
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def save_training_state(folder: Path, tensors: Mapping[str, torch.Tensor], state: Mapping[str, int]) -> None:
    """Write ``copy_training_state``'s result and ``state``; the file appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{_FILE}.partial"
    save_file(dict(tensors), partial, metadata={"state": json.dumps(state)})
    os.replace(partial, folder / _FILE)


def load_training_state(folder: Path, model: ValueModel, optimizer: torch.optim.Adam) -> dict[str, int]:
    """Read what ``save_training_state`` wrote into model and optimizer; returns the state.

    Raises UserError, before anything is changed, where the file is missing, damaged, or of another shape.
    """
    path = folder / _FILE
    if not path.is_file():
        raise UserError(
            f"expected a predictor checkpoint at '{path}', found none: resume with the predictor.kind it had"
        )
    try:
        with safe_open(path, framework="pt") as file:
            state = json.loads(file.metadata()["state"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a mapping
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"expected a predictor checkpoint in '{path}', found: {error}") from error
    _check_shapes(path, model, tensors)
    adam: dict[int, dict[str, torch.Tensor]] = {}
    with torch.no_grad():
        for index, (name, parameter) in enumerate(model.named_parameters()):
            parameter.copy_(tensors[f"model.{name}"])
            adam[index] = {kind: tensors[f"{kind}.{name}"] for kind in _ADAM if f"{kind}.{name}" in tensors}
    groups = optimizer.state_dict()["param_groups"]  # the learning rate is the configuration's
    optimizer.load_state_dict({"state": {i: moments for i, moments in adam.items() if moments}, "param_groups": groups})
    return state


def _check_shapes(path: Path, model: ValueModel, tensors: Mapping[str, torch.Tensor]) -> None:
    required = {f"model.{name}": list(parameter.shape) for name, parameter in model.named_parameters()}
    moments = {  # absent before a parameter's first step
        f"{kind}.{name}": [] if kind == "step" else list(parameter.shape)
        for name, parameter in model.named_parameters()
        for kind in _ADAM
    }
    found = {name: list(tensor.shape) for name, tensor in tensors.items()}
    expected = required | {name: shape for name, shape in moments.items() if name in found}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise UserError(
                f"expected {name} of shape {expected.get(name, 'none')} in '{path}', found {found.get(name, 'none')}: "
                "resume with the predictor.model and predictor.num_layers that wrote it"
            )
