"""Multiple choice: what counts as choosing a letter, and the environment that rewards it."""

import asyncio
import json

import pytest

from trace_megatron.config import EnvConfig
from trace_megatron.envs import build_environment
from trace_megatron.envs.choice import choice_equal, extract_choice

CHOICES = ("iron", "neon", "a spirit", "10 m/s")


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (r"So \boxed{B}.", "B"),
        (r"\boxed{b}", "B"),
        (r"\boxed{\text{(B)}}", "B"),
        (r"$\boxed{\mathbf{B}}$", "B"),
        (r"\boxed{B) neon}", "B"),
        (r"\boxed{B. Neon}", "B"),
        (r"\boxed{\text{Option B}}", "B"),
        (r"first \boxed{A}, no: \boxed{C}", "C"),
        (r"\boxed{neon}", "B"),
        (r"\boxed{a spirit}", "C"),
        (r"\boxed{10 m/s}", "D"),
        ("The answer is (D).", "D"),
        ("the correct answer is: **B**", "B"),
        ("Answer: C", "C"),
        ("the answer is a gas", None),
        (r"\boxed{B, C}", None),
        (r"\boxed{B) iron}", None),
        (r"\boxed{E}", None),
        (r"\boxed{2}", None),
        ("The answer is E.", None),
        ("B", None),
        (r"\boxed{} The answer is B", None),
        ("", None),
    ],
)
def test_the_letter_that_a_text_chooses(text, letter):
    assert extract_choice(text, CHOICES) == letter
    assert choice_equal(text, "B", CHOICES) == (letter == "B")


def test_choices_that_are_letters_are_chosen_by_their_own_letter():
    assert extract_choice(r"\boxed{A}", ("C", "B", "A")) == "A"


def test_the_maths_environment_asks_and_judges_choices(bubblewrap, tmp_path):
    row = {"id": "q", "kind": "choice", "question": "Which is a gas?", "choices": ["iron", "neon"], "answers": ["B"]}
    (tmp_path / "eval.jsonl").write_text(json.dumps(row) + "\n")
    environment = build_environment(EnvConfig("python_tool", {"validation": str(tmp_path / "eval.jsonl")}))
    (task,) = environment.tasks("validation")
    assert "Which is a gas?\n\nA. iron\nB. neon\n\n" in task.messages[-1]["content"]

    async def rewards() -> list[tuple[float, bool]]:
        state = await environment.reset(task)
        transitions = [await environment.step(state, text) for text in (r"\boxed{B}", r"\boxed{A}", "no idea")]
        await environment.close()
        return [(transition.reward, transition.done) for transition in transitions]

    assert asyncio.run(rewards()) == [(1.0, True), (0.0, True), (0.0, True)]
