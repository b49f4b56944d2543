"""Endings, limits, seeds and forks of one episode."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest
from scripted_engine import TOKENIZER, WIN, ScriptedEngine, WordGame, build_prompts, build_renderer, dead

from trace_megatron.config import RolloutConfig
from trace_megatron.errors import UserError
from trace_megatron.rollout.engine import Completion, EngineError
from trace_megatron.rollout.episode import Episode, EpisodeRunner
from trace_megatron.rollout.seeds import request_seed
from trace_megatron.types import ROOT, Anchor, Prompt, RolloutStatus

CONFIG = RolloutConfig(max_turns=4, max_new_tokens=8, max_response_tokens=1000, max_prompt_tokens=100)
RENDERER = build_renderer()
PROMPT = build_prompts(RENDERER, WordGame())[0]


def spoken(*words: str):
    """Engine script: one word per turn, by the number of answers already in the history."""
    return lambda call: words[len(TOKENIZER.decode(list(call.token_ids)).split("wrong")) - 1]


def play(engine, game=None, config=CONFIG, *, max_model_len=0, prompt=PROMPT, **where) -> Episode:
    runner = EpisodeRunner(engine, game or WordGame(), RENDERER, config, 11, max_model_len)
    return asyncio.run(runner.play(prompt, **({"step": 3, "k": 2} | where)))


def test_the_history_grows_by_ids_until_the_environment_ends_it():
    engine = ScriptedEngine(action=spoken("ab", "cd", WIN))
    episode = play(engine)
    rollout = episode.rollout
    assert (rollout.status, rollout.reward, rollout.trained, rollout.anchor) == (
        RolloutStatus.FINISHED,
        1.0,
        True,
        ROOT,
    )
    assert [RENDERER.action_text(turn.action_ids) for turn in rollout.turns] == ["ab", "cd", WIN]
    assert rollout.turns[-1].observation_ids == () and rollout.info == {"words": 3}
    assert {turn.weight_version for turn in rollout.turns} == {7}
    history = PROMPT.token_ids
    for index, (turn, call) in enumerate(zip(rollout.turns, engine.calls, strict=True)):
        assert call.token_ids == history
        assert call.seed == request_seed(11, 3, PROMPT.prompt_id, ROOT, 2, index)
        assert len(turn.action_logprobs) == len(turn.action_ids) and turn.action_ids[-1] in RENDERER.stop_token_ids
        history += turn.action_ids + turn.observation_ids
    conversation = [
        *PROMPT.task.messages,
        {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "1: ab is wrong"},
        {"role": "assistant", "content": "cd"},
        {"role": "user", "content": "2: ab cd is wrong"},
    ]
    assert episode.visits[-1].token_ids == RENDERER.prompt_ids(conversation)
    assert [visit.env_state for visit in episode.visits] == [("ab",), ("ab", "cd")]


def test_the_last_allowed_turn_keeps_its_reward():
    rollout = play(ScriptedEngine(action=lambda call: "no")).rollout
    assert (rollout.status, len(rollout.turns), rollout.reward, rollout.trained) == (
        RolloutStatus.TURN_LIMIT,
        4,
        0.04,
        True,
    )
    assert rollout.turns[-1].observation_ids == ()


@pytest.mark.parametrize(
    ("truncated", "trained", "reward"), [("failure", True, 0.0), ("mask", False, 0.0), ("keep", True, 0.02)]
)
def test_a_turn_cut_by_its_limit(truncated, trained, reward):
    engine = ScriptedEngine(action=spoken("ab", "much too long"))
    rollout = play(engine, config=replace(CONFIG, truncated=truncated)).rollout
    assert (rollout.status, rollout.trained, rollout.reward) == (RolloutStatus.TRUNCATED, trained, reward)
    assert RENDERER.action_text(rollout.turns[-1].action_ids) == "much too"
    assert len(rollout.turns) == 2 and rollout.turns[-1].observation_ids == ()


def test_the_response_limit_shortens_the_last_turn():
    full = play(ScriptedEngine(action=spoken("ab", "cd", WIN)))
    used = len(full.visits[-1].token_ids) - len(PROMPT.token_ids)
    engine = ScriptedEngine(action=spoken("ab", "cd", WIN))
    rollout = play(engine, config=replace(CONFIG, max_response_tokens=used + 2)).rollout
    assert [call.settings.max_new_tokens for call in engine.calls] == [8, 8, 2]
    assert (rollout.status, len(rollout.turns)) == (RolloutStatus.TRUNCATED, 3)


@pytest.mark.parametrize("limit", ["response", "model"])
@pytest.mark.parametrize(("truncated", "reward"), [("failure", 0.0), ("keep", 0.01)])
def test_an_observation_without_room_for_an_action_is_dropped(limit, truncated, reward):
    full = play(ScriptedEngine(action=spoken("ab", WIN)))
    length = len(full.visits[0].token_ids)
    config = replace(CONFIG, truncated=truncated, max_prompt_tokens=len(PROMPT.token_ids))
    if limit == "response":
        config, model = replace(config, max_response_tokens=length - len(PROMPT.token_ids)), 0
    else:
        model = length
    episode = play(ScriptedEngine(action=spoken("ab", WIN)), config=config, max_model_len=model)
    rollout = episode.rollout
    assert (rollout.status, rollout.reward, episode.visits) == (RolloutStatus.TRUNCATED, reward, ())
    assert len(rollout.turns) == 1 and rollout.turns[0].observation_ids == ()


def test_a_model_without_room_beyond_the_prompts_is_refused():
    with pytest.raises(UserError, match="max_model_len above"):
        play(ScriptedEngine(), max_model_len=CONFIG.max_prompt_tokens)


def test_an_engine_error_is_a_status():
    async def fail_second(number, call):
        if number == 1:
            await dead(number, call)

    rollout = play(ScriptedEngine(action=lambda call: "no", before=fail_second)).rollout
    assert (rollout.status, rollout.reward, rollout.trained) == (RolloutStatus.ENGINE_ERROR, 0.0, False)
    assert len(rollout.turns) == 1 and rollout.info == {"error": "the engine process has ended"}


@pytest.mark.parametrize(("ids", "logprobs"), [((), ()), ((65, 258), (-0.1,))])
def test_a_malformed_completion_is_an_engine_error(ids, logprobs):
    class Broken:
        async def generate(self, token_ids, settings, seed, affinity=""):
            return Completion(ids, logprobs, True, 0)

    assert play(Broken()).rollout.status == RolloutStatus.ENGINE_ERROR


def test_errors_of_the_environment_are_statuses():
    async def raise_at_two(said):
        if len(said) == 2:
            raise KeyError("server")

    no = ScriptedEngine(action=lambda call: "no")
    broken = play(no, WordGame(before=raise_at_two)).rollout
    assert (broken.status, broken.trained, len(broken.turns)) == (RolloutStatus.ENV_ERROR, False, 2)
    assert broken.info == {"error": "KeyError: 'server'"}


def test_a_failed_reset_gives_a_rollout_without_turns():
    class Closed(WordGame):
        async def reset(self, task):
            raise ConnectionError("no server")

    rollout = play(ScriptedEngine(), Closed()).rollout
    assert (rollout.status, rollout.turns, rollout.trained) == (RolloutStatus.ENV_ERROR, (), False)


@pytest.mark.parametrize("reward", [math.nan, -0.1, 1.5])
def test_rewards_outside_the_unit_interval_are_errors(reward):
    class Generous(WordGame):
        async def step(self, state, action):
            return replace(await super().step(state, action), reward=reward)

    assert play(ScriptedEngine(), Generous()).rollout.status == RolloutStatus.ENV_ERROR


def test_errors_of_the_program_are_not_swallowed():
    class Bug:
        async def generate(self, token_ids, settings, seed, affinity=""):
            raise AttributeError("a bug")

    with pytest.raises(AttributeError, match="a bug"):
        play(Bug())


def test_a_fork_at_every_prefix_replays_the_rest():
    words = spoken("ab", "cd", "ef", WIN)
    original = play(ScriptedEngine(action=words))
    for turn, visit in enumerate(original.visits, start=1):
        engine = ScriptedEngine(action=words)
        fork = play(engine, anchor=Anchor(0, turn), start=visit, k=0)
        assert [t.observation_ids for t in fork.rollout.turns] == [
            t.observation_ids for t in original.rollout.turns[turn:]
        ]
        assert [t.action_ids for t in fork.rollout.turns] == [t.action_ids for t in original.rollout.turns[turn:]]
        assert fork.visits == original.visits[turn:]
        assert (fork.rollout.anchor, fork.rollout.reward) == (Anchor(0, turn), 1.0)
        assert engine.calls[0].token_ids == visit.token_ids
        assert engine.calls[0].seed == request_seed(11, 3, PROMPT.prompt_id, Anchor(0, turn), 0, turn)


def test_a_fork_counts_the_turns_and_tokens_it_inherits():
    no = ScriptedEngine(action=lambda call: "no")
    original = play(no)
    fork = play(no, anchor=Anchor(0, 3), start=original.visits[2]).rollout
    assert (fork.status, len(fork.turns), fork.reward) == (RolloutStatus.TURN_LIMIT, 1, 0.04)
    room = len(original.visits[2].token_ids) - len(PROMPT.token_ids) + 1
    cut = play(no, config=replace(CONFIG, max_response_tokens=room), anchor=Anchor(0, 3), start=original.visits[2])
    assert no.calls[-1].settings.max_new_tokens == 1
    assert cut.rollout.status == RolloutStatus.TRUNCATED


def test_engine_errors_end_only_their_own_rollout():
    async def fail_first(number, call):
        if number == 0:
            raise EngineError("one request")

    async def both():
        runner = EpisodeRunner(ScriptedEngine(before=fail_first), WordGame(), RENDERER, CONFIG, 0)
        return await asyncio.gather(*(runner.play(PROMPT, step=0, k=k) for k in range(2)))

    first, second = (episode.rollout.status for episode in asyncio.run(both()))
    assert first == RolloutStatus.ENGINE_ERROR and not second.failed


def test_prompts_differ_in_their_seeds():
    engine = ScriptedEngine(action=lambda call: WIN)
    other = Prompt("other", PROMPT.task, PROMPT.token_ids)
    for where in ({}, {"k": 1}, {"step": 4}, {"prompt": other}):
        play(engine, **where)
    assert len({call.seed for call in engine.calls}) == 4
