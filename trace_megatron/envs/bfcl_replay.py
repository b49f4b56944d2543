"""BFCL's ground truth as the actions of a policy that makes no mistake: for checks of the environment."""

from __future__ import annotations

import ast
import importlib
import inspect
import json

from bfcl_eval.constants.default_prompts import MAXIMUM_STEP_LIMIT
from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING

from trace_megatron.envs.bfcl_data import Entry


def ground_truth_actions(entry: Entry) -> list[str]:
    """The actions of a whole conversation: one call each, more where a turn has too few steps for that, then a word."""
    parameters = _parameter_names(entry)
    actions = []
    for turn in entry.ground_truth:
        blocks = [_tool_call(call, parameters) for call in turn]
        calls_per_step = -(-len(blocks) // MAXIMUM_STEP_LIMIT) or 1
        steps = [blocks[start : start + calls_per_step] for start in range(0, len(blocks), calls_per_step)]
        actions += ["\n".join(step) for step in steps]
        actions.append("Done.")
    return actions


def _tool_call(expression: str, parameters: dict[str, list[str]]) -> str:
    call = ast.parse(expression, mode="eval").body
    name = call.func.id
    named = [(keyword.arg, keyword.value) for keyword in call.keywords]
    values = [*zip(parameters[name], call.args, strict=False), *named]
    arguments = {key: ast.literal_eval(value) for key, value in values}
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _parameter_names(entry: Entry) -> dict[str, list[str]]:
    """Of every method: some ground truths pass arguments by position."""
    names = {}
    for class_name in entry.classes:
        class_ = getattr(importlib.import_module(CLASS_FILE_PATH_MAPPING[class_name]), class_name)
        for name, function in inspect.getmembers(class_, predicate=inspect.isfunction):
            names[name] = list(inspect.signature(function).parameters)[1:]
    return names
