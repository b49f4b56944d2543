"""The calculator: its expressions against Python's own arithmetic, its splits, its rewards and its forks."""

import ast
import asyncio
import operator

import pytest

from trace_megatron.config import EnvConfig
from trace_megatron.envs import build_environment
from trace_megatron.envs.calculator import Calculator
from trace_megatron.errors import UserError

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def evaluate(expression: str) -> int:
    def value(node):
        if isinstance(node, ast.Constant):
            return node.value
        return OPERATORS[type(node.op)](value(node.left), value(node.right))

    return value(ast.parse(expression, mode="eval").body)


def play(environment, task, actions):
    async def run():
        state = await environment.reset(task)
        transitions = []
        for action in actions:
            transitions.append(await environment.step(state, action))
            state = transitions[-1].state
        return transitions

    return asyncio.run(run())


def test_solutions_solve_the_expression():
    environment = Calculator(max_operations=6)
    for number in range(120):
        task = environment.tasks("train")[number]
        expression, operations = environment.draw("train", number)
        assert task.messages[0]["content"] == expression
        assert len(operations) == task.payload["num_operations"] == 1 + number % 6
        assert evaluate(expression) == task.payload["answer"] == operations[-1].value
        actions = [*map(str, operations), f"={operations[-1].value}"]
        *calls, last = play(environment, task, actions)
        assert [call.observation[0]["content"] for call in calls] == [str(operation.value) for operation in operations]
        assert (last.done, last.reward) == (True, 1.0)
        assert not any(call.done or call.reward for call in calls)


def test_splits_share_no_expression_and_repeat():
    environment = Calculator()
    train, held_out = (
        {environment.tasks(split)[number].messages[0]["content"] for number in range(400)}
        for split in ("train", "validation")
    )
    assert not train & held_out
    assert environment.tasks("train")[7] == Calculator().tasks("train")[7] != Calculator(seed=1).tasks("train")[7]


@pytest.mark.parametrize("action", ["=1", "=-7", " =2 "])
def test_wrong_answers_end_without_reward(action):
    environment = Calculator()
    task = next(task for task in environment.tasks("train") if task.payload["answer"] not in (1, -7, 2))
    (last,) = play(environment, task, [action])
    assert (last.done, last.reward) == (True, 0.0)


@pytest.mark.parametrize("action", ["", "hello", "1+", "=", "1+2+3", "__import__('os')", "9" * 30 + "+1"])
def test_what_is_no_call_is_answered_by_error(action):
    environment = Calculator()
    (answer,) = play(environment, environment.tasks("train")[0], [action])
    assert answer.observation[0] == {"role": "tool", "content": "error"} and not answer.done


def test_mistakes_end_in_one_sentence():
    with pytest.raises(UserError, match="min_operations <= max_operations"):
        build_environment(EnvConfig("calculator", {"min_operations": 3, "max_operations": 2}))
    with pytest.raises(UserError, match=r"wrong parameters in env.params for the environment 'calculator'"):
        build_environment(EnvConfig("calculator", {"operations": 2}))
    with pytest.raises(UserError, match="expected a split of train, validation, found 'test'"):
        Calculator().tasks("test")
