"""Names, limits and environments of other packages."""

from __future__ import annotations

import asyncio
import sys
import tomllib
from pathlib import Path

import pytest

from trace_megatron.config import EnvConfig, RolloutConfig
from trace_megatron.envs import build_environment
from trace_megatron.envs.limits import LimitedEnvironment
from trace_megatron.errors import UserError
from trace_megatron.rollout.collector import evaluate
from trace_megatron.rollout.env import Transition
from trace_megatron.types import Prompt, RolloutStatus, Task

EXAMPLE = Path(__file__).parents[2] / "examples" / "guess_number"


@pytest.fixture
def installed_example(tmp_path, monkeypatch):
    """The example as pip leaves it: its module, and its entry points beside it."""
    points = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"]["trace_megatron.envs"]
    metadata = tmp_path / "guess_number-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: guess-number\nVersion: 0.1\n")
    lines = "".join(f"{name} = {target}\n" for name, target in points.items())
    (metadata / "entry_points.txt").write_text(f"[trace_megatron.envs]\n{lines}")
    (tmp_path / "guess_number.py").write_text((EXAMPLE / "guess_number.py").read_text())
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("guess_number", None)


def test_the_example_is_found_by_its_entry_point_and_played(installed_example):
    from scripted_engine import TOKENIZER, ScriptedEngine, build_renderer

    env = build_environment(EnvConfig("guess_number", {"highest": 8}))
    train, validation = ({task.task_id for task in env.tasks(split)} for split in ("train", "validation"))
    assert validation == {"guess-4", "guess-8"} and len(train) == 6

    def halving(call) -> str:
        low, high = 1, 8
        text = TOKENIZER.decode(list(call.token_ids))
        for hint in [line for line in text.splitlines() if line.startswith(("Larger", "Smaller"))]:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if hint.startswith("Larger") else (low, middle - 1)
        return str((low + high) // 2)

    renderer = build_renderer()
    prompts = [Prompt(task.task_id, task, renderer.prompt_ids(task.messages)) for task in env.tasks("train")]
    config = RolloutConfig(max_turns=4, max_new_tokens=8, max_response_tokens=500, max_prompt_tokens=200)
    rollouts = asyncio.run(evaluate(ScriptedEngine(action=halving), env, renderer, config, prompts, 1, 0, 1))
    assert {rollout.reward for group in rollouts for rollout in group} == {1.0}
    assert len(EXAMPLE.joinpath("guess_number.py").read_text().splitlines()) <= 42


def test_wrong_names_parameters_and_limits_are_refused(installed_example):
    with pytest.raises(UserError, match=r"did you mean 'guess_number'\? Known: .*guess_number.*reasoning_gym"):
        build_environment(EnvConfig("guess"))
    with pytest.raises(UserError, match=r"'guess_number'.*lowest"):
        build_environment(EnvConfig("guess_number", {"lowest": 2}))
    with pytest.raises(UserError, match="timeout_s above 0"):
        build_environment(EnvConfig("guess_number", timeout_s=0))
    with pytest.raises(UserError, match="at least 0"):
        build_environment(EnvConfig("guess_number", max_concurrency=-1))


class Slow:
    """Counts the calls that run at once; an action says how long it takes."""

    max_concurrency = 2

    def __init__(self) -> None:
        self.running = self.most = 0

    def tasks(self, split: str) -> list[Task]:
        return []

    async def reset(self, task: Task) -> None:
        return None

    async def step(self, state: None, action: str) -> Transition:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(float(action))
            if action == "0":
                raise TimeoutError("the server's own")
        finally:
            self.running -= 1
        return Transition(None, (), 0.0, True)

    async def close(self) -> None:
        pass


def test_calls_that_wait_for_their_turn_are_not_on_the_clock():
    async def play() -> list:
        limited = LimitedEnvironment(env, max_concurrency=2, timeout_s=0.2)
        return await asyncio.gather(*(limited.step(None, "0.08") for _ in range(12)))

    env = Slow()
    assert len(asyncio.run(play())) == 12  # 0.5 s in all
    assert (env.most, env.running) == (2, 0)


def test_a_slow_call_is_cancelled_and_named():
    env = Slow()
    limited = LimitedEnvironment(env, max_concurrency=0, timeout_s=0.05)
    with pytest.raises(TimeoutError, match=r"env.timeout_s=0.05 s"):
        asyncio.run(limited.step(None, "60"))
    assert env.running == 0
    with pytest.raises(TimeoutError, match="the server's own"):
        asyncio.run(limited.step(None, "0"))


def test_a_time_limit_fails_the_rollout_alone():
    from scripted_engine import ScriptedEngine, WordGame, build_prompts, build_renderer

    async def hang(said):
        if said[-1] == "a":
            await asyncio.sleep(60)

    renderer = build_renderer()
    prompts = build_prompts(renderer, WordGame())[:2]
    config = RolloutConfig(max_turns=2, max_new_tokens=8, max_response_tokens=500, max_prompt_tokens=200)
    engine = ScriptedEngine(action=lambda call: "a" if prompts[0].token_ids == call.token_ids else "win")
    limited = LimitedEnvironment(WordGame(before=hang), 0, 0.05)
    failed, won = (group[0] for group in asyncio.run(evaluate(engine, limited, renderer, config, prompts, 1, 0, 1)))
    assert (failed.status, failed.trained) == (RolloutStatus.ENV_ERROR, False) and "0.05 s" in failed.info["error"]
    assert (won.status, won.reward) == (RolloutStatus.FINISHED, 1.0)
