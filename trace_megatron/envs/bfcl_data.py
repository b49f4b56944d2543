"""BFCL v4 multi-turn: its entries, tool schemas and splits, read from the files of the package bfcl-eval."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType
from typing import Any

from bfcl_eval.constants.default_prompts import DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC
from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING
from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI

from trace_megatron.errors import UserError

SUBSETS = ("base", "long_context", "miss_func", "miss_param")
CLASSES = (
    "GorillaFileSystem",
    "MathAPI",
    "MessageAPI",
    "TicketAPI",
    "TradingBot",
    "TravelAPI",
    "TwitterAPI",
    "VehicleControlAPI",
)

_NUM_SCENARIOS = 200  # of each subset; the four subsets are variations of the same ones
_TRAIN_SHARE = 0.8

Message = Mapping[str, Any]
Tool = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """One conversation of the benchmark. Everything in it is shared by all of its rollouts: read only."""

    entry_id: str
    subset: str
    scenario: int
    """Entries of several subsets that share it ask for nearly the same."""
    user_turns: tuple[tuple[Message, ...], ...]
    """What the user says at the beginning of each turn, the announcement of withheld tools included."""
    tools: tuple[Tool, ...]
    """Shown from the beginning; OpenAI form."""
    ground_truth: tuple[tuple[str, ...], ...]
    """[turn][call], Python call expressions."""
    record: Mapping[str, Any]
    """The package's own record: id, initial_config, involved_classes."""

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.record["involved_classes"])


@functools.cache
def load_entries() -> Mapping[str, Entry]:
    """All 800 entries by id, in the package's order."""
    entries = {}
    for subset in SUBSETS:
        file_name = f"BFCL_v4_multi_turn_{subset}.json"
        answers = {record["id"]: record["ground_truth"] for record in _read_lines("possible_answer", file_name)}
        for record in _read_lines(file_name):
            entries[record["id"]] = _build_entry(subset, record, answers[record["id"]])
    return MappingProxyType(entries)


def split_entries(split: str, subsets: Sequence[str], classes: Sequence[str], seed: int) -> list[Entry]:
    """The entries of ``subsets`` whose tools all belong to ``classes``, for one side of the 80/20 split.

    Scenarios are dealt to the splits, not entries: the same request in another subset would otherwise be on both sides.
    """
    scenarios = list(range(_NUM_SCENARIOS))
    random.Random(seed).shuffle(scenarios)
    num_train = round(_TRAIN_SHARE * _NUM_SCENARIOS)
    members = {"train": set(scenarios[:num_train]), "validation": set(scenarios[num_train:])}
    if split not in members:
        raise UserError(f"expected a split of {', '.join(members)}, found '{split}'")
    return [
        entry
        for entry in load_entries().values()
        if entry.scenario in members[split] and entry.subset in subsets and set(entry.classes) <= set(classes)
    ]


def _build_entry(subset: str, record: Mapping[str, Any], ground_truth: Sequence[Sequence[str]]) -> Entry:
    withheld = {int(turn): names for turn, names in record.get("missed_function", {}).items()}
    tools = [tool for class_name in record["involved_classes"] for tool in _tools_of(class_name)]
    hidden = {name for names in withheld.values() for name in names}
    by_name = {tool["function"]["name"]: tool for tool in tools}
    user_turns = [
        (_announcement([by_name[name] for name in withheld[turn]]),) if turn in withheld else tuple(messages)
        for turn, messages in enumerate(record["question"])
    ]
    return Entry(
        entry_id=record["id"],
        subset=subset,
        scenario=int(record["id"].rpartition("_")[2]),
        user_turns=tuple(user_turns),
        tools=tuple(tool for tool in tools if tool["function"]["name"] not in hidden),
        ground_truth=tuple(tuple(turn) for turn in ground_truth),
        record={name: record[name] for name in ("id", "initial_config", "involved_classes")},
    )


def _announcement(tools: Sequence[Tool]) -> Message:
    """The official follow-up sentence. A history only grows, so the schemas come with it, not in a new system text.

    The package's own handler for models without a tool interface does the same: schemas, a line break, the sentence.
    """
    schemas = "\n".join(json.dumps(tool) for tool in tools)
    return {"role": "user", "content": f"{schemas}\n{DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC}"}


@functools.cache
def _tools_of(class_name: str) -> tuple[Tool, ...]:
    """A back-end's tools in OpenAI form, with JSON Schema's names of types."""
    documents = _read_lines("multi_turn_func_doc", MULTI_TURN_FUNC_DOC_FILE_MAPPING[class_name])
    return tuple(
        {
            "type": "function",
            "function": {
                "name": document["name"],
                "description": document["description"],
                "parameters": _json_schema(document["parameters"]),
            },
        }
        for document in documents
    )


def _json_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(schema, type=GORILLA_TO_OPENAPI[schema["type"]])
    if "properties" in schema:
        result["properties"] = {name: _json_schema(value) for name, value in schema["properties"].items()}
    if "items" in schema:
        result["items"] = _json_schema(schema["items"])
    return result


def _read_lines(*path: str) -> list[dict[str, Any]]:
    text = resources.files("bfcl_eval").joinpath("data", *path).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]
