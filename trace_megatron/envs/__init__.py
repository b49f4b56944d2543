"""The environments that a configuration can name; each one's package is imported only when it is chosen.

Packages add their own through the entry point group ``trace_megatron.envs`` (docs/environments.md): the entry point's
name is the environment's, its object is called with ``env.params``.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from trace_megatron.config import ENV_TOKEN, EnvConfig
from trace_megatron.envs.limits import LimitedEnvironment
from trace_megatron.errors import UserError
from trace_megatron.rollout.env import Environment

ENTRY_POINTS = "trace_megatron.envs"


def _reasoning_gym(params: Mapping[str, Any]) -> Environment:
    from trace_megatron.envs.reasoning_gym import ReasoningGym

    return ReasoningGym(**params)


def _python_tool(params: Mapping[str, Any]) -> Environment:
    from trace_megatron.envs.python_tool import PythonTool

    return PythonTool(**params)


def _retrieval(params: Mapping[str, Any]) -> Environment:
    from trace_megatron.envs.retrieval import Retrieval

    return Retrieval(**params)


def _bfcl(params: Mapping[str, Any]) -> Environment:
    from trace_megatron.envs.bfcl import BFCL

    return BFCL(**params)


def _calculator(params: Mapping[str, Any]) -> Environment:
    from trace_megatron.envs.calculator import Calculator

    return Calculator(**params)


_BUILDERS: dict[str, Callable[[Mapping[str, Any]], Environment]] = {
    "reasoning_gym": _reasoning_gym,
    "python_tool": _python_tool,
    "retrieval": _retrieval,
    "bfcl": _bfcl,
    "calculator": _calculator,
}


def build_environment(config: EnvConfig) -> Environment:
    """The environment that ``config`` names, within its limits, or a client of the servers that have it.

    Raises UserError for unknown names and parameters; servers are not asked yet.
    """
    if config.timeout_s <= 0 or config.max_concurrency < 0:
        raise UserError(
            f"expected env.timeout_s above 0 and env.max_concurrency of at least 0 (0: no limit), found "
            f"{config.timeout_s:g} and {config.max_concurrency}"
        )
    if config.urls:
        from trace_megatron.envs.remote import RemoteEnvironment

        return RemoteEnvironment(config, os.environ.get(ENV_TOKEN, ""))
    environment = _build(config)
    own_limit = getattr(environment, "max_concurrency", 0)
    return LimitedEnvironment(environment, config.max_concurrency or own_limit, config.timeout_s)


def _build(config: EnvConfig) -> Environment:
    try:
        return _builder(config.name)(config.params)
    except TypeError as error:
        if "argument" not in str(error):  # not about the parameters' names
            raise
        raise UserError(f"wrong parameters in env.params for the environment '{config.name}': {error}") from error


def _builder(name: str) -> Callable[[Mapping[str, Any]], Environment]:
    if name in _BUILDERS:
        return _BUILDERS[name]
    installed = entry_points(group=ENTRY_POINTS)
    if name not in installed.names:
        known = sorted({*_BUILDERS, *installed.names})
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise UserError(f"unknown environment '{name}': did you mean '{nearest[0]}'? Known: {', '.join(known)}")
    environment_class = installed[name].load()
    return lambda params: environment_class(**params)
