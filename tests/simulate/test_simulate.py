"""The simulator against closed forms, and against real rollout trees of the same outcomes."""

import numpy as np
import pytest
from typer.testing import CliRunner

from trace_megatron.algorithm.contrast import flip_prob, mixed_prob
from trace_megatron.algorithm.selectors import SELECTORS, build_selector
from trace_megatron.algorithm.summary import summarize_trees
from trace_megatron.algorithm.tree import build_structure
from trace_megatron.cli import app
from trace_megatron.config import BudgetConfig, Config, MethodConfig, RolloutConfig, SimulateConfig
from trace_megatron.errors import UserError
from trace_megatron.simulate import step as step_module
from trace_megatron.simulate.compare import advise, compare_methods, compare_shapes, equal_shapes, parse_shapes
from trace_megatron.simulate.model import build_model, predict, read_lengths, truncated_geometric
from trace_megatron.simulate.step import simulate_step
from trace_megatron.tree_files import write_trees
from trace_megatron.types import ROOT, Anchor, Prompt, Rollout, RolloutStatus, RolloutTree, Task, Turn

MAX_TURNS = 5
BUDGET = BudgetConfig(candidates=64, rollouts=96, continuations=2)


def model_of(**options):
    return build_model(SimulateConfig(**options), MAX_TURNS)


def rng_of(seed=0):
    return np.random.default_rng(seed)


def start(probs):
    return np.asarray(probs, dtype=np.float64), np.zeros(len(probs), dtype=np.int64)


def close(sample, expected, errors=4.5):
    """The mean of a sample lies within some standard errors of what it should be."""
    assert abs(np.mean(sample) - expected) < errors * np.std(sample) / np.sqrt(np.size(sample))


@pytest.mark.parametrize("turn_concentration", [0.5, 4.0, 50.0])
def test_the_chance_of_success_is_a_martingale_that_ends_in_the_outcome(turn_concentration):
    paths = model_of(turn_concentration=turn_concentration).play(*start(np.full(40_000, 0.3)), rng_of())
    assert (paths.success_probs[:, 0] == 0.3).all()
    for turn in range(1, MAX_TURNS + 1):
        close(paths.success_probs[:, turn], 0.3)
    assert np.array_equal(paths.success_probs[:, -1], paths.rewards)
    walking = paths.num_turns > 2
    for low, high in ((0.0, 0.2), (0.2, 0.5), (0.5, 1.0)):  # calibrated at every level: a perfect predictor
        chosen = walking & (paths.success_probs[:, 2] >= low) & (paths.success_probs[:, 2] < high)
        close(paths.rewards[chosen] - paths.success_probs[chosen, 2], 0.0)
    assert 0.0 < paths.success_probs[walking, 2].std() < 0.5


def test_lengths_follow_their_distribution_whatever_was_inherited():
    model = model_of(stop_prob=0.3)
    expected = truncated_geometric(0.3, MAX_TURNS)
    assert expected.sum() == pytest.approx(1.0)
    turns = model.play(*start(np.full(50_000, 0.5)), rng_of()).num_turns
    np.testing.assert_allclose(np.bincount(turns, minlength=6)[1:] / turns.size, expected, atol=0.01)
    for inherited in (1, 3, 4):
        starts = np.full(20_000, inherited)
        turns = model.play(np.full(20_000, 0.5), starts, rng_of(1)).num_turns
        assert turns.min() == inherited + 1
        conditional = expected[inherited:] / expected[inherited:].sum()
        np.testing.assert_allclose(
            np.bincount(turns, minlength=6)[inherited + 1 :] / turns.size, conditional, atol=0.015
        )


def test_prompts_have_the_base_rate():
    close(model_of(base_rate=0.2, prompt_concentration=0.7).draw_prompts(20_000, rng_of()), 0.2)
    assert model_of(base_rate=0.2, prompt_concentration=1e6).draw_prompts(100, rng_of()).std() < 0.01


@pytest.mark.parametrize("success_prob", [0.02, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("num_rollouts", [2, 3, 8])
def test_mixed_groups_are_as_frequent_as_stage_1_says(success_prob, num_rollouts):
    groups = model_of().play(*start(np.full(20_000 * num_rollouts, success_prob)), rng_of()).rewards.reshape(20_000, -1)
    close(groups.min(1) != groups.max(1), mixed_prob(success_prob, num_rollouts))


@pytest.mark.parametrize("num_continuations", [1, 2, 5])
@pytest.mark.parametrize("turn", [1, 3])
def test_factual_endings_are_reversed_as_often_as_stage_2_says(num_continuations, turn):
    model, rng = model_of(stop_prob=0.05), rng_of()
    bare = model.play(*start(np.full(20_000, 0.4)), rng)
    longer = np.flatnonzero(bare.num_turns > turn)
    probs = bare.success_probs[longer, turn]
    again = model.play(np.repeat(probs, num_continuations), np.full(longer.size * num_continuations, turn), rng)
    rewards = bare.rewards[longer]
    flipped = (again.rewards.reshape(longer.size, -1) != rewards[:, None]).any(1)
    repeat = rewards * probs + (1 - rewards) * (1 - probs)
    close(flipped - flip_prob(repeat, num_continuations), 0.0)


@pytest.mark.parametrize("num_rollouts", [2, 4, 9])
def test_the_squared_gradient_of_a_flat_group(num_rollouts):
    """n (m - 1) v (1 - v): only a group that is undecided teaches, and least where v is near 0 or 1."""
    model = model_of(base_rate=0.25, prompt_concentration=1e9, turn_tokens=3.0)
    budget = BudgetConfig(candidates=4000, rollouts=4000 * num_rollouts)
    outcome = simulate_step(model, build_selector(MethodConfig(selector="uniform"), budget), 0.0, rng_of())
    tokens = 3.0 * model.turn_probs @ np.arange(1, MAX_TURNS + 1)
    expected = tokens * (num_rollouts - 1) * 0.25 * 0.75 / num_rollouts
    assert outcome.gradient_per_unit == pytest.approx(expected, rel=0.05)


def real_trees(owners, bare, continuations, continued):
    """RolloutTrees with the simulated outcomes, one token a turn."""
    prompts = np.unique(owners)
    turn = Turn((1,), (-1.0,), (2,), 0)

    def rollout(anchor, num_turns, reward):
        return Rollout(anchor, (turn,) * int(num_turns), float(reward), RolloutStatus.FINISHED)

    trees = []
    for prompt in prompts:
        mine = np.flatnonzero(owners == prompt)
        place = {index: number for number, index in enumerate(mine)}
        rollouts = [rollout(ROOT, bare.num_turns[index], bare.rewards[index]) for index in mine]
        for parent, turns, end, reward in zip(
            continuations.parents, continuations.turns, continued.num_turns, continued.rewards, strict=True
        ):
            if parent in place:
                rollouts.append(rollout(Anchor(place[parent], int(turns)), end - turns, reward))
        trees.append(RolloutTree(Prompt(str(prompt), Task(str(prompt), (), {}), (0,)), tuple(rollouts)))
    return trees


def squared_gradient(tree):
    """Node by node: every own turn's leaves below, R - mean of the prompt."""
    structure = build_structure(tree)
    rewards = np.array([tree.rollouts[leaf].reward for leaf in structure.leaves])
    net = np.zeros(structure.num_nodes)
    for path, advantage in zip(structure.paths, rewards - rewards.mean(), strict=True):
        net[list(path[1:])] += advantage
    return float((net**2).sum())


@pytest.mark.parametrize("selector_name", ["trace", "treepo", "uniform"])
def test_measures_are_those_of_real_trees(selector_name, monkeypatch):
    seen = {}

    def spy(*arguments):
        seen["trees"] = real_trees(*arguments[:4])
        return original(*arguments)

    original = step_module.measure
    monkeypatch.setattr(step_module, "measure", spy)
    selector = build_selector(MethodConfig(selector=selector_name), BUDGET)
    for seed in range(3):
        outcome = simulate_step(model_of(turn_tokens=1.0, stop_prob=0.5), selector, 1.0, rng_of(seed))
        trees = seen["trees"]
        summary = summarize_trees(trees, selector.num_candidates)
        assert outcome.units == summary.units
        assert outcome.tokens == summary.generated_tokens
        assert outcome.effective_ratio == pytest.approx(summary.effective_ratio)
        assert outcome.mixed_trees == pytest.approx(summary.effective_ratio * summary.num_trees)
        assert outcome.contrasts_per_unit == pytest.approx(summary.contrasts_per_unit)
        assert outcome.gradient_per_unit == pytest.approx(sum(map(squared_gradient, trees)) / summary.units)
        assert selector_name == "uniform" or summary.num_continuations > 0


@pytest.mark.parametrize("selector_name", sorted(SELECTORS))
def test_every_selector_spends_the_same_units(selector_name):
    selector = build_selector(MethodConfig(selector=selector_name), BUDGET)
    units = [simulate_step(model_of(), selector, 1.0, rng_of(seed)).units for seed in range(5)]
    assert np.mean(units) == pytest.approx(BUDGET.rollouts * 2, rel=0.01)


def test_a_better_predictor_finds_more_contrast_and_one_that_knows_nothing_no_more_than_chance():
    selector, model = build_selector(MethodConfig(selector="trace"), BUDGET), model_of()
    mixed = {
        error: np.mean([simulate_step(model, selector, error, rng_of(seed)).mixed_trees for seed in range(30)])
        for error in (0.0, 1.0, 1e9)
    }
    assert mixed[0.0] > 1.1 * mixed[1.0] > 1.3 * mixed[1e9]
    np.testing.assert_allclose(predict(np.array([0.1, 0.7]), 0.0, rng_of()), [0.1, 0.7], rtol=1e-9)


def test_shapes_cost_the_same_and_advice_names_the_best():
    budget = BudgetConfig(candidates=64, rollouts=96, continuations=3)
    shapes = list(equal_shapes(budget))
    assert (96, 3) in shapes and {n for _, n in shapes} == {0, 1, 2, 3, 4, 6}
    assert all(m * (1 + n / 2) == pytest.approx(240, rel=0.02) for m, n in shapes)
    config = Config(budget=budget, method=MethodConfig(selector="trace"), simulate=SimulateConfig(steps=3))
    rows = compare_shapes(config)
    best = max(rows, key=lambda row: row.estimates["mixed_trees"].mean)
    assert f"M = {best.rollouts}, N = {best.continuations}" in advise(rows)
    assert compare_shapes(config, parse_shapes("10,2 12,0"))[1].rollouts == 12
    again = compare_methods(config, ["trace"])[0]
    assert again == next(row for row in rows if row.continuations == 3)  # a seed gives the same figures


def test_lengths_of_a_recorded_run(tmp_path):
    turn = Turn((1, 2, 3), (-1.0,) * 3, (), 0)
    short, long = (Rollout(ROOT, (turn,) * n, 1.0, RolloutStatus.FINISHED) for n in (1, 3))
    continuation = Rollout(Anchor(1, 1), (turn, turn), 0.0, RolloutStatus.FINISHED)
    prompt = Prompt("a", Task("a", (), {}), (1,))
    write_trees(tmp_path / "trees" / "step_000001.jsonl.zst", [RolloutTree(prompt, (short, long, continuation, long))])
    probs, tokens = read_lengths(tmp_path)
    np.testing.assert_allclose(probs, [1 / 3, 0, 2 / 3])
    assert tokens == 3.0
    model = build_model(SimulateConfig(recorded_run=str(tmp_path)), MAX_TURNS)
    assert set(model.play(*start([0.5] * 200), rng_of()).num_turns) == {1, 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_rate": 1.0}, "simulate.base_rate between 0 and 1, found 1.0"),
        ({"turn_concentration": 0.0}, "positive simulate.turn_concentration"),
        ({"predictor_error": -1.0}, "simulate.predictor_error >= 0"),
        ({"recorded_run": "nowhere"}, "expected trees of a run at 'nowhere/trees'"),
    ],
)
def test_mistakes_end_in_one_sentence(options, message):
    with pytest.raises(UserError, match=message):
        build_model(SimulateConfig(**options), MAX_TURNS)
    with pytest.raises(UserError, match="expected shapes as"):
        parse_shapes("512;2")


def test_the_command_prints_both_tables(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("method: {selector: trace}\nbudget: {candidates: 32, rollouts: 32, continuations: 2}\n")
    result = CliRunner().invoke(app, ["simulate", "-c", str(path), "simulate.steps=2", "--selectors", "uniform trace"])
    assert result.exit_code == 0, result.output
    assert "methods at one budget" in result.output and "budgets of trace" in result.output
    assert "most mixed trees: M = " in result.output
    assert RolloutConfig().max_turns == MAX_TURNS
