"""The environments that a configuration can name; each one's package is imported only when it is chosen."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from trace_megatron.config import EnvConfig
from trace_megatron.errors import UserError
from trace_megatron.rollout.env import Environment


def _reasoning_gym(params: Mapping[str, Any]) -> Environment:
    from trace_megatron.envs.reasoning_gym import ReasoningGym

    return ReasoningGym(**params)


_BUILDERS: dict[str, Callable[[Mapping[str, Any]], Environment]] = {"reasoning_gym": _reasoning_gym}


def build_environment(config: EnvConfig) -> Environment:
    """The environment that ``config`` names, with its parameters; raises UserError for unknown ones."""
    if config.name not in _BUILDERS:
        known = ", ".join(_BUILDERS)
        nearest = difflib.get_close_matches(config.name, _BUILDERS, n=1, cutoff=0.0)
        raise UserError(f"unknown environment '{config.name}': did you mean '{nearest[0]}'? Known: {known}")
    return _BUILDERS[config.name](config.params)
