"""Tasks, splits, answers and states of the reasoning-gym environment."""

from __future__ import annotations

import asyncio
import json

import pytest
import reasoning_gym

from trace_megatron.config import EnvConfig
from trace_megatron.envs import build_environment
from trace_megatron.envs.reasoning_gym import GymState, ReasoningGym, extract_answer
from trace_megatron.errors import UserError

FOUR_TASKS = {
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
    "products": {"max_digits": 2},
    "letter_counting": {"min_words": 1, "max_words": 3},
    "calendar_arithmetic": {"offset_upper_bound": 20},
}


def questions(env: ReasoningGym, split: str, count: int) -> list[str]:
    tasks = env.tasks(split)
    return [tasks[index].messages[-1]["content"] for index in range(count)]


def step(env: ReasoningGym, state, action: str):
    return asyncio.run(env.step(state, action))


@pytest.mark.parametrize("tasks", [FOUR_TASKS, {"chain_sum": {"max_terms": 2, "max_digits": 1}}])
def test_train_and_validation_share_no_question(tasks):
    env = ReasoningGym(tasks, size=400, num_examples=1)
    train, validation = set(questions(env, "train", 400)), set(questions(env, "validation", 400))
    assert train and validation and not train & validation
    shown = {message["content"] for message in env.tasks("train")[0].messages[:-1]}
    assert not shown & validation


def test_tasks_are_stable_mixed_and_numbered():
    env, again = (ReasoningGym(FOUR_TASKS, size=100, seed=5) for _ in range(2))
    tasks = [env.tasks("train")[index] for index in range(100)]
    assert tasks == [again.tasks("train")[index] for index in range(100)]
    assert len({task.task_id for task in tasks}) == len(env.tasks("train")) == 100
    assert [task.task_id.split("-")[0] for task in tasks[:4]] == list(FOUR_TASKS)
    assert json.loads(json.dumps(tasks[0].payload)) == tasks[0].payload
    assert questions(ReasoningGym(FOUR_TASKS, size=100, seed=6), "train", 4) != questions(env, "train", 4)
    with pytest.raises(IndexError):
        env.tasks("train")[100]


def test_a_huge_size_costs_nothing():
    tasks = ReasoningGym(FOUR_TASKS, size=10**8).tasks("train")
    assert len(tasks) == 10**8 and tasks[10**8 - 1].task_id == "calendar_arithmetic-train-24999999"


def test_the_verifier_of_the_package_judges():
    env = ReasoningGym(FOUR_TASKS, size=200)
    dataset = {name: reasoning_gym.create_dataset(name, **params) for name, params in FOUR_TASKS.items()}
    for index in range(200):
        task = env.tasks("train")[index]
        state = asyncio.run(env.reset(task))
        right = state.entry["answer"]
        kind = task.task_id.split("-")[0]
        assert state.entry["question"] in task.messages[-1]["content"]
        for answer in (right, "7", "Sunday", "Yes", "nonsense"):
            transition = step(env, state, f"I think so.\nAnswer: {answer}")
            score = dataset[kind].score_answer(transition.info["answer"], state.entry)
            assert transition.info["score"] == score
            assert transition.reward == float(score == 1.0) == float(transition.done)
        assert step(env, state, f"Answer: {right}").done


def test_partial_credit_hands_on_the_score():
    env = ReasoningGym({"calendar_arithmetic": {"tasks": ["weekday_of_date"]}}, partial_credit=True)
    state = asyncio.run(env.reset(env.tasks("train")[0]))
    wrong = next(day for day in ("Monday", "Tuesday") if day != state.entry["answer"])
    assert step(env, state, f"Answer: {wrong}").reward == 0.1
    assert not step(env, state, f"Answer: {wrong}").done


def test_after_a_wrong_answer_the_policy_may_try_again():
    env = ReasoningGym({"products": {}})
    first = asyncio.run(env.reset(env.tasks("train")[3]))
    wrong = step(env, first, "Answer: -1")
    assert (wrong.reward, wrong.done) == (0.0, False)
    assert wrong.observation == ({"role": "user", "content": "-1 is wrong. Try again."},)
    silent = step(env, wrong.state, "No idea")
    assert "no answer" in silent.observation[0]["content"] and not silent.done
    right = step(env, silent.state, f"Answer: {first.entry['answer']}")
    assert (right.reward, right.done, right.observation) == (1.0, True, ())
    assert [state.num_answers for state in (first, wrong.state, silent.state, right.state)] == [0, 1, 2, 3]
    assert step(env, first, "Answer: -1") == wrong  # a state is a value: stepping from it again gives the same


@pytest.mark.parametrize(
    ("action", "right", "answer"),
    [
        ("Answer: 12", "7", "12"),
        ("3 + 4 = 7.", "7", "7"),
        ("First 3.\nThe result is 1,234.50 dollars.", "7", "1,234.50"),
        ("Answer: 5\nNo, wait.\nAnswer: -4 degrees\nso 9", "-4", "-4"),
        ("5-9", "-4", "9"),
        ("5 - 9 = -4", "-4", "-4"),
        ("**Answer: 8**", "7", "8"),
        ("Answer: x7", "7", None),
        ("Answer:", "7", None),
        ("", "7", None),
        ("Answer: Friday.", "Monday", "Friday"),
        ("It was a Friday", "Monday", "Friday"),
        ("Answer: 'a b c'.", "c b a", "a b c"),
        ("Answer: 1 2\n3 4\n", "4 3\n2 1", "1 2\n3 4"),
        ("1 2\n3 4", "4 3\n2 1", "1 2\n3 4"),
    ],
)
def test_answers_are_found(action, right, answer):
    assert extract_answer(action, right) == answer


def test_examples_are_earlier_turns_and_the_first_shows_a_second_try():
    env = ReasoningGym({"products": {"max_digits": 1}}, num_examples=2)
    messages = env.tasks("train")[0].messages
    assert [message["role"] for message in messages] == ["user", "assistant"] * 3 + ["user"]
    assert env.tasks("validation")[7].messages[:6] == messages[:6]
    first, wrong, feedback, right = (message["content"] for message in messages[:4])
    assert not {first, messages[4]["content"]} & set(questions(env, "train", 500))
    factors = [int(word.strip("*.")) for word in first.split() if word.strip("*.").isdigit()]
    assert right == f"Answer: {factors[0] * factors[1]}" != wrong
    state = asyncio.run(env.reset(env.tasks("train")[0]))
    shown = GymState(state.source, {**state.entry, "answer": right.removeprefix("Answer: ")}, 0)
    assert step(env, shown, wrong).observation == ({"role": "user", "content": feedback},)
    assert step(env, shown, right).done


def test_a_list_may_name_one_task_twice():
    env = ReasoningGym([{"name": "products", "max_digits": 1}, {"name": "products", "min_digits": 3}, "chain_sum"])
    tasks = env.tasks("train")
    assert [tasks[index].task_id for index in range(4)] == [
        "products.0-train-0",
        "products.1-train-0",
        "chain_sum-train-0",
        "products.0-train-1",
    ]
    state = asyncio.run(env.reset(tasks[1]))
    assert len(state.entry["answer"]) >= 5


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"tasks": {"chain_sums": {}}}, "did you mean 'chain_sum'"),
        ({"tasks": {"products": {"max_digit": 3}}}, "did you mean 'max_digits'"),
        ({"tasks": {"products": {"min_digits": 4, "max_digits": 1}}}, "wrong parameters .*'products'"),
        ({"tasks": {"products": 3}}, "as a mapping"),
        ({"tasks": [{"min_digits": 4}]}, "a name in every item"),
        ({"tasks": ["countdown"]}, "Python code"),
        ({"tasks": []}, "found none"),
        ({"tasks": ["products"], "sizes": 3}, "did you mean 'size'"),
        ({"tasks": ["products"], "size": 0}, "size > 0"),
    ],
)
def test_wrong_parameters_are_refused(params, message):
    with pytest.raises(UserError, match=message):
        build_environment(EnvConfig("reasoning_gym", params))


def test_a_split_without_questions_is_refused():
    # Three wordings of one question, all on the side of training.
    env = ReasoningGym({"calendar_arithmetic": {"tasks": ["is_leap_year"], "year": 2024, "leap_year_range": 0}})
    assert "2024" in questions(env, "train", 1)[0]
    with pytest.raises(UserError, match="enough different questions"):
        env.tasks("validation")[0]


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match="train, validation"):
        ReasoningGym({"products": {}}).tasks("test")
    with pytest.raises(UserError, match="did you mean 'reasoning_gym'"):
        build_environment(EnvConfig("reasoning-gym", {}))
