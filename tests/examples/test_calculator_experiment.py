"""The calculator experiment's configurations: all resolve, and the compared methods spend the same units."""

import importlib.util
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from trace_megatron.algorithm.selectors import build_selector
from trace_megatron.algorithm.tree import CONTINUATION_UNITS
from trace_megatron.config import dump_config
from trace_megatron.envs.calculator import Calculator
from trace_megatron.errors import UserError
from trace_megatron.event_loop import EventLoop
from trace_megatron.types import Prompt, Task

EXAMPLE = Path(__file__).parents[2] / "examples" / "calculator"


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"calculator_{name}", EXAMPLE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


experiment, warm_start = load("experiment"), load("warm_start")
COMPARE, ABLATE = experiment.SUITES["compare"], experiment.SUITES["ablate"]


def units(config) -> float:
    selector = build_selector(config.method, config.budget)
    return selector.root_budget + CONTINUATION_UNITS * selector.prefix_budget(selector.root_budget)


@pytest.mark.parametrize(
    ("suite", "expected", "candidates"), [("compare", 128, [16, 32, 16]), ("reasoning-gym", 64, [8, 8])]
)
def test_compared_methods_spend_the_same_units(suite, expected, candidates):
    suite = experiment.SUITES[suite]
    configs = {name: experiment.configure(suite, name, 0, []) for name in suite.variants}
    assert {name: units(config) for name, config in configs.items()} == dict.fromkeys(suite.variants, expected)
    selectors = [build_selector(config.method, config.budget) for config in configs.values()]
    assert [selector.num_candidates for selector in selectors[:-1]] == candidates
    assert {selector.continuations for selector in selectors} == {0, 2}


def test_ablations_spend_the_same_units_but_for_the_shapes():
    for name in ABLATE.variants:
        expected = {"shape-32-2": 64.0}.get(name, 128.0)
        assert units(experiment.configure(ABLATE, name, 0, [])) == expected, name


def test_options_may_stand_among_overrides():
    options = experiment.parse_options(["compare", "--seeds", "2", "run.steps=3", "env.params.max_operations=2"])
    assert (options.suite, options.seeds) == ("compare", 2)
    config = experiment.configure(COMPARE, "trace", 1, options.overrides)
    assert (config.run.name, config.run.seed, config.run.steps) == ("trace-s1", 1, 3)


def test_jobs_share_the_runs():
    commands = (["ablate"], *(["ablate", "--jobs", "3", "--job", str(job)] for job in range(3)))
    every, *shares = (
        {config.run.name for config in experiment.chosen(ABLATE, experiment.parse_options(command))}
        for command in commands
    )
    assert set.union(*shares) == every and sum(map(len, shares)) == len(every) == 30
    assert {len(share) for share in shares} == {10}


class Probed:
    """``evaluate`` of the collector: each prompt's own rate of success."""

    def __init__(self, rates: dict[str, float]):
        self.rates, self.calls = rates, []

    async def __call__(self, engine, environment, renderer, config, prompts, samples, run_seed, step, max_model_len):
        self.calls.append((run_seed, step))
        return [
            [SimpleNamespace(reward=float(k < self.rates[prompt.task.task_id] * samples)) for k in range(samples)]
            for prompt in prompts
        ]


def test_the_oracle_knows_candidates_by_rollouts_of_their_own(monkeypatch):
    probed = Probed({"easy": 1.0, "even": 0.5, "hard": 0.0})
    monkeypatch.setattr(experiment, "evaluate", probed)
    config = experiment.configure(ABLATE, "oracle", 1, [])
    sampling = SimpleNamespace(config=config, engine=None, environment=None, renderer=None)
    prompts = [Prompt(name, Task(name, (), {}), (1,)) for name in probed.rates]
    with EventLoop() as loop:
        oracle = experiment.choose_predictor(config, sampling, loop)
        assert oracle.score_roots(prompts).tolist() == [16.5 / 17, 0.5, 0.5 / 17]
        probed.rates["hard"] = 1.0  # the policy has learned: what was known before does not count
        assert oracle.score_roots(prompts)[2] == 16.5 / 17
    assert len(set(probed.calls)) == 2 and all(seed != config.run.seed for seed, _ in probed.calls)


def test_demonstrations_slip_as_often_as_they_say():
    environment = Calculator()
    for number in range(60):
        expression, operations = environment.draw("train", number)
        assert warm_start.solve(expression, 0.0, random.Random(number)) == operations
    for num_operations, slip in warm_start.SLIPS.items():
        tasks = [environment.draw("train", number) for number in range(num_operations - 1, 6 * 400, 6)]
        solved = [
            warm_start.solve(expression, slip, random.Random(index))[-1].value == operations[-1].value
            for index, (expression, operations) in enumerate(tasks)
        ]
        # a slip may be undone by a multiplication with 0, and no demonstration is right more often than that
        assert sum(solved) / len(solved) == pytest.approx((1 - slip) ** num_operations, abs=0.07)


def test_runs_are_known_and_a_run_of_another_configuration_is_left_alone(tmp_path):
    config = experiment.configure(COMPARE, "trace", 0, [f"run.output_dir={tmp_path}", "run.steps=2"])
    folder = tmp_path / "trace-s0"
    assert not experiment.is_finished(config)
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(config))
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    assert not experiment.is_finished(config)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    assert experiment.is_finished(config)
    longer = experiment.configure(COMPARE, "trace", 0, [f"run.output_dir={tmp_path}", "run.steps=3"])
    with pytest.raises(UserError, match=r"expected the run at .* to be of this configuration"):
        experiment.is_finished(longer)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compare", "--seeds", "-1"], "expected --seeds of at least 0 .* found -1 and 1"),
        (["compare", "--jobs", "0"], "expected .* --jobs of at least 1, found 0 and 0"),
        (["compare", "policy.data_parallel=2"], "expected a policy of one rank, found 2"),
    ],
)
def test_what_one_process_cannot_do_is_refused_before_anything_starts(tmp_path, monkeypatch, arguments, words):
    monkeypatch.setattr(sys, "argv", ["experiment.py", *arguments, f"run.output_dir={tmp_path / 'runs'}"])
    monkeypatch.setattr(experiment, "check_config", lambda config: None)  # the model's folder may not be here
    with pytest.raises(UserError, match=words):
        experiment.main()
    assert not (tmp_path / "runs").exists()
