"""What one of two processes does in test_checkpoint.py.

Usage: checkpoint_ranks.py FOLDER save|load. The second call finds what the first one left, in processes of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.policy.layout_ranks import DP2, EP2, PP2, SP, TP2, VP2, Layout, in_driver_form, join_world, step_batches
from trace_megatron.config import LossConfig, OptimizerConfig, PolicyConfig
from trace_megatron.errors import UserError
from trace_megatron.memfd import place_of
from trace_megatron.policy import parallel
from trace_megatron.policy.worker import Policy
from trace_megatron.split_tensor import SplitTensor

MODEL, EXPERTS = "llama-tied", "qwen3-moe"
SAVED = {
    "pp2": (PP2, "float32", True),
    "dp2": (DP2, "float32", True),
    "dp2-bf16": (DP2, "bfloat16", True),
    "tp2-sp-bf16-replicated": (TP2 | SP, "bfloat16", False),
    "dp2-replicated": (DP2, "float32", False),
    "experts-ep2-dp2": (EP2 | DP2, "float32", True),
}
"""Name -> layout, dtype, distributed optimizer."""
RESHARDED = {"tp2": (TP2, "pp2"), "pp2": (PP2, "dp2"), "dp2": (DP2, "pp2"), "vp2": (VP2, "dp2")}
RESHARDED["experts-pp2"] = (PP2 | {"expert_parallel": 1}, "experts-ep2-dp2")
"""Float32 layout -> the saved one that it continues."""
START = "at-the-start"


def main(folder: Path, stage: str) -> None:
    process = int(os.environ["RANK"])

    def run(name: str, setting: tuple[dict, str, bool], call) -> None:
        join_world(folder / f"rendezvous-{stage}-{name}", process, 2)
        layout, dtype, distributed = setting
        model = EXPERTS if "expert_parallel" in layout else MODEL
        policy = Policy(
            PolicyConfig(model=str(folder / model), dtype=dtype, **layout),
            OptimizerConfig(learning_rate=1e-2, schedule="linear", warmup_steps=2, distributed=distributed),
            LossConfig(),
            total_steps=4,
        )
        torch.set_num_threads(1)
        batches = step_batches(folder, model, Layout(name, layout, num_packs=2))
        in_driver_form(policy, lambda: call(policy, batches))
        parallel.shutdown()

    if stage == "save":
        for name, setting in SAVED.items():
            run(name, setting, lambda policy, batches, name=name: save_in_the_middle(folder, name, policy, batches))
        return
    for name, setting in SAVED.items():
        run(name, setting, lambda policy, batches, name=name: resume(folder, name, f"{name}-resumed", policy, batches))
    for name, (layout, source) in RESHARDED.items():
        run(
            f"{source}-at-{name}",
            (layout, "float32", True),
            lambda policy, batches, s=source, n=name: resume(folder, s, f"{s}-at-{n}", policy, batches),
        )
    run("refused", SAVED["pp2"], lambda policy, batches: refuse(folder, policy, batches))


def save_in_the_middle(folder: Path, name: str, policy: Policy, batches) -> None:
    """Both checkpoints are of the moment they were started at, although steps are taken while they are written."""
    policy.start_checkpoint(folder / f"{name}-{START}")
    for _ in range(2):
        policy.train_step(batches)
        policy.finish_checkpoint(wait=False)  # whether it is written by now or not
    assert policy.finish_checkpoint() and (folder / f"{name}-{START}").exists()
    policy.start_checkpoint(folder / f"{name}-checkpoint")
    steps = [policy.train_step(batches) for _ in range(2)]
    assert not (folder / f"{name}-checkpoint").exists()
    policy.finish_checkpoint()
    report(folder, f"{name}-whole", policy, steps)


def resume(folder: Path, source: str, name: str, policy: Policy, batches) -> None:
    policy.train_step(batches)  # what a load must replace
    policy.load_checkpoint(folder / f"{source}-{START}")
    assert policy.step == 0
    first = policy.train_step(batches)
    assert first.learning_rate == 0.005
    policy.load_checkpoint(folder / f"{source}-checkpoint")
    assert policy.step == 2
    report(folder, name, policy, [policy.train_step(batches) for _ in range(2)])


def report(folder: Path, name: str, policy: Policy, steps) -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # after the CPU layer

    (folder / f"{name}.json").write_text(json.dumps([dataclasses.asdict(stats) for stats in steps]))
    infos, weights = policy.weights()
    weights = {key: value.clone() for key, value in weights}
    assert [(info.name, info.shape, info.dtype) for info in infos] == [
        (key, tuple(value.shape), value.dtype) for key, value in weights.items()
    ]
    save_file(weights, folder / f"{name}.safetensors")
    again, tensors = policy.weights_in_place()
    assert again == infos
    uncopied = 0
    for key, tensor in tensors:
        split = tensor if isinstance(tensor, SplitTensor) else SplitTensor.of(tensor)
        assert torch.equal(split.join(), weights[key]), key
        uncopied += all(map(place_of, split.parts))
    parts = policy._trainer.optimizer.chained_optimizers
    moved = any(isinstance(part, DistributedOptimizer) for part in parts)  # into Megatron's buffers
    assert (uncopied == 0) if moved else (uncopied == len(infos)), (name, uncopied)
    parameter = next(policy._trainer.model_chunks[0].parameters())
    parameter.data = parameter.data * 2  # somewhere else, as nothing here does: what others have mapped is old
    joined = [getattr(tensor, "join", lambda tensor=tensor: tensor)() for _, tensor in policy.weights_in_place()[1]]
    assert all(torch.equal(found, tensor) for found, (_, tensor) in zip(joined, policy.weights()[1], strict=True)), name


def refuse(folder: Path, policy: Policy, batches) -> None:
    """Errors of the user leave every rank as it was, and at work."""
    before = policy.logprobs(batches)
    with pytest.raises(UserError, match="float32, found bfloat16"):
        policy.load_checkpoint(folder / "dp2-bf16-checkpoint")
    with pytest.raises(UserError, match=r"no policy\.json"):
        policy.load_checkpoint(folder / MODEL)
    for write in (policy.start_checkpoint, policy.export_hf):
        with pytest.raises(UserError, match="expected no folder"):
            write(folder / MODEL)
    for wrong in ([], [[]], [batches[0], batches[0]]):  # this policy has one replica
        with pytest.raises(ValueError, match="expected 1 rows"):
            policy.train_step(wrong)
    infos, weights = policy.weights()
    next(weights)  # and no further
    assert all(torch.equal(a, b) for a, b in zip(before[0], policy.logprobs(batches)[0], strict=True))
    assert len(list(weights)) < len(infos)
    policy.export_hf(folder / "exported")
    (folder / "refused.ok").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
