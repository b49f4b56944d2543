"""Tools, splits, verdicts, isolation and forks of the BFCL environment."""

from __future__ import annotations

import asyncio
import decimal
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout.scripted_engine import TOKENIZER, ScriptedEngine, build_renderer

from trace_megatron.config import EnvConfig, RolloutConfig
from trace_megatron.envs import build_environment
from trace_megatron.envs.bfcl import BFCL, BFCLState
from trace_megatron.envs.bfcl_data import CLASSES, SUBSETS, load_entries
from trace_megatron.envs.bfcl_replay import ground_truth_actions
from trace_megatron.errors import UserError
from trace_megatron.rollout.env import Transition
from trace_megatron.rollout.episode import EpisodeRunner
from trace_megatron.rollout.tool_calls import parse_tool_calls
from trace_megatron.types import Anchor, Prompt, RolloutStatus

ROOT = Path(__file__).parents[2]
ENTRIES = load_entries()
ENVIRONMENT = BFCL()
FILES = "multi_turn_base_1"  # GorillaFileSystem, three turns
MATH = next(entry.entry_id for entry in ENTRIES.values() if set(entry.classes) == {"GorillaFileSystem", "MathAPI"})


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def play(entry_id: str, actions: list[str], state: BFCLState | None = None) -> list[Transition]:
    """Every transition, up to the end."""

    async def steps() -> list[Transition]:
        here, transitions = state or BFCLState(entry_id), []
        for action in actions:
            transitions.append(await ENVIRONMENT.step(here, action))
            here = transitions[-1].state
            if transitions[-1].done:
                break
        return transitions

    return asyncio.run(steps())


def answers(transitions: list[Transition]) -> list[str]:
    return [message["content"] for transition in transitions for message in transition.observation]


def test_all_800_ground_truths_are_right_in_any_order_and_after_a_failure():
    tool = subprocess.run(
        [sys.executable, ROOT / "tools" / "check_bfcl.py", "--rounds", "1"], cwd=ROOT, capture_output=True, text=True
    )
    assert tool.returncode == 0, tool.stdout + tool.stderr
    assert "800/800 right, 0 wrong replays with reward, 0 with other observations, 0 instances left" in tool.stdout


def test_the_tools_are_json_schemas(trace_data):
    reference = json.loads((trace_data / "rollouts" / "bfcl_tools_openai.json").read_text())
    for class_name, tools in reference.items():
        entry = next(
            entry for entry in ENTRIES.values() if entry.classes == (class_name,) or class_name in entry.classes
        )
        names = {tool["function"]["name"] for tool in tools}
        assert [tool for tool in entry.tools if tool["function"]["name"] in names] == tools
    assert set(reference) == set(CLASSES)


def test_splits_share_no_scenario():
    train, validation = (ENVIRONMENT.tasks(split) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (640, 160)
    scenarios = [{ENTRIES[task.task_id].scenario for task in tasks} for tasks in (train, validation)]
    assert not scenarios[0] & scenarios[1]
    assert {ENTRIES[task.task_id].subset for task in validation} == set(SUBSETS)
    assert [task.task_id for task in BFCL(seed=1).tasks("train")] != [task.task_id for task in train]
    few = BFCL(subsets=["base"], classes=["MathAPI", "GorillaFileSystem"])
    chosen = [ENTRIES[task.task_id] for split in ("train", "validation") for task in few.tasks(split)]
    assert len(chosen) == 25 and {entry.subset for entry in chosen} == {"base"}


def test_a_worked_example_is_a_training_turn_with_tools_that_are_shown():
    plain = {task.task_id: task for split in ("train", "validation") for task in ENVIRONMENT.tasks(split)}
    environment = BFCL(worked_example=True)
    training_requests = {task.messages[0]["content"] for task in ENVIRONMENT.tasks("train")}
    without = 0
    for task in [*environment.tasks("train")[::7], *environment.tasks("validation")[::3]]:
        own = plain[task.task_id].messages
        example = task.messages[: len(task.messages) - len(own)]
        assert task.messages[len(example) :] == own
        without += not example
        if example:
            assert example[0]["content"] in training_requests - {own[0]["content"]}
            assert [message["role"] for message in example[1:-1]] == ["assistant", "tool"] * ((len(example) - 2) // 2)
            assert example[-1] == {"role": "assistant", "content": "Done."}
            names = {tool["function"]["name"] for tool in task.tools}
            assert all(parse_tool_calls(message["content"])[1][0].name in names for message in example[1:-1:2])
            assert not any("Error" in message["content"] for message in example if message["role"] == "tool")
    assert without < 5


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"subset": ["base"]}, "did you mean 'subsets'"),
        ({"subsets": ["missing_func"]}, "did you mean 'miss_func'"),
        ({"classes": ["TravelAPi"]}, "did you mean 'TravelAPI'"),
    ],
)
def test_mistakes_are_named(params, message):
    with pytest.raises(UserError, match=message):
        build_environment(EnvConfig("bfcl", params))


def test_withheld_tools_are_announced_in_their_turn():
    entry = ENTRIES["multi_turn_miss_func_0"]
    assert "sort" not in {tool["function"]["name"] for tool in entry.tools}
    base = {tool["function"]["name"] for tool in ENTRIES["multi_turn_base_0"].tools}
    assert base - {tool["function"]["name"] for tool in entry.tools} == {"sort"}
    said = [
        message["content"] for transition in play(entry.entry_id, ["Done."] * 3) for message in transition.observation
    ]
    assert said[:2] == [turn[0]["content"] for turn in entry.user_turns[1:3]]
    schema, _, sentence = said[2].rpartition("\n")
    assert json.loads(schema)["function"]["name"] == "sort"
    assert sentence == "I have updated some more functions you can choose from. What about now?"
    assert sum(len(entry.user_turns) == len(entry.ground_truth) for entry in ENTRIES.values()) == 800


@pytest.mark.parametrize("subset", SUBSETS)
def test_a_scripted_policy_earns_1_and_0(subset):
    entry_id = f"multi_turn_{subset}_0"
    actions = ground_truth_actions(ENTRIES[entry_id])
    right = play(entry_id, actions)
    assert (right[-1].reward, right[-1].done, right[-1].info["valid"]) == (1.0, True, True)
    assert all(transition.reward == 0.0 and not transition.done for transition in right[:-1])
    one_call_missing = play(entry_id, [action for action in actions if '"grep"' not in action])
    assert one_call_missing[-1].reward == 0.0 and one_call_missing[-1].info["error_type"]
    nothing = play(entry_id, ["I would rather not."] * len(ENTRIES[entry_id].user_turns))
    assert (nothing[-1].reward, nothing[-1].done) == (0.0, True)
    assert nothing[-1].info["error_type"] == "multi_turn:empty_turn_model_response"
    assert json.loads(json.dumps(right[-1].info)) == right[-1].info


@pytest.mark.parametrize("subset", SUBSETS)
def test_ground_truth_and_its_forks_are_right_as_episodes(subset):
    """Through the episode runner: token in, token out, from the root and from every visited prefix."""
    entry_id = f"multi_turn_{subset}_145"
    task = next(
        task for split in ("train", "validation") for task in ENVIRONMENT.tasks(split) if task.task_id == entry_id
    )
    actions, renderer = ground_truth_actions(ENTRIES[entry_id]), build_renderer()
    engine = ScriptedEngine(
        lambda request: actions[TOKENIZER.decode(request.token_ids).count("<|im_start|>assistant") - 1]
    )
    config = RolloutConfig(max_turns=40, max_new_tokens=2000, max_response_tokens=10**6, max_prompt_tokens=10**6)
    runner = EpisodeRunner(engine, ENVIRONMENT, renderer, config, 0)
    prompt = Prompt(entry_id, task, renderer.prompt_ids(task.messages, task.tools))

    async def episodes():
        original = await runner.play(prompt, step=0, k=0)
        forks = [
            await runner.play(prompt, step=0, k=0, anchor=Anchor(0, turn), start=visit)
            for turn, visit in reversed(list(enumerate(original.visits, start=1)))
        ]
        return original.rollout, [fork.rollout for fork in reversed(forks)]

    rollout, forks = asyncio.run(episodes())
    assert len(rollout.turns) == len(actions) and len(forks) == len(actions) - 1
    assert {(one.status, one.reward) for one in (rollout, *forks)} == {(RolloutStatus.FINISHED, 1.0)}
    for turn, fork in enumerate(forks, start=1):
        assert [t.observation_ids for t in fork.turns] == [t.observation_ids for t in rollout.turns[turn:]]


def test_more_than_20_steps_in_a_turn_end_the_conversation():
    entry = ENTRIES[FILES]
    steps = play(FILES, [call("pwd", {})] * 30)
    assert (len(steps), steps[-1].done, steps[-1].reward) == (21, True, 0.0)
    assert steps[-1].info["error_type"] == "multi_turn:force_terminated"
    # The official runner judges a conversation that runs out of steps in its last turn: nothing is missing there.
    actions = ground_truth_actions(entry)[:-1] + [call("pwd", {})] * 30
    assert play(FILES, actions)[-1].reward == 1.0


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("print", {"x": 1}),
        ("__import__('os').system", {"x": "true"}),
        ("_load_scenario", {"scenario": {}}),
        ("__class__", {}),
        ("ls", ["a"]),
        ("ls", "a"),
        ("ls", {"a or print(1)": True}),
        ("power", {"base": 9, "exponent": 10**9}),
        ("round_number", {"number": 5, "decimal_places": -(10**9)}),
        ("logarithm", {"value": 2, "base": 10, "precision": 10**9}),
        ("logarithm", {"value": 2, "base": 10, "precision": 1e9}),
        ("logarithm", {"value": 2, "base": 10, "precision": "1_000_000_000"}),
        ("square_root", {"number": 2, "precision": 10**9}),
        ("mean", {"numbers": [1, 10**400]}),
    ],
)
def test_what_must_not_run_is_an_error_observation(name, arguments):
    actions = [call(name, arguments), *ground_truth_actions(ENTRIES[MATH])]
    start_s = time.perf_counter()
    transitions = play(MATH, actions)
    assert answers(transitions[:1])[0].startswith("Error during execution: ")
    assert transitions[-1].reward == 1.0  # a useless call costs nothing in the official checker
    assert time.perf_counter() - start_s < 5


@pytest.mark.parametrize("arguments", ["{'numbers': {1, 2}}", "{'numbers': [1e999]}", "{'numbers': b'1'}"])
def test_python_values_without_json_are_refused(arguments):
    action = f"<tool_call>{{'name': 'mean', 'arguments': {arguments}}}</tool_call>"
    observation = play(MATH, [action])[0].observation
    assert observation[0]["content"].startswith("Error during execution: expected arguments as a JSON object")


def test_the_largest_allowed_numbers_are_cheap():
    largest = {
        "power": {"base": 2**63 - 1, "exponent": 1_000},
        "round_number": {"number": 2**62, "decimal_places": -1_000},
        "logarithm": {"value": 3, "base": 7, "precision": 1_000},
        "square_root": {"number": 2, "precision": 1_000},
    }
    start_s = time.perf_counter()
    play(MATH, [call(name, arguments) for name, arguments in largest.items()] * 5)
    assert time.perf_counter() - start_s < 2


def test_text_is_never_evaluated(tmp_path):
    target = tmp_path / "written"
    code = f"__import__('pathlib').Path({str(target)!r}).touch()"
    texts = [code, f"'); {code}; ('", f'"); {code}; ("', f"\\'+{code}+\\'", f"{{{code}}}", f"echo({code})"]
    actions = [call("echo", {"content": text, "file_name": name}) for text in texts for name in ("a.txt", text)]
    transitions = play(MATH, [*actions[:12], *ground_truth_actions(ENTRIES[MATH])])
    assert transitions[-1].done and transitions[-1].reward == 1.0
    assert not target.exists()


def test_a_directory_without_end_is_refused_and_undone():
    opening = [call("mkdir", {"dir_name": "d"}), call("cp", {"source": "d", "destination": "d"})]
    transitions = play(FILES, ["\n".join([*opening, call("pwd", {})]), call("find", {"path": "d"})])
    assert [answer.startswith("Error") for answer in answers(transitions)] == [False, True, False, False]
    assert json.loads(answers(transitions)[-1]) == {"matches": []}
    names = [f"e{number}" for number in range(19)]
    doubling = [
        "\n".join([call("cp", {"source": "d", "destination": name}), call("mv", {"source": name, "destination": "d"})])
        for name in names
    ]
    start_s = time.perf_counter()
    rest = play(FILES, [*doubling[:18], "Done.", call("find", {"path": "d"})], transitions[-1].state)
    assert sum("paths in the file system" in answer for answer in answers(rest)) >= 3
    assert len(json.loads(answers(rest)[-1])["matches"]) < 20_000
    assert play(FILES, ["Done."] * 9, rest[-1].state)[-1].done
    assert time.perf_counter() - start_s < 20


def test_the_process_keeps_its_own_precision():
    before = mpmath.mp.dps, decimal.getcontext().prec
    actions = [
        call("logarithm", {"value": 2, "base": 10, "precision": 77}),
        call("square_root", {"number": 2, "precision": 77}),
    ]
    transitions = play(MATH, actions)
    assert "mpf('0.30102" in answers(transitions)[0] and len(answers(transitions)[1]) > 77
    play(MATH, [*actions, *ground_truth_actions(ENTRIES[MATH])])
    assert (mpmath.mp.dps, decimal.getcontext().prec) == before


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_fork_at_every_prefix_sees_the_state_of_its_prefix(data):
    """Actions of the ground truth, some dropped, some twice; the rest is then replayed from each node, last first."""
    entry = data.draw(st.sampled_from(list(ENTRIES.values())))
    script = ground_truth_actions(entry)
    actions = [action for action in script for _ in range(data.draw(st.integers(0, 2)))]
    original = play(entry.entry_id, actions)
    states = [BFCLState(entry.entry_id), *(transition.state for transition in original)]
    for start in reversed(range(len(original))):
        play(entry.entry_id, ["Done.", *reversed(actions)], states[start])  # another path from the same node
        assert play(entry.entry_id, actions[start:], states[start]) == original[start:]


def test_a_state_holds_calls_and_nothing_alive():
    state = play(MATH, ground_truth_actions(ENTRIES[MATH])[:6])[-1].state
    assert hash(state) == hash(play(MATH, ground_truth_actions(ENTRIES[MATH])[:6])[-1].state)
    assert {type(value) for one in state.history for value in (one.name, one.arguments_json, one.refusal)} == {str}
