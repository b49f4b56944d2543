"""The calculator experiment's configurations: all resolve, and the compared methods spend the same units."""

import importlib.util
import sys
from pathlib import Path

import pytest

from trace_megatron.algorithm.selectors import build_selector
from trace_megatron.algorithm.tree import CONTINUATION_UNITS
from trace_megatron.config import dump_config
from trace_megatron.errors import UserError

SCRIPT = Path(__file__).parents[2] / "examples" / "calculator" / "experiment.py"
spec = importlib.util.spec_from_file_location("calculator_experiment", SCRIPT)
experiment = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = experiment  # its dataclasses look themselves up
spec.loader.exec_module(experiment)
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
        (["compare", "--seeds", "-1"], "expected --seeds of at least 0 .* found -1"),
        (["compare", "policy.data_parallel=2"], "expected a policy of one rank, found 2"),
    ],
)
def test_what_one_process_cannot_do_is_refused_before_anything_starts(tmp_path, monkeypatch, arguments, words):
    monkeypatch.setattr(sys, "argv", ["experiment.py", *arguments, f"run.output_dir={tmp_path / 'runs'}"])
    monkeypatch.setattr(experiment, "check_config", lambda config: None)  # the model's folder may not be here
    with pytest.raises(UserError, match=words):
        experiment.main()
    assert not (tmp_path / "runs").exists()
