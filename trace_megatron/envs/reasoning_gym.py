"""Procedural tasks of the package reasoning-gym, judged by its own verifiers; a wrong answer may be tried again.

The answer is what follows the last "Answer:" of an action, or else its last line. Of that, the last number counts where
the right answer is a number, the last word where it is one word, and all of it otherwise.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trace_megatron.errors import UserError
from trace_megatron.rollout.env import Transition
from trace_megatron.types import Task

try:
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS
except ImportError as error:
    raise UserError(
        "expected the package reasoning-gym for env.name=reasoning_gym, found none: "
        "pip install 'trace-megatron[reasoning-gym]'"
    ) from error

_SPLITS = ("train", "validation")
_SEED_STRIDE = 1 << 30  # keeps the splits' and the examples' generators apart; seeds must stay below 2**32
_VALIDATION_SHARE = 4  # one distinct question in four is held out
_ROUNDS = 16  # candidates that each task can draw before the sequence of candidates begins again
_MAX_DRAWS = 256  # (3/4)**256 = 1e-32: not reached unless a split has no question at all

# Their verifiers pass the policy's own words to Python's or SymPy's evaluator: a policy must not run code here.
_EVALUATING_VERIFIERS = frozenset(
    {
        "binary_matrix",
        "composite",  # may hold any of the others
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?")
_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True, slots=True)
class GymState:
    """One task in play; a value, so that several continuations may step from it."""

    source: int
    """Index of the generator."""
    entry: Mapping[str, Any]
    """reasoning-gym's own record: question, answer, metadata. Read only."""
    num_answers: int
    """Answers given so far."""


@dataclass(frozen=True, slots=True)
class _Source:
    """One configured kind of task."""

    label: str
    datasets: Mapping[str, ProceduralDataset]
    """A generator for each split."""
    examples: tuple[Mapping[str, str], ...]
    """The turns that show worked examples; empty without."""
    shown: frozenset[str]
    """The examples' questions: no task repeats one."""


class ReasoningGym:
    """Environment over one or more kinds of reasoning-gym tasks, mixed in equal parts."""

    def __init__(
        self,
        tasks: Mapping[str, Any] | Sequence[Any] = (),
        size: int = 10_000,
        seed: int = 0,
        num_examples: int = 0,
        partial_credit: bool = False,
        **unknown: Any,
    ) -> None:
        """``tasks``: {name: parameters}, or a list of names and of mappings with a name and parameters.

        ``size``: tasks of each split; they are generated when asked for. ``num_examples``: solved tasks of the same
        kind shown as earlier turns, the first one at its second try; small models need them to keep to the form.
        ``partial_credit``: use the verifier's score as it is, else 1 for a full score and 0 for anything less.
        Raises UserError for unknown names and wrong parameters.
        """
        if unknown:
            known = ("tasks", "size", "seed", "num_examples", "partial_credit")
            raise _unknown_name("parameter of env.params", next(iter(unknown)), known)
        if size < 1 or num_examples < 0:
            raise UserError(f"expected env.params.size > 0 and num_examples >= 0, found {size} and {num_examples}")
        specs = _task_specs(tasks)
        if not specs:
            raise UserError("expected tasks in env.params.tasks, found none: name some, e.g. tasks: {chain_sum: {}}")
        self._size = size
        self._partial_credit = partial_credit
        per_source = -(-size // len(specs))
        names = [name for name, _ in specs]
        self._sources = [
            _build_source(
                name if names.count(name) == 1 else f"{name}.{number}", name, params, per_source, seed, num_examples
            )
            for number, (name, params) in enumerate(specs)
        ]

    def tasks(self, split: str) -> Sequence[Task]:
        """The split's tasks, generated when they are indexed."""
        return _GymTasks(self._sources, split, self._size)

    async def reset(self, task: Task) -> GymState:
        source = task.payload["source"]
        entry = self._sources[source].datasets[task.payload["split"]][task.payload["index"]]
        return GymState(source, entry, 0)

    async def step(self, state: GymState, action: str) -> Transition:
        """Judge the answer in the action; ``info`` holds the extracted answer and the verifier's own score."""
        source = self._sources[state.source]
        answer = extract_answer(action, state.entry["answer"])
        score = float(source.datasets["train"].score_answer(answer, state.entry))
        solved = score >= 1.0
        reward = score if self._partial_credit else float(solved)
        next_state = dataclasses.replace(state, num_answers=state.num_answers + 1)
        observation = () if solved else ({"role": "user", "content": _feedback(answer)},)
        return Transition(
            next_state, observation, reward, solved, {"kind": source.label, "answer": answer, "score": score}
        )

    async def close(self) -> None:
        """Nothing is held."""


def extract_answer(action: str, right_answer: str) -> str | None:
    """The answer in an action, of the kind of ``right_answer`` (a number, one word, any text); None without one."""
    _, found, text = action.rpartition("Answer:")
    text = text.strip()
    if "\n" not in right_answer:
        lines = text.splitlines() or [""]
        text = lines[0 if found else -1]
    if _is_number(right_answer):
        return _last_match(_NUMBER, text)
    if _WORD.fullmatch(right_answer):
        return _last_match(_WORD, text)
    quotes = "*`\"' "
    return text.strip(quotes).removesuffix(".").strip(quotes) or None


def _is_number(answer: str) -> bool:
    return _NUMBER.fullmatch(answer) is not None


def _last_match(pattern: re.Pattern[str], text: str) -> str | None:
    matches = pattern.findall(text)
    return matches[-1] if matches else None


def _feedback(answer: str | None) -> str:
    if answer is None:
        return "That gives no answer. Try again, in the form\nAnswer: <result>"
    return f"{answer} is wrong. Try again."


def _question(entry: Mapping[str, Any]) -> str:
    return f"{entry['question'].strip()}\nReply in the form\nAnswer: <result>"


class _GymTasks(Sequence[Task]):
    """A split's tasks. Questions are dealt to the splits by their hash, so that the splits cannot share one."""

    def __init__(self, sources: Sequence[_Source], split: str, size: int) -> None:
        if split not in _SPLITS:
            raise UserError(f"expected a split of {', '.join(_SPLITS)}, found '{split}'")
        self._sources = sources
        self._split = split
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, number: int) -> Task:
        if not 0 <= number < self._size:
            raise IndexError(number)
        slot, position = divmod(number, len(self._sources))
        source = self._sources[position]
        index, entry = _draw(source, self._split, slot)
        return Task(
            task_id=f"{source.label}-{self._split}-{slot}",
            messages=(*source.examples, {"role": "user", "content": _question(entry)}),
            payload={"source": position, "split": self._split, "index": index, "answer": entry["answer"]},
        )


def _draw(source: _Source, split: str, slot: int) -> tuple[int, Mapping[str, Any]]:
    """The first candidate of a slot whose question belongs to the split, with its index in the generator."""
    dataset = source.datasets[split]
    slots = len(dataset) // _ROUNDS
    for draw in range(_MAX_DRAWS):
        index = (slot + draw * slots + draw // _ROUNDS) % len(dataset)
        entry = dataset[index]
        if _split_of(entry["question"]) == split and entry["question"] not in source.shown:
            return index, entry
    raise UserError(
        f"expected enough different questions of '{source.label}' for the split '{split}', found none: "
        "widen its parameters in env.params.tasks"
    )


@functools.lru_cache(maxsize=65_536)
def _split_of(question: str) -> str:
    held_out = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return "validation" if int.from_bytes(held_out, "big") % _VALIDATION_SHARE == 0 else "train"


def _task_specs(tasks: Mapping[str, Any] | Sequence[Any]) -> list[tuple[str, dict[str, Any]]]:
    if isinstance(tasks, Mapping):
        return [(str(name), _checked_params(str(name), params)) for name, params in tasks.items()]
    if isinstance(tasks, str):
        return [(tasks, _checked_params(tasks, None))]
    specs = []
    for item in tasks:
        params = dict(item) if isinstance(item, Mapping) else {"name": item}
        if "name" not in params:
            raise UserError(f"expected a name in every item of env.params.tasks, found {item!r}")
        name = str(params.pop("name"))
        specs.append((name, _checked_params(name, params)))
    return specs


def _checked_params(name: str, params: Any) -> dict[str, Any]:
    """The parameters of one kind of task, known to its config class."""
    if name not in DATASETS:
        raise _unknown_name("reasoning-gym task", name, DATASETS)
    if name in _EVALUATING_VERIFIERS:
        raise UserError(
            f"expected a task whose verifier only compares, found '{name}': reasoning-gym's verifier for it would run "
            "the policy's text as Python code; choose another task"
        )
    if not isinstance(params, Mapping | None):
        raise UserError(f"expected parameters of the task '{name}' as a mapping, found {params!r}")
    known = [field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in ("seed", "size")]
    for key in params or {}:
        if key not in known:
            raise _unknown_name(f"parameter of the task '{name}'", str(key), known)
    return dict(params or {})


def _build_source(
    label: str, name: str, params: dict[str, Any], per_source: int, seed: int, num_examples: int
) -> _Source:
    size = per_source * _ROUNDS
    datasets = {split: _build_dataset(name, params, size, seed + k * _SEED_STRIDE) for k, split in enumerate(_SPLITS)}
    if not num_examples:
        return _Source(label, datasets, (), frozenset())
    generator = _build_dataset(name, params, _MAX_DRAWS + num_examples, seed + len(_SPLITS) * _SEED_STRIDE)
    drawn = {entry["question"]: entry for entry in generator if _split_of(entry["question"]) == "train"}
    entries = list(drawn.values())[:num_examples]
    return _Source(
        label,
        datasets,
        tuple(_worked_examples(entries, [entry["answer"] for entry in drawn.values()])),
        frozenset(entry["question"] for entry in entries),
    )


def _worked_examples(entries: Sequence[Mapping[str, Any]], answers: Sequence[str]) -> Iterable[Mapping[str, str]]:
    """Questions with their answers; the first is answered wrongly before, with one of ``answers`` of the same kind."""
    for number, entry in enumerate(entries):
        right = entry["answer"]
        yield {"role": "user", "content": _question(entry)}
        wrong = [answer for answer in answers if answer != right and _is_number(answer) == _is_number(right)]
        if number == 0 and wrong:
            yield {"role": "assistant", "content": f"Answer: {wrong[0]}"}
            yield {"role": "user", "content": _feedback(wrong[0])}
        yield {"role": "assistant", "content": f"Answer: {right}"}


def _build_dataset(name: str, params: dict[str, Any], size: int, seed: int) -> ProceduralDataset:
    dataset_class, config_class = DATASETS[name]
    try:
        config = config_class(**params, size=size, seed=seed)
        config.validate()
        return dataset_class(config=config)
    except (AssertionError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"wrong parameters of the reasoning-gym task '{name}' ({params}): {reason}") from error


def _unknown_name(what: str, name: str, known: Iterable[str]) -> UserError:
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return UserError(
        f"unknown {what} '{name}': did you mean '{nearest[0]}'?" if nearest else f"unknown {what} '{name}'"
    )
