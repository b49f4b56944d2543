"""The verifier, on engines whose logprobs are known."""

import asyncio
import math

import pytest

from trace_megatron.errors import WeightSyncError
from trace_megatron.rollout.engine import Completion, SamplingSettings
from trace_megatron.weight_sync.verify import verify

PROMPTS = [(1, 2), (3,)]
TRAINER_LOGPROBS = [[-1.0, -2.0], [-0.5]]


class FixedEngine:
    """Answers with the trainer's logprobs plus given differences, and notes what it was asked."""

    def __init__(self, differences):
        self.requests = []
        self._answers = {
            prompt: Completion(
                token_ids=tuple(range(10, 10 + len(logprobs))),
                logprobs=tuple(logprob + change for logprob, change in zip(logprobs, changes, strict=True)),
                stopped=True,
                weight_version=1,
            )
            for prompt, logprobs, changes in zip(PROMPTS, TRAINER_LOGPROBS, differences, strict=True)
        }

    async def generate(self, token_ids, settings, seed, affinity=""):
        self.requests.append((token_ids, settings, seed))
        return self._answers[token_ids]


def score(pairs):
    assert [completion for _, completion in pairs] == [(10, 11), (10,)]
    return TRAINER_LOGPROBS


def run(differences, tolerance=0.1, top_p=1.0, score=score):
    settings = SamplingSettings(0.7, top_p, 8, (0,))
    return verify(asyncio.run, FixedEngine(differences), score, PROMPTS, settings, tolerance)


def test_agreement_is_measured():
    difference = run([[0.01, -0.05], [0.0]], tolerance=0.2)
    assert difference.max == pytest.approx(0.05)
    assert difference.mean == pytest.approx(0.02)
    assert difference.num_tokens == 3


def test_a_small_difference_everywhere_is_refused_too():
    run([[0.09, 0.0], [0.0]], tolerance=0.3)
    with pytest.raises(WeightSyncError, match=r"0\.09 on average"):
        run([[0.09, -0.09], [0.09]], tolerance=0.3)


@pytest.mark.parametrize("change", [0.2, -0.2, math.inf, math.nan])
def test_a_difference_is_refused_with_its_place(change):
    with pytest.raises(WeightSyncError, match=r"prompt 0, position 1, token 11: engine .*, trainer -2\)"):
        run([[0.05, change], [0.0]])


def test_a_trainer_that_is_not_finite_is_refused():
    with pytest.raises(WeightSyncError, match="prompt 1, position 0"):
        run([[0.0, 0.0], [0.0]], score=lambda pairs: [[-1.0, -2.0], [math.nan]])


def test_top_p_raises_the_engines_logprobs_by_at_most_the_mass_it_kept():
    most = -math.log(0.8)
    assert run([[0.0, most], [most / 2]], top_p=0.8).max < 1e-12
    with pytest.raises(WeightSyncError):
        run([[0.0, most + 0.2], [0.0]], top_p=0.8)
    with pytest.raises(WeightSyncError):
        run([[0.0, -0.2], [0.0]], top_p=0.8)


def test_requests_are_those_of_the_run_and_always_the_same():
    settings = SamplingSettings(0.7, 0.9, 8, (0,))
    engines = [FixedEngine([[0.0, 0.0], [0.0]]) for _ in range(2)]
    for engine in engines:
        verify(asyncio.run, engine, score, PROMPTS, settings, 0.1)
    assert engines[0].requests == engines[1].requests
    assert [request[:2] for request in engines[0].requests] == [(prompt, settings) for prompt in PROMPTS]
    assert len({seed for _, _, seed in engines[0].requests}) == len(PROMPTS)
