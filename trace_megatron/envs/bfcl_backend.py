"""Executes BFCL tool calls and asks the package's official checker for a verdict; no text of a policy is evaluated.

Calls are kept as JSON, and a conversation's state is the list of its calls: the back-ends are deterministic and cheap
to set up (0.13 ms), so they are built and replayed when they are needed. Nothing lives between two calls.
"""

from __future__ import annotations

import copy
import decimal
import functools
import importlib
import inspect
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mpmath
from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING, STATELESS_CLASSES
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
from bfcl_eval.eval_checker.multi_turn_eval.func_source_code.gorilla_file_system import Directory, GorillaFileSystem
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

from trace_megatron.envs.bfcl_data import Entry

# The back-ends compute whatever they are asked to: 9 ** 9 ** 9, or a logarithm to a billion digits. These limits keep
# a call in the range of a millisecond; the ground truths need no integer above 987,654 and no precision above 10.
_MAX_INTEGER = 2**63
_MAX_MAGNITUDE = {"precision": 1_000, "decimal_places": 1_000, "exponent": 1_000}
"""Of arguments with these names, numbers or texts: mpmath takes both."""
_MAX_PATHS = 20_000
"""Of a file system: a directory copied into itself has no end, and copies of copies double."""

_UNDEFINED_CALL = "undefined_tool()"
"""Stands for a refused call before the official checker: it counts as a call, and fails there as it did here."""


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call."""

    name: str
    arguments_json: str
    """An object; text, so that nothing that a back-end does to its arguments can reach the state."""
    refusal: str = ""
    """Why it is not executed: an unknown tool, or arguments that no tool may get; empty if it is."""

    @property
    def arguments(self) -> dict[str, Any]:
        return json.loads(self.arguments_json)

    @property
    def python(self) -> str:
        """The call as the official checker takes it: a known name, identifiers, literals."""
        if self.refusal:
            return _UNDEFINED_CALL
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.arguments.items())})"


def build_call(entry: Entry, name: str, arguments: Any) -> Call:
    """A call of ``entry``'s tools from parsed JSON; what must not run is marked as refused."""
    refusal = _refusal(frozenset().union(*map(_method_names, entry.classes)), name, arguments)
    if not refusal:
        try:
            return Call(name, json.dumps(arguments, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:  # Python literals that JSON does not have
            refusal = f"expected arguments as a JSON object, found something else: {error}"
    return Call(name, "{}", refusal)


def execute(entry: Entry, history: Sequence[Call], calls: Sequence[Call]) -> list[tuple[Call, str]]:
    """Run a step's calls after ``history``: each with the tool's answer, and marked as refused where it had no end."""
    backends = Backends(entry, history)
    done: list[tuple[Call, str]] = []
    for call in calls:
        result = backends.run(call)
        if backends.oversized:
            call = Call(call.name, "{}", f"expected at most {_MAX_PATHS} paths in the file system")
            backends = Backends(entry, (*history, *(earlier for earlier, _ in done)))
            result = backends.run(call)
        done.append((call, result))
    return done


class Backends:
    """The live back-ends of one conversation, after the calls of its history."""

    def __init__(self, entry: Entry, history: Sequence[Call] = ()) -> None:
        self._instances = {class_name: _build_instance(class_name, entry) for class_name in entry.classes}
        for call in history:
            self.run(call)

    def run(self, call: Call) -> str:
        """Execute a call and return the tool's answer."""
        if call.refusal:
            return _error_text(call.refusal)
        with _own_precision():
            try:
                return _result_text(self._method(call.name)(**call.arguments))
            except Exception as error:  # the official executor makes an observation of whatever a tool raises
                return _error_text(str(error))

    def _method(self, name: str) -> Callable[..., Any]:
        # Of two classes with the same method, the later one has it, as in the official executor.
        class_name = next(class_name for class_name in reversed(self._instances) if name in _method_names(class_name))
        return getattr(self._instances[class_name], name)

    @property
    def oversized(self) -> bool:
        """Whether a file system holds more paths than a tool could walk through."""
        return any(
            isinstance(instance, GorillaFileSystem) and _has_more_paths(instance.root, _MAX_PATHS)
            for instance in self._instances.values()
        )


def judge(entry: Entry, turns: Sequence[Sequence[Sequence[Call]]]) -> dict[str, Any]:
    """The official verdict on [turn][step][call]: ``valid``, and otherwise the ``error_type``.

    A conversation that was cut before its last turn is judged as the official runner judges it, without its checker.
    """
    if len(turns) != len(entry.ground_truth):
        return {"valid": False, "error_type": "multi_turn:force_terminated"}
    decoded = [[[call.python for call in step] for step in turn] for turn in turns]
    with _own_instances() as name, _own_precision():
        try:
            verdict = multi_turn_checker(
                decoded, [list(turn) for turn in entry.ground_truth], dict(entry.record), entry.subset, name
            )
        except RecursionError:  # states nested too deeply to be compared
            return {"valid": False, "error_type": "multi_turn:instance_state_mismatch"}
    return {"valid": verdict["valid"], **({} if verdict["valid"] else {"error_type": verdict["error_type"]})}


@contextmanager
def _own_instances() -> Iterator[str]:
    """A name for one evaluation. The package keeps its instances as globals under it, for ever: they are removed."""
    name = f"rollout_{uuid.uuid4().hex}"
    try:
        yield name
    finally:
        module = vars(multi_turn_utils)
        for key in [key for key in module if key.startswith(name)]:
            del module[key]


@contextmanager
def _own_precision() -> Iterator[None]:
    """MathAPI sets the precision of mpmath and of decimal for the whole process: undo that."""
    with decimal.localcontext(), mpmath.workdps(mpmath.mp.dps):
        yield


def _build_instance(class_name: str, entry: Entry) -> Any:
    instance = _class_of(class_name)()
    if class_name not in STATELESS_CLASSES:
        config = copy.deepcopy(entry.record["initial_config"].get(class_name, {}))
        instance._load_scenario(config, long_context=entry.subset == "long_context")
    return instance


@functools.cache
def _method_names(class_name: str) -> frozenset[str]:
    """The official executor's own rule. Withheld tools are among them: whoever guesses their names may call them."""
    instance = _class_of(class_name)()
    methods = inspect.getmembers(instance, predicate=inspect.ismethod)
    return frozenset(name for name, _ in methods if not name.startswith("_"))


def _class_of(class_name: str) -> type:
    return getattr(importlib.import_module(CLASS_FILE_PATH_MAPPING[class_name]), class_name)


def _refusal(known: frozenset[str], name: str, arguments: Any) -> str:
    if name not in known:
        return f"name {name!r} is not defined"
    if not isinstance(arguments, Mapping):
        return f"expected arguments as a JSON object, found {type(arguments).__name__}"
    for key, value in arguments.items():
        if not isinstance(key, str) or not key.isidentifier():
            return f"expected the name of an argument, found {key!r}"
        if any(isinstance(number, int) and abs(number) > _MAX_INTEGER for number in _numbers(value)):
            return f"expected integers of at most {_MAX_INTEGER} for {key}"
        if key in _MAX_MAGNITUDE and _magnitude(value) > _MAX_MAGNITUDE[key]:
            return f"expected at most {_MAX_MAGNITUDE[key]} for {key}"
    return ""


def _magnitude(value: Any) -> float:
    try:
        return abs(float(value))
    except (TypeError, ValueError):  # no number: the tool will say so
        return 0.0


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _numbers(item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _numbers(item)


def _has_more_paths(root: Directory, limit: int) -> bool:
    waiting, num_paths = [root], 0
    while waiting and num_paths <= limit:
        children = waiting.pop().contents.values()
        num_paths += len(children)
        waiting += [child for child in children if isinstance(child, Directory)]
    return num_paths > limit


def _result_text(result: Any) -> str:
    """As the official executor writes it."""
    if isinstance(result, str):
        return result
    if isinstance(result, dict):
        try:
            return json.dumps(result)
        except (TypeError, ValueError):  # a high-precision number
            return str(result)
    return str(result)


def _error_text(message: str) -> str:
    return f"Error during execution: {message}"
