"""A real run whose rollouts go on while the policy trains, interrupted in the middle and resumed: Megatron and vLLM."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from tiny_runs import read_metrics, write_answering_model, write_config

from trace_megatron.algorithm.tree import num_units
from trace_megatron.config import load_config
from trace_megatron.event_loop import EventLoop
from trace_megatron.policy import parallel
from trace_megatron.predictor import build_predictor
from trace_megatron.run_folder import RunFolder
from trace_megatron.sampling import open_sampling
from trace_megatron.train import build_parts, build_policy, drive
from trace_megatron.tree_files import read_trees

STEPS, UNITS, STALENESS = 5, 16.0, 2  # 8 bare rollouts and 16 continuations a step


class InterruptedFolder(RunFolder):
    """Ctrl-C at the moment when the first checkpoint is complete: trees of later steps grow then."""

    def complete_checkpoint(self, step, state):
        super().complete_checkpoint(step, state)
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of the run, and the state that it was resumed from."""
    root = tmp_path_factory.mktemp("overlap")
    path = write_config(
        root,
        write_answering_model(root / "model"),
        run={"steps": STEPS, "export_hf": False},
        policy={"pipeline_parallel": 1},
        loss={"old_logprobs": "decoupled"},
        rollout={"max_staleness": STALENESS, "carried_share": 0.5},
        sync={"verify_every": 1},
    )
    config = load_config(path)
    folder = RunFolder.of(config)
    folder.prepare(config, resume=False)
    with EventLoop() as loop, open_sampling(config, loop) as sampling:

        def train(folder, checkpoint=None):
            with build_policy(config) as policy:
                predictor = build_predictor(config.predictor, config.run.seed)
                parts = build_parts(config, policy, predictor, replace(sampling, config=config), loop)
                if checkpoint:
                    policy.load_checkpoint(checkpoint / "policy")
                drive(parts, folder, checkpoint)
            parallel.shutdown()

        try:
            with pytest.raises(KeyboardInterrupt):
                train(InterruptedFolder(folder.root))
        finally:
            parallel.shutdown()
        checkpoint = folder.latest_checkpoint()
        state = json.loads((checkpoint / "state.json").read_text())
        train(folder, checkpoint)
    return folder.root, state


def trees_by_step(run):
    return {step: read_trees(run / "trees" / f"step_{step:06d}.jsonl.zst") for step in range(1, STEPS + 1)}


def test_every_planned_unit_is_trained_once(run):
    root, state = run
    trees = trees_by_step(root)
    trained = Counter(tree.prompt.prompt_id for step in trees.values() for tree in step)
    assert set(trained.values()) == {1}
    assert sum(num_units(tree) for step in trees.values() for tree in step) == STEPS * UNITS
    assert read_metrics(root)[0]["overlap/carried_units"] > 0  # the first step trains without the slowest trees
    assert read_metrics(root)[-1]["overlap/carried_units"] == 0
    # Planned before the checkpoint, trained after it: what was interrupted has grown anew.
    assert state["step"] == 2 and {planned["step"] for planned in state["planned"]} >= {3}
    later = {tree.prompt.prompt_id for step in range(3, STEPS + 1) for tree in trees[step]}
    assert {planned["prompt"]["prompt_id"] for planned in state["planned"]} <= later


def test_no_token_is_older_than_the_bound_and_some_are_old(run):
    root, _ = run
    metrics = read_metrics(root)
    for line, (step, trees) in zip(metrics, trees_by_step(root).items(), strict=True):
        versions = [[turn.weight_version for rollout in tree.rollouts for turn in rollout.turns] for tree in trees]
        ages = [step - 1 - min(tree) for tree in versions]
        assert min(ages) >= 0 and max(ages) == line["overlap/staleness_max"] <= STALENESS
        assert line["overlap/staleness_mean"] == pytest.approx(sum(ages) / len(ages))
        assert all(version < step for tree in versions for version in tree)
        assert line["verify/max"] < 1e-3  # engine and trainer agree after each push, although rollouts were running
    stale = [line for line in metrics if line["overlap/staleness_max"] > 0]
    assert stale and any(line["overlap/hidden_s"] > 0 for line in metrics)
    assert all(line["train/ratio_tail"] > 1e-3 for line in stale)  # the policy has moved on since
