"""What an update trains on, its gradient, its determinism, and that it learns."""

import itertools

import numpy as np
import pytest
import torch
from example_trees import make_prompt, make_rollout, make_turn, random_trees
from torch import nn
from transformers import AutoModelForCausalLM

from trace_megatron.algorithm.targets import success_targets
from trace_megatron.algorithm.tree import history_ids
from trace_megatron.config import PredictorConfig
from trace_megatron.predictor import build_predictor
from trace_megatron.predictor.diagnostics import spearman
from trace_megatron.predictor.model import load_value_model
from trace_megatron.predictor.pack import history_paths
from trace_megatron.predictor.update import (
    accumulate_gradients,
    as_requests,
    draw_samples,
    mini_batches,
    num_prefixes,
)
from trace_megatron.types import ROOT, RolloutTree

MODES = ("leaf_mean", "bare_mean", "path_uniform")


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_is_every_root_and_six_percent_prefixes(mode):
    trees = random_trees(0, 47, num_bare=4)
    samples = draw_samples(trees, mode, 0.06, np.random.default_rng(0))
    prefixes = [sample for sample in samples if sample.anchor != ROOT]
    assert sorted(sample.tree for sample in samples if sample.anchor == ROOT) == list(range(47))
    assert len(prefixes) == 3 == round(0.06 * 50)
    assert len({(sample.tree, sample.anchor) for sample in samples}) == 50
    assert all(sample.target == success_targets(trees[sample.tree], mode)[sample.anchor] for sample in samples)


def test_number_of_prefixes():
    assert [num_prefixes(roots, 1000, 0.06) for roots in (1, 12, 94, 940)] == [1, 1, 6, 60]
    assert num_prefixes(94, 4, 0.06) == 4
    assert num_prefixes(94, 0, 0.06) == 0
    assert num_prefixes(10, 1000, 0.5) == 10
    assert num_prefixes(10, 1000, 0.0) == 0


def test_prefixes_are_drawn_uniformly():
    (tree,) = random_trees(8, 1, num_bare=3, num_continuations=3)
    visited = [anchor for anchor in success_targets(tree) if anchor != ROOT]
    rng = np.random.default_rng(0)
    draws = [draw_samples([tree], "leaf_mean", 0.06, rng)[1].anchor for _ in range(1000)]
    counts = np.array([draws.count(anchor) for anchor in visited])
    expected = 1000 / len(visited)
    assert len(visited) > 3 and counts.sum() == 1000
    assert ((counts - expected) ** 2 / expected).sum() < 3 * len(visited)  # chi-squared, mean len - 1


def test_untrained_outcomes_are_no_targets():
    unknown = make_rollout([make_turn([1], [2]), make_turn([3])], 0.0, trained=False)
    known = make_rollout([make_turn([4])], 1.0)
    trees = [RolloutTree(make_prompt([1]), (unknown,)), RolloutTree(make_prompt([2]), (unknown, known))]
    (sample,) = draw_samples(trees, "leaf_mean", 0.06, np.random.default_rng(0))
    assert (sample.tree, sample.anchor, sample.target) == (1, ROOT, 1.0)


@pytest.mark.parametrize("batch_size", [1, 8, 16, 1000])
def test_mini_batches_are_even(batch_size):
    samples = draw_samples(random_trees(1, 50), "leaf_mean", 0.06, np.random.default_rng(0))
    batches = mini_batches(samples, batch_size, np.random.default_rng(1))
    assert sorted(itertools.chain(*batches)) == list(range(len(samples)))
    assert len(batches) == -(-len(samples) // batch_size)
    sizes = [len(batch) for batch in batches]
    prefixes = [sum(samples[index].anchor != ROOT for index in batch) for batch in batches]
    assert max(sizes) <= batch_size
    assert max(sizes) - min(sizes) <= 1 and max(prefixes) - min(prefixes) <= 1


def accumulate(model, trees, samples, tokens_per_forward):
    paths = history_paths(as_requests(trees, samples))
    targets = np.array([sample.target for sample in samples])
    return accumulate_gradients(model, paths, targets, len(samples), tokens_per_forward)


def gradients(model) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def assert_gradients_close(actual, expected, tolerance):
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        largest = gradient.abs().max()
        assert largest > 0, name
        assert (actual[name] - gradient).abs().max() <= tolerance * largest, name


def every_sample(trees, mode="leaf_mean"):
    return draw_samples(trees, mode, 0.9, np.random.default_rng(2))


@pytest.mark.parametrize("tokens_per_forward", [8192, 60])
def test_packed_gradient_equals_plain_histories_one_by_one(tiny_llama, tokens_per_forward):
    trees = random_trees(2, 5)
    samples = every_sample(trees)
    model = load_value_model(tiny_llama, seed=1)
    squared_error, _ = accumulate(model, trees, samples, tokens_per_forward)
    packed = gradients(model)

    lm = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32, attn_implementation="sdpa").eval()
    head = nn.Parameter(model.head.weight.detach().clone())
    expected_error = 0.0
    for sample in samples:
        ids = torch.tensor([history_ids(trees[sample.tree], sample.anchor)])
        value = torch.sigmoid(lm.model(ids).last_hidden_state[0, -1] @ head[0])
        error = (value - sample.target) ** 2
        (error / len(samples)).backward()
        expected_error += error.item()
    alone = {f"backbone.{name}": parameter.grad for name, parameter in lm.model.named_parameters()}
    assert len(samples) > 15
    assert squared_error == pytest.approx(expected_error, rel=1e-6)
    assert_gradients_close(packed, alone | {"head.weight": head.grad}, 1e-5)


class Float64Norm(nn.Module):
    """RMSNorm; transformers' own computes in float32 whatever its input."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def float64_model(folder):
    model = load_value_model(folder, seed=1)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, Float64Norm(child))
    return model.double()


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen3"])
def test_packed_gradient_equals_single_histories_in_float64(family, request):
    trees = random_trees(3, 4)
    samples = every_sample(trees, "path_uniform")
    model = float64_model(request.getfixturevalue(family))
    accumulate(model, trees, samples, 8192)
    packed = gradients(model)
    accumulate(model, trees, samples, 50)
    assert_gradients_close(gradients(model), packed, 1e-12)
    for sample in samples:
        accumulate(model, trees, [sample], 8192)
    alone = {name: gradient / len(samples) for name, gradient in gradients(model).items()}
    assert_gradients_close(packed, alone, 1e-12)


def test_the_step_is_adam_on_the_mean_squared_error(tiny_llama):
    """With one mini-batch, two epochs are two steps of a textbook Adam on the whole sample."""
    trees = random_trees(4, 6)
    config = PredictorConfig(kind="model", model=str(tiny_llama), dtype="float32", learning_rate=1e-3, batch_size=100)
    predictor = build_predictor(config, seed=5)
    reference = load_value_model(tiny_llama, seed=5)
    samples = draw_samples(trees, "leaf_mean", 0.06, np.random.default_rng([5, 0]))
    stats = predictor.update(trees, "leaf_mean")
    assert (stats.num_roots, stats.num_prefixes) == (6, 1)
    parameters = dict(reference.named_parameters())
    first = {name: torch.zeros_like(p) for name, p in parameters.items()}
    second = {name: torch.zeros_like(p) for name, p in parameters.items()}
    losses = []
    for step in (1, 2):
        squared_error, _ = accumulate(reference, trees, samples, 8192)
        losses.append(squared_error / len(samples))
        for name, gradient in gradients(reference).items():
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.999 * second[name] + 0.001 * gradient**2
            unbiased = (second[name] / (1 - 0.999**step)).sqrt()
            with torch.no_grad():
                parameters[name] -= 1e-3 * first[name] / (1 - 0.9**step) / (unbiased + 1e-8)
    after, _ = accumulate(reference, trees, samples, 8192)
    assert stats.loss_before == pytest.approx(losses[0], rel=1e-5)
    assert stats.loss_after == pytest.approx(after / len(samples), rel=1e-3)
    assert stats.loss_after < stats.loss_before
    prompts = [tree.prompt for tree in random_trees(5, 20)]
    other = build_predictor(config, seed=5)
    other._model.load_state_dict(reference.state_dict())
    np.testing.assert_allclose(predictor.score_roots(prompts), other.score_roots(prompts), atol=2e-4)


def test_updates_depend_on_seed_and_number_alone(tiny_llama):
    trees = [random_trees(seed, 10) for seed in (6, 7)]

    def losses(seed):
        config = PredictorConfig(kind="model", model=str(tiny_llama), dtype="float32", learning_rate=1e-3, batch_size=4)
        predictor = build_predictor(config, seed=seed)
        return [predictor.update(step, "leaf_mean").loss_after for step in trees]

    assert losses(0) == losses(0) != losses(1)


def test_every_update_draws_anew(tiny_llama):
    config = PredictorConfig(kind="model", model=str(tiny_llama), dtype="float32", learning_rate=1e-12)
    predictor = build_predictor(config, seed=0)
    trees = random_trees(6, 10)
    losses = [predictor.update(trees, "leaf_mean").loss_after for _ in range(4)]
    assert len({round(loss, 6) for loss in losses}) > 1  # the weights stand still: other prefixes, another loss


def test_nothing_to_learn_from(tiny_llama):
    predictor = build_predictor(PredictorConfig(kind="model", model=str(tiny_llama)), seed=0)
    prompts = [tree.prompt for tree in random_trees(0, 3)]
    before = predictor.score_roots(prompts)
    stats = predictor.update([], "leaf_mean")
    assert (stats.loss_before, stats.loss_after, stats.num_roots, stats.num_prefixes) == (None, None, 0, 0)
    np.testing.assert_array_equal(predictor.score_roots(prompts), before)


def separable_tree(rng, name) -> RolloutTree:
    """Success is likely where an even byte opens the prompt; observation 7 (in 3 of 10 rollouts) turns that round."""
    first = int(rng.integers(0, 8))
    rollouts = []
    for _ in range(4):
        observation = 7 if rng.random() < 0.3 else 9
        reward = float(rng.random() < success_prob(first, observation))
        rollouts.append(make_rollout((make_turn([3], [observation]), make_turn([4])), reward))
    return RolloutTree(make_prompt([first, 1, 2], name), tuple(rollouts))


def success_prob(first: int, observation: int | None = None) -> float:
    if observation is None:
        return 0.7 * success_prob(first, 9) + 0.3 * success_prob(first, 7)
    return 0.9 if (first % 2 == 0) == (observation == 9) else 0.1


def test_it_learns_online_what_separates_success_from_failure(tiny_llama):
    config = PredictorConfig(
        kind="model", model=str(tiny_llama), dtype="float32", learning_rate=2e-3, batch_size=16, prefix_share=0.5
    )
    predictor = build_predictor(config, seed=0)
    rng = np.random.default_rng(0)
    held_out = [separable_tree(rng, f"held-{index}") for index in range(60)]
    prompts = [tree.prompt for tree in held_out]
    root_probs = [success_prob(prompt.token_ids[0]) for prompt in prompts]
    prefix_probs = [
        success_prob(tree.prompt.token_ids[0], rollout.turns[0].observation_ids[0])
        for tree in held_out
        for rollout in tree.rollouts
    ]
    before = spearman(predictor.score_roots(prompts), root_probs)
    for step in range(12):
        predictor.update([separable_tree(rng, f"{step}-{index}") for index in range(32)], "leaf_mean")
    root_scores = predictor.score_roots(prompts)
    prefix_scores = np.concatenate(predictor.score_prefixes_many(held_out))
    # between two equally frequent tied halves no scores reach more than 0.866
    assert abs(before) < 0.4 and spearman(root_scores, root_probs) > 0.8
    assert spearman(prefix_scores, prefix_probs) > 0.8
    assert np.abs(root_scores - root_probs).mean() < 0.1  # 0.16 at a constant 1/2
    assert np.abs(prefix_scores - prefix_probs).mean() < 0.2  # 0.4 at a constant 1/2
