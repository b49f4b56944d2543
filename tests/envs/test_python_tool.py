"""Mathematics with an interpreter: tasks from files, code from actions, rewards, forks."""

from __future__ import annotations

import asyncio
import json

import pytest
from scripted_engine import TOKENIZER, ScriptedEngine, build_renderer

from trace_megatron.config import EnvConfig, RolloutConfig
from trace_megatron.envs import build_environment
from trace_megatron.envs.python_tool import PythonState, PythonTool
from trace_megatron.envs.rewards import extract_boxed
from trace_megatron.errors import UserError
from trace_megatron.rollout.collector import evaluate
from trace_megatron.types import Prompt, RolloutStatus

PROBLEMS = [{"problem": f"What is {n} squared?", "answer": str(n * n)} for n in range(2, 8)]


def call(code: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': code}})}\n</tool_call>"


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def env(bubblewrap, loop, tmp_path_factory):
    folder = tmp_path_factory.mktemp("problems")
    train, validation = write(folder / "train.jsonl", PROBLEMS), write(folder / "held_out.jsonl", PROBLEMS[:2])
    env = PythonTool(train, validation, timeout_s=1.0, output_characters=200, workers=2)
    yield env
    loop.run(env.close())


@pytest.fixture
def step(env, loop):
    return lambda state, action: loop.run(env.step(state, action))


NINE = PythonState(("9",))


def test_files_of_problems_load(trace_data, bubblewrap):
    files = sorted((trace_data / "math").glob("*.jsonl"))
    assert len(files) >= 9
    for path in files:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        tasks = PythonTool(str(path)).tasks("train")
        assert [task.task_id for task in tasks] == [row["id"] for row in rows]
        assert [task.messages[-1]["content"] for task in tasks] == [row["problem"].strip() for row in rows]
        assert all(task.payload["answers"] and json.dumps(task.payload) for task in tasks)


def test_a_problem_of_both_splits_is_kept_for_validation(env):
    train, validation = env.tasks("train"), env.tasks("validation")
    assert [task.task_id for task in validation] == ["held_out/1", "held_out/2"]
    assert [task.payload["answers"] for task in train] == [[str(n * n)] for n in range(4, 8)]
    assert train[0].messages[0]["role"] == "system" and train[0].tools[0]["function"]["name"] == "python"
    with pytest.raises(UserError, match="train, validation"):
        env.tasks("test")


@pytest.mark.parametrize("tool_call", [True, False])
def test_the_examples_are_what_the_environment_answers(tool_call, bubblewrap, loop, tmp_path):
    path = write(tmp_path / "train.jsonl", PROBLEMS)
    env = PythonTool(path, num_examples=3, tool_call=tool_call)
    try:
        task = env.tasks("train")[0]
        system, *shown, problem = task.messages
        assert ("```python" in system["content"]) == (not tool_call) == (not task.tools)
        assert problem["content"] == PROBLEMS[0]["problem"] and "\\boxed{}" in system["content"]
        assert len(shown) == 12
        for start in range(0, 12, 4):
            _, action, observation, answer = shown[start : start + 4]
            run = loop.run(env.step(PythonState((extract_boxed(answer["content"]),)), action["content"]))
            assert run.observation == (observation,)
            assert loop.run(env.step(run.state, answer["content"])).reward == 1.0
    finally:
        loop.run(env.close())


def test_code_runs_and_keeps_its_variables(step):
    first = step(NINE, "Let me see.\n" + call("x = 3\nprint(x)"))
    assert (first.reward, first.done) == (0.0, False)
    assert first.observation == ({"role": "tool", "name": "python", "content": "3"},)
    second = step(first.state, call("x * x") + call("y"))
    assert [message["content"].splitlines()[0] for message in second.observation] == [
        "9",
        "Error: Traceback (most recent call last):",
    ]
    assert second.info == {"num_cells": 3, "num_errors": 1, "num_unrepeated": 0}
    end = step(second.state, "So it is \\boxed{9}.")
    assert (end.reward, end.done, end.observation, end.info["answer"]) == (1.0, True, (), "9")


def test_fenced_code_runs_where_no_tool_is_called(step):
    fenced = step(NINE, "First:\n```python\nx = 3\n```\nthen\n```python\nprint(x + 1)\n```")
    assert fenced.observation == ({"role": "user", "content": "```output\n4\n```"},) and not fenced.done
    end = step(fenced.state, "```text\nprint(1)\n```\n\\boxed{9}")
    assert end.done and end.reward == 1.0


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ('<tool_call>{"name": "python", "arguments": {"code": "1"}</tool_call>', "expected a tool call as JSON"),
        ('<tool_call>{"name": "search", "arguments": {"query": "1"}}</tool_call>', "found 'search'"),
        ('<tool_call>{"name": "python", "arguments": {"text": "1"}}</tool_call>', 'arguments {"code"'),
        ('<tool_call>{"name": "python", "arguments": [1]}</tool_call>', 'arguments {"code"'),
        (call("while True: pass"), "longer than 1 s"),
        (call("import os; os._exit(1)"), "stopped the interpreter"),
        (call("print('x' * 10**6)\n1/0"), "[cut after 200 of 1000001 bytes]\nError: Traceback"),
    ],
)
def test_what_goes_wrong_is_an_observation(action, reason, step):
    transition = step(NINE, action)
    (message,) = transition.observation
    assert reason in message["content"] and len(message["content"]) < 600
    assert (transition.done, transition.reward, transition.info["num_errors"]) == (False, 0.0, 1)


def test_more_calls_than_one_action_may_hold_are_answered(step):
    answers = [message["content"] for message in step(NINE, call("1") * 10).observation]
    assert answers[:8] == ["1"] * 8 and all("at most 8 calls" in answer for answer in answers[8:])


@pytest.mark.parametrize(
    ("action", "answers", "reward", "answer"),
    [
        ("\\boxed{\\frac{18}{2}}", ("9",), 1.0, "\\frac{18}{2}"),
        ("\\boxed{8}", ("9",), 0.0, "8"),
        ("It is 9.", ("9",), 0.0, None),
        ("", ("9",), 0.0, None),
        ("<think>\\boxed{9}</think>I do not know.", ("9",), 0.0, None),
        ("<think>\\boxed{8}</think>\\boxed{9}", ("9",), 1.0, "9"),
        ("\\boxed{3e8}", ("3 \\times 10^{9}", "3e8"), 1.0, "3e8"),
        ("\\boxed{1}, \\boxed{2}", ("1, 2",), 1.0, "2"),
    ],
)
def test_the_last_box_is_judged(action, answers, reward, answer, step):
    end = step(PythonState(answers), action)
    assert (end.done, end.reward, end.info["answer"]) == (True, reward, answer)


def test_scripted_policies_reach_both_rewards_and_forks_replay(env, loop):
    """A policy that computes earns 1, one that guesses 0; stepping again from every visited state gives the same."""
    renderer = build_renderer()
    tasks = env.tasks("train")
    prompts = [Prompt(task.task_id, task, renderer.prompt_ids(task.messages, task.tools)) for task in tasks]
    config = RolloutConfig(max_turns=4, max_new_tokens=200, max_response_tokens=2000, max_prompt_tokens=2000)

    def compute(request) -> str:
        text = TOKENIZER.decode(list(request.token_ids))
        number = text.split("What is ")[1].split(" ")[0]
        turn = text.count("<|im_start|>assistant") - 1
        answer = text.split("<|im_start|>tool\n")[-1].split("<|im_end|>")[0]
        return [call(f"n = {number}"), call("print(n ** 2)"), f"\\boxed{{{answer}}}"][turn]

    async def play(action):
        return await evaluate(ScriptedEngine(action=action), env, renderer, config, prompts, 2, 0, 1)

    rollouts = [rollout for group in loop.run(play(compute)) for rollout in group]
    assert {(r.status, r.reward, len(r.turns)) for r in rollouts} == {(RolloutStatus.FINISHED, 1.0, 3)}
    guesses = [rollout for group in loop.run(play(lambda request: "\\boxed{0}")) for rollout in group]
    assert {rollout.reward for rollout in guesses} == {0.0}

    async def fork() -> None:
        actions = [renderer.action_text(turn.action_ids) for turn in rollouts[0].turns]
        states, transitions = [await env.reset(tasks[0])], []
        for action in actions:
            transitions.append(await env.step(states[-1], action))
            states.append(transitions[-1].state)
        for first in range(len(actions)):
            state = states[first]
            for action, expected in list(zip(actions, transitions, strict=True))[first:]:
                again = await env.step(state, action)
                assert again == expected
                state = again.state

    loop.run(fork())


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"train": "missing.jsonl"}, r"expected a JSON Lines file at env\.params\.train, found none at 'missing"),
        ({"train": "rows.jsonl"}, r"\(or problem and answer\) in line 2 of 'rows"),
        ({"train": "text.jsonl"}, "expected JSON in line 1 of 'text"),
        ({"train": "same.jsonl"}, "a different id in each row .* found 'a' twice"),
        ({"sandbox": "none"}, "bubblewrap or unsafe, found 'none'"),
        ({"timeout_s": 0}, "timeout_s above 0"),
        ({"num_examples": 4}, "from 0 to 3, found 4"),
        ({"tool_call": False, "fenced_code": False}, "nothing could run"),
        ({"time_out": 1}, "'python_tool'.*time_out"),
    ],
)
def test_bad_input_is_refused(params, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", [{"problem": "1+1", "answer": 2}, {"problem": "1+2"}])
    write(tmp_path / "same.jsonl", [{"id": "a", "problem": p, "answer": 2} for p in "xy"])
    (tmp_path / "text.jsonl").write_text("problem\n")
    with pytest.raises(UserError, match=message):
        build_environment(EnvConfig("python_tool", params))


def test_concurrency_follows_the_workers(bubblewrap):
    limited = build_environment(EnvConfig("python_tool", {"workers": 3}))
    assert limited.unlimited.max_concurrency == limited.max_concurrency == 3
    assert build_environment(EnvConfig("python_tool", {"workers": 3}, max_concurrency=5)).max_concurrency == 5
    asyncio.run(limited.close())
