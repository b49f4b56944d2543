"""The plain-text scaffold: what a base model reads, where its action ends, and what the environments are told."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from scripted_engine import TOKENIZER, Call

from trace_megatron.config import RolloutConfig
from trace_megatron.envs.python_tool import TOOL, PythonTool
from trace_megatron.rollout.engine import Completion, SamplingSettings
from trace_megatron.rollout.episode import EpisodeRunner
from trace_megatron.rollout.react import CHUNK_TOKENS, END_OF_ACTION, ReActEngine, ReActRenderer
from trace_megatron.rollout.tool_calls import parse_action
from trace_megatron.types import Prompt, RolloutStatus

EOS = TOKENIZER.eos_token_id


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.fixture
def renderer():
    return ReActRenderer(TOKENIZER)


class BaseModel:
    """Continues every history by ``script(history text)``, some tokens at a time; it never stops by itself."""

    def __init__(self, script) -> None:
        self._script = script
        self._begun: dict[int, str] = {}
        self.num_requests = 0

    async def generate(self, token_ids, settings: SamplingSettings, seed: int, affinity: str = "") -> Completion:
        self.num_requests += 1
        assert END_OF_ACTION not in token_ids and settings.stop_token_ids == (EOS,)
        text = TOKENIZER.decode(list(token_ids))
        at = text.rindex("Thought:") + len("Thought:")
        ids = encode(self._script(text[:at]))[len(encode(text[at:])) :][: settings.max_new_tokens]
        ids = ids[: ids.index(EOS) + 1] if EOS in ids else ids
        return Completion(tuple(ids), (-1.0,) * len(ids), ids[-1] == EOS, 0)


def test_examples_of_an_environment_become_text(renderer, bubblewrap, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"problem": "What is 2 + 2?", "answer": 4}))
    (task,) = PythonTool(validation=str(tmp_path / "rows.jsonl"), num_examples=1).tasks("validation")
    text = TOKENIZER.decode(list(renderer.prompt_ids(task.messages, task.tools)))
    assert text.startswith("Solve the problem") and "Tools:\npython: Run Python code" in text
    assert "Action: the tool to use, one of python\n" in text
    assert text.endswith(
        "Question: What is the sum of the first 20 odd numbers?\n"
        "Thought: The first 20 odd numbers are 1, 3, ..., 39. I let Python add them.\n"
        'Action: python\nAction Input: {"code": "print(sum(range(1, 40, 2)))"}\n'
        "Observation: 400\n"
        "Thought: I know the answer.\nFinal Answer: The answer is \\boxed{400}.\n\n"
        "Question: What is 2 + 2?\nThought:"
    )


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        (' so.\nAction: python\nAction Input: {"code": "print(1)"}', "python", {"code": "print(1)"}),
        ('\nAction: `python`\nAction Input: {"code": "a\nb"} and more', "python", {"code": "a\nb"}),
        ("\nAction: python\nAction Input: print(1)\nprint(2)", "python", {"code": "print(1)\nprint(2)"}),
        ("\nAction: python\nAction Input:\n```python\nprint(1)\n```", "python", {"code": "print(1)"}),
        ("\nAction: other\nAction Input: [1]", "other", [1]),
        ("\nAction: python\nAction Input: ", "python", {"code": ""}),
    ],
)
def test_an_action_becomes_a_tool_call(renderer, text, name, arguments):
    renderer.prompt_ids([{"role": "user", "content": "q"}], [TOOL])
    parsed = parse_action(renderer.action_text([*encode(text), END_OF_ACTION]))
    assert [(call.name, call.arguments) for call in parsed.calls] == [(name, arguments)]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" easy.\nFinal Answer: \\boxed{4}", "\\boxed{4}"),
        ("\nFinal Answer: 4\nAction: python\nAction Input: {}", "4\nAction: python\nAction Input: {}"),
        (" I do not know", "I do not know"),
        ("\nAction: python", "Action: python"),
    ],
)
def test_anything_else_is_the_answer(renderer, text, answer):
    assert renderer.action_text([*encode(text), END_OF_ACTION]) == answer


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        (
            ' x\nAction: python\nAction Input: {"code": "1"}\nObservation: 1\nThought',
            ' x\nAction: python\nAction Input: {"code": "1"}',
        ),
        (" x\nFinal Answer: 4\n\nQuestion: And 5?", " x\nFinal Answer: 4"),
        (" x\nFinal Answer:\n4 \nThought", " x\nFinal Answer:\n4 "),
        (" thought without end\nQuestion: next", " thought without end"),
        (" done" + TOKENIZER.eos_token + "junk", " done"),
    ],
)
def test_a_completion_ends_where_the_scaffold_goes_on(renderer, written, kept):
    engine = ReActEngine(BaseModel(lambda text: written), renderer)
    settings = SamplingSettings(1.0, 1.0, 500, renderer.stop_token_ids)
    completion = asyncio.run(engine.generate(encode("Question: q\nThought:"), settings, 5))
    assert completion.stopped and completion.token_ids == (*encode(kept), END_OF_ACTION)
    assert len(completion.logprobs) == len(completion.token_ids)


def test_tokens_longer_than_the_action_are_cut_inside():
    class Words:
        """Ids are whole strings."""

        eos_token_id = None
        vocabulary = (" x", "\nFinal Answer:", " 4\n\nQ", "uestion", " 4")

        def decode(self, ids, **_):
            return "".join(self.vocabulary[index] for index in ids)

        def encode(self, text, **_):
            return [self.vocabulary.index(text)] if text else []

    renderer = ReActRenderer(Words())
    assert renderer.cut([0, 1]) is None
    assert renderer.cut([0, 1, 2]) == (0, 1, 4)


def test_a_text_that_never_ends_is_cut_by_the_limit_with_different_seeds(renderer):
    calls: list[Call] = []

    class Endless:
        async def generate(self, token_ids, settings, seed, affinity=""):
            calls.append(Call(tuple(token_ids), settings, seed))
            rng = random.Random(seed)
            ids = tuple(rng.choices(encode("abc"), k=settings.max_new_tokens))
            return Completion(ids, (-1.0,) * len(ids), False, 0)

    engine = ReActEngine(Endless(), renderer)
    settings = SamplingSettings(1.0, 1.0, 100, renderer.stop_token_ids)
    completion = asyncio.run(engine.generate([1, END_OF_ACTION, 2], settings, 5))
    assert not completion.stopped and len(completion.token_ids) == 99
    assert [len(call.token_ids) for call in calls] == [2, 2 + CHUNK_TOKENS, 2 + 2 * CHUNK_TOKENS, 98]
    assert len({call.seed for call in calls}) == 4
    again = asyncio.run(engine.generate([1, END_OF_ACTION, 2], settings, 5))
    assert again == completion


def test_a_base_model_that_uses_the_tool_is_right(renderer, bubblewrap, tmp_path):
    rows = [{"problem": f"What is {n} * {n}?", "answer": n * n} for n in (12, 17)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def script(text: str) -> str:
        question = text.rpartition("Question: What is ")[2]
        if "Observation: " not in question:
            code = json.dumps({"code": f"print({question.split('?')[0]})"})
            return f" I compute.\nAction: python\nAction Input: {code}\nObservation: 1\nThought: invented"
        seen = question.rpartition("Observation: ")[2].split("\n")[0]
        return f" That is it.\nFinal Answer: \\boxed{{{seen}}}\n\nQuestion: invented"

    async def play():
        environment = PythonTool(validation=str(tmp_path / "rows.jsonl"), num_examples=2)
        config = RolloutConfig(max_turns=3, max_new_tokens=200, max_response_tokens=2000, max_prompt_tokens=4000)
        runner = EpisodeRunner(ReActEngine(BaseModel(script), renderer), environment, renderer, config, 0)
        tasks = environment.tasks("validation")
        prompts = [Prompt(task.task_id, task, renderer.prompt_ids(task.messages, task.tools)) for task in tasks]
        rollouts = [(await runner.play(prompt, step=0, k=0)).rollout for prompt in prompts]
        await environment.close()
        return rollouts

    rollouts = asyncio.run(play())
    assert [(r.status, r.reward, len(r.turns)) for r in rollouts] == [(RolloutStatus.FINISHED, 1.0, 2)] * 2
    texts = [renderer.text(rollouts[0].turns[0].action_ids), renderer.text(rollouts[0].turns[0].observation_ids)]
    assert "".join(texts).endswith("\nObservation: 144\nThought:") and "invented" not in "".join(texts)
