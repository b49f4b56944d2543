"""Order, resume and limits of the prompt source."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import build_renderer

from trace_megatron.errors import UserError
from trace_megatron.rollout.prompts import PromptSource, _shuffled
from trace_megatron.types import Task


class LazyTasks(Sequence[Task]):
    """As many tasks as are asked for; counts those that were made. Every ``long_every``-th has a long prompt."""

    def __init__(self, size: int, long_every: int = 0) -> None:
        self.size, self.long_every, self.num_made = size, long_every, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Task:
        self.num_made += 1
        is_long = self.long_every and index % self.long_every == 0
        return Task(f"task-{index}", ({"role": "user", "content": "x" * (200 if is_long else 3)},), {})


@dataclass
class Tasks:
    train: LazyTasks

    def tasks(self, split: str) -> LazyTasks:
        assert split == "train"
        return self.train


def build_source(size: int, seed: int = 0, long_every: int = 0) -> PromptSource:
    return PromptSource(Tasks(LazyTasks(size, long_every)), build_renderer(), "train", seed, 100)


def task_ids(prompts) -> list[str]:
    return [prompt.task.task_id for prompt in prompts]


@given(st.integers(1, 300), st.integers(0, 5))
def test_the_shuffle_is_a_permutation(size, key):
    assert sorted(_shuffled(index, size, str(key)) for index in range(size)) == list(range(size))


def test_the_shuffle_moves_every_index_about_equally():
    places = Counter(_shuffled(3, 10, str(key)) for key in range(2000))
    assert set(places) == set(range(10)) and max(places.values()) < 270 and min(places.values()) > 140


def test_every_epoch_has_all_tasks_in_an_order_of_its_own():
    source = build_source(20)
    epochs = [task_ids(source.next(20)) for _ in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 20 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert task_ids(build_source(20, seed=1).next(20)) != epochs[0]
    assert task_ids(build_source(20).next(20)) == epochs[0]


def test_prompt_ids_stay_unique_where_a_small_set_wraps_round():
    prompts = build_source(3).next(10)
    assert len({prompt.prompt_id for prompt in prompts}) == 10
    assert len(set(task_ids(prompts))) == 3


def test_prompts_hold_the_rendered_messages():
    renderer = build_renderer()
    prompt = build_source(3).next(1)[0]
    assert prompt.token_ids == renderer.prompt_ids(prompt.task.messages)


def test_resume_goes_on_where_the_state_was_taken():
    source = build_source(7, seed=3, long_every=3)
    source.next(5)
    state = json.loads(json.dumps(source.state()))
    expected = source.next(9)
    resumed = build_source(7, seed=3, long_every=3)
    resumed.load_state(state)
    assert resumed.next(9) == expected
    assert resumed.num_dropped == source.num_dropped > 0


@pytest.mark.parametrize("other", [{"size": 8, "seed": 3}, {"size": 7, "seed": 4}])
def test_a_state_of_other_data_is_refused(other):
    state = build_source(7, seed=3).state()
    with pytest.raises(UserError, match="resume with the configuration"):
        build_source(**other).load_state(state)


def test_long_prompts_are_dropped_and_counted():
    source = build_source(10, long_every=5)
    prompts = source.next(16)  # two epochs
    assert Counter(task_ids(prompts)) == {f"task-{index}": 2 for index in range(10) if index % 5}
    assert 2 <= source.num_dropped <= 4


def test_a_set_without_short_prompts_or_without_tasks_is_refused():
    with pytest.raises(UserError, match="max_prompt_tokens"):
        build_source(5, long_every=1).next(1)
    with pytest.raises(UserError, match="empty data set"):
        build_source(0)


def test_a_long_sequence_is_not_read_through():
    tasks = LazyTasks(10**12)
    source = PromptSource(Tasks(tasks), build_renderer(), "train", 0, 100)
    assert len(set(task_ids(source.next(50)))) == 50
    assert tasks.num_made == 50
