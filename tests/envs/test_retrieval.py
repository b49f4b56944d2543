"""Questions, searches, answers and failures of the retrieval environment."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from retrieval.small_corpus import write_corpus
from rollout.scripted_engine import ScriptedEngine, build_renderer

from trace_megatron.config import EnvConfig, RolloutConfig
from trace_megatron.envs import build_environment
from trace_megatron.envs.retrieval import Retrieval, RetrievalState, extract_answer
from trace_megatron.errors import UserError
from trace_megatron.event_loop import EventLoop
from trace_megatron.retrieval.client import RetrievalError
from trace_megatron.retrieval.index import Index, build_index
from trace_megatron.rollout.env import Transition
from trace_megatron.rollout.episode import EpisodeRunner
from trace_megatron.rollout.tool_calls import parse_tool_calls
from trace_megatron.types import Prompt, RolloutStatus

QUESTIONS = [
    {"id": "q0", "question": "Who counted the steps to the violin of Oslo?", "answers": ["a visitor", "the visitor"]},
    {
        "id": "q1",
        "question": "Where is the castle that was described in a letter?",
        "answers": ["near the city of Lima"],
    },
]


def call(query: object, name: str = "search") -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'query': query}})}\n</tool_call>"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("retrieval")
    build_index([write_corpus(folder / "corpus.jsonl")], folder / "index", "bm25")
    (folder / "train.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (folder / "held_out.jsonl").write_text(json.dumps({**QUESTIONS[1], "id": "v"}) + "\n")
    return folder


@pytest.fixture(scope="module")
def play(files):
    """Plays actions in one environment with one server; ``state``: where to start, else the beginning."""
    with EventLoop() as loop:
        environment = Retrieval(
            train=[str(files / "train.jsonl")], index=str(files / "index"), num_passages=2, max_passage_chars=40
        )

        async def steps(actions: list[str], state: RetrievalState | None, task: int) -> list[Transition]:
            here, transitions = state or await environment.reset(environment.tasks("train")[task]), []
            for action in actions:
                transitions.append(await environment.step(here, action))
                here = transitions[-1].state
                if transitions[-1].done:
                    break
            return transitions

        yield lambda actions, state=None, task=0: loop.run(steps(actions, state, task))
        loop.run(environment.close())


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("<answer>The visitor!</answer>", 1.0),
        ("It says so.\nAnswer: a visitor", 1.0),
        ("It was\n**A Visitor**", 1.0),
        ("<answer>an old visitor from Oslo</answer>", 0.4),  # precision 1/4, recall 1
        ("<answer>it was some very old visitor of a far country</answer>", 0.0),  # F1 2/9 is below 0.3
        ("<answer>nobody</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_a_scripted_policy_earns_what_its_answer_is_worth(play, answer, reward):
    transitions = play([call("violin of Oslo"), answer])
    assert [transition.done for transition in transitions] == [False, True]
    assert transitions[0].reward == 0.0 and transitions[1].reward == pytest.approx(reward)
    assert transitions[1].info["searches"] == 1


def test_searches_are_answered_in_their_order_with_passages_cut_at_a_word(play, files):
    text = "I must look twice.\n" + call("violin of Oslo") + "\n" + call("xylophone")
    first, second = play([text])[0].observation
    hits = Index(files / "index").search(["violin of Oslo"], 2)[0]
    assert first["role"] == "tool" and first["name"] == "search"
    assert first["content"] == (
        "[1] The violin of Oslo\nThis violin stands near Oslo. It was ...\n\n"
        f"[2] {hits[1].passage.title}\n{hits[1].passage.text[:40].rpartition(' ')[0]} ..."
    )
    assert second["content"] == "No passage was found."


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (call("violin", name="browse"), "expected the tool search, found browse"),
        (call(7), 'expected the arguments {"query": "<text>"}'),
        (call("  "), "expected the arguments"),
        ('<tool_call>{"name": "search", "arguments": {"query": }}</tool_call>', "expected a tool call as JSON"),
    ],
)
def test_a_wrong_call_is_an_error_observation(play, action, message):
    transition = play([action])[0]
    assert not transition.done and message in transition.observation[0]["content"]
    assert transition.observation[0]["content"].startswith("Error: ")


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([call("violin of Oslo"), call("Lima"), call(3), call("a") + call("castle"), "Oslo"])))
def test_a_fork_at_every_prefix_sees_the_same(play, actions):
    original = play(actions)
    states = [RetrievalState(("a visitor", "the visitor")), *(transition.state for transition in original)]
    for start in reversed(range(len(original))):
        play([call("Kyoto"), "Kyoto"], states[start])  # another path from the same node
        assert play(actions[start:], states[start]) == original[start:]


def test_tasks_show_the_tool_and_keep_held_out_questions_out_of_training(files):
    environment = Retrieval(
        train=str(files / "train.jsonl"), validation=str(files / "held_out.jsonl"), url="http://unused"
    )
    (task,) = environment.tasks("train")
    assert task.task_id == "q0" and [tool["function"]["name"] for tool in task.tools] == ["search"]
    assert (
        task.messages[-1]["content"] == QUESTIONS[0]["question"] and task.payload["answers"] == QUESTIONS[0]["answers"]
    )
    assert [task.task_id for task in environment.tasks("validation")] == ["v"]
    shown = Retrieval(train=str(files / "train.jsonl"), url="http://unused", num_examples=1).tasks("train")[0]
    assert (shown.messages[0], shown.messages[-1]) == (task.messages[0], task.messages[-1])
    searches = [parse_tool_calls(message["content"])[1] for message in shown.messages[2:-2:2]]
    assert [call.name for calls in searches for call in calls] == ["search"] * 2
    assert extract_answer(shown.messages[-2]["content"]) == "Black Sea"
    assert json.loads(json.dumps(task.payload)) == task.payload


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"url": "http://unused", "indx": "x"}, "did you mean 'index'"),
        ({}, "either env.params.index or env.params.url, found none"),
        ({"url": "http://unused", "index": "x"}, "found both"),
        ({"index": "nowhere"}, "expected an index folder"),
        ({"url": "http://unused", "train": "nowhere.jsonl"}, "found none at 'nowhere.jsonl'"),
        ({"url": "http://unused", "num_passages": 0}, "expected positive"),
        ({"url": "http://unused", "num_examples": 4}, "from 0 to 3, found 4"),
    ],
)
def test_mistakes_are_named(params, message):
    with pytest.raises(UserError, match=message):
        build_environment(EnvConfig("retrieval", params))


def test_a_wrong_line_is_named(tmp_path):
    (tmp_path / "q.jsonl").write_text('{"question": "q", "answers": "text"}\n{"question": "q", "answers": []}\n')
    with pytest.raises(UserError, match=r"line 1 of .*q\.jsonl"):
        Retrieval(train=str(tmp_path / "q.jsonl"), url="http://unused")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> Oslo </answer> or <ANSWER>Lima</ANSWER>", "Lima"),
        ("<answer>Oslo", "Oslo"),
        ("Answer: Oslo\nbecause", "Oslo"),
        ("thus\n\n**Oslo**\n", "Oslo"),
        ("\n", ""),
    ],
)
def test_extract_answer(text, answer):
    assert extract_answer(text) == answer


def test_a_server_that_dies_or_is_missing_fails_its_rollouts_alone(files):
    """Through the episode runner: a status with the reason, not an exception."""
    renderer = build_renderer()
    config = RolloutConfig(max_turns=3, max_new_tokens=200, max_response_tokens=2000, max_prompt_tokens=2000)

    async def run(environment: Retrieval, kill: bool):
        async def before(number, request):
            if kill and number == 1:
                os.kill(environment._connection._server._process.pid, signal.SIGKILL)

        engine = ScriptedEngine(action=lambda request: call("violin"), before=before)
        runner = EpisodeRunner(engine, environment, renderer, config, 0)
        task = Retrieval(train=str(files / "train.jsonl"), url="http://unused").tasks("train")[0]
        prompt = Prompt("q", task, renderer.prompt_ids(task.messages, task.tools))
        try:
            return [(await runner.play(prompt, step=0, k=k)).rollout for k in range(2)]
        finally:
            await environment.close()

    died = asyncio.run(run(Retrieval(index=str(files / "index"), num_passages=1), kill=True))
    assert [(r.status, len(r.turns), r.trained) for r in died] == [
        (RolloutStatus.ENV_ERROR, 2, False),
        (RolloutStatus.ENV_ERROR, 1, False),
    ]
    assert all("the retrieval server ended with exit code -9" in rollout.info["error"] for rollout in died)
    missing = asyncio.run(run(Retrieval(url="http://127.0.0.1:9"), kill=False))
    assert [rollout.status for rollout in missing] == [RolloutStatus.ENV_ERROR] * 2
    assert "expected an answer from the retrieval server at http://127.0.0.1:9" in missing[0].info["error"]


def test_rollouts_that_give_up_waiting_leave_the_server_starting(files):
    async def run():
        environment = Retrieval(train=str(files / "train.jsonl"), index=str(files / "index"), num_passages=1)
        task = environment.tasks("train")[0]
        try:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(environment.reset(task), 0.05)
            first = environment._connection._server._process.pid
            transition = await environment.step(await environment.reset(task), call("violin of Oslo"))
            return transition, first == environment._connection._server._process.pid
        finally:
            await environment.close()

    transition, same = asyncio.run(run())
    assert same and "[1] The violin of Oslo" in transition.observation[0]["content"]


def test_a_server_that_cannot_start_is_tried_once(files, tmp_path):
    build_index([files / "corpus.jsonl"], tmp_path / "index", "bm25")
    environment = Retrieval(train=str(files / "train.jsonl"), index=str(tmp_path / "index"))
    (tmp_path / "index" / "passages.jsonl").unlink()

    async def run():
        try:
            return await asyncio.gather(
                *(environment.reset(environment.tasks("train")[0]) for _ in range(20)), return_exceptions=True
            )
        finally:
            await environment.close()

    errors = asyncio.run(run())
    assert {type(error) for error in errors} == {RetrievalError} and "FileNotFoundError" in str(errors[0])
