"""What one of four processes does in test_layouts.py: it joins one parallel layout after the other.

Usage: layout_ranks.py FOLDER. The folder holds the models and the trees; every layout leaves its results there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.policy.step_examples import TEMPERATURE, example_advantages, example_trees, with_logprobs
from trace_megatron.algorithm.pack import pack_micro_batches
from trace_megatron.config import LossConfig, OptimizerConfig, PolicyConfig
from trace_megatron.policy import logprobs, parallel
from trace_megatron.policy.hf_weights import iter_hf_weights
from trace_megatron.policy.worker import Policy
from trace_megatron.types import TreeBatch

FAMILIES = ("llama-tied", "qwen3-untied")
TIED, UNTIED, EXPERTS = FAMILIES[:1], FAMILIES[1:], ("qwen3-moe",)


@dataclass(frozen=True)
class Layout:
    name: str
    policy: dict
    num_packs: int = 1
    """Micro-batches of every replica."""
    packed: bool = True
    loss: str = "dual_clip"
    only_tree: int | None = None
    """A batch of this tree alone."""
    distributed: bool = True
    families: tuple[str, ...] = FAMILIES

    @property
    def world_size(self) -> int:
        return PolicyConfig(**self.policy).num_ranks

    @property
    def is_sharded(self) -> bool:
        """Each rank holds a part of the gradients alone."""
        policy = PolicyConfig(**self.policy)
        return self.distributed and policy.data_parallel * policy.context_parallel > 1


LOSSES = {
    "plain": LossConfig(),
    "dual_clip": LossConfig(dual_clip=3.0),
    "kl": LossConfig(kl_coef=0.3, reference_model="reference"),
    "decoupled": LossConfig(old_logprobs="decoupled", importance_cap=1.7),
}
TP2, PP2, DP2 = {"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"data_parallel": 2}
VP2 = {"pipeline_parallel": 2, "virtual_pipeline": 2}
CP2, EP2 = {"context_parallel": 2}, {"expert_parallel": 2}
SP, FULL = {"sequence_parallel": True}, {"recompute": "full"}

LAYOUTS = [
    Layout("tp1", {}),
    Layout("tp1-no-dual-clip", {}, loss="plain"),
    Layout("tp1-four-packs", {}, num_packs=4),
    Layout("tp1-unpacked", {}, num_packs=2, packed=False),
    Layout("tp1-recompute", FULL, num_packs=2),
    Layout("tp1-selective", {"recompute": "selective"}),
    Layout("tp1-kl", {}, loss="kl"),
    Layout("tp1-one-leaf", {}, only_tree=1),
    Layout("tp2", TP2, num_packs=2),
    Layout("tp2-decoupled", TP2, loss="decoupled"),
    Layout("tp2-sp", TP2 | SP, num_packs=2),
    Layout("tp2-sp-recompute", TP2 | SP | FULL),
    Layout("pp2", PP2, num_packs=4),
    Layout("pp2-kl", PP2, num_packs=2, loss="kl"),
    Layout("pp2-uneven", {"pipeline_parallel": 2, "pipeline_layers": (3, 1)}, num_packs=3, families=UNTIED),
    Layout("vp2", VP2, num_packs=4),
    Layout("vp2-odd-kl", VP2, num_packs=3, loss="kl", families=TIED),
    Layout("cp2", CP2, num_packs=2),
    Layout("cp2-replicated", CP2, distributed=False, families=TIED),
    Layout(
        "cp2-replicated-recompute-decoupled",
        CP2 | FULL,
        num_packs=3,
        loss="decoupled",
        distributed=False,
        families=UNTIED,
    ),
    Layout("dp2", DP2, num_packs=2),
    Layout("dp2-replicated", DP2, distributed=False),
    Layout("dp2-dummy", DP2, only_tree=1),
    Layout("tp4", {"tensor_parallel": 4}),
    Layout("tp2-pp2", TP2 | PP2, num_packs=2),
    Layout("tp2-pp2-sp-recompute", TP2 | PP2 | SP | FULL, num_packs=4),
    Layout("tp2-vp2-sp-recompute", TP2 | VP2 | SP | FULL, num_packs=3),
    Layout("cp2-tp2-sp", CP2 | TP2 | SP, num_packs=2, distributed=False),
    Layout("cp2-pp2", CP2 | PP2, num_packs=3, distributed=False, families=TIED),
    Layout("cp2-dp2-selective", CP2 | DP2 | {"recompute": "selective"}, distributed=False, families=UNTIED),
    Layout("tp2-dp2", TP2 | DP2),
    Layout("pp2-dp2", PP2 | DP2, num_packs=2),
    Layout("experts", {}, families=EXPERTS),
    Layout("experts-pp2-recompute", PP2 | FULL, num_packs=3, families=EXPERTS),
    Layout("experts-ep2-dp2", EP2 | DP2, num_packs=2, families=EXPERTS),
    Layout("experts-ep2-dp2-replicated", EP2 | DP2, num_packs=2, families=EXPERTS, distributed=False),
    Layout("experts-ep2-tp2-sp", EP2 | TP2 | SP, num_packs=2, families=EXPERTS),
    Layout("experts-ep2-cp2", EP2 | CP2, families=EXPERTS, distributed=False),
    Layout("experts-ep2-dp2-vp2", EP2 | DP2 | VP2, num_packs=3, families=EXPERTS, distributed=False),
]
CELLS = sorted(
    ((family, layout) for layout in LAYOUTS for family in layout.families), key=lambda cell: cell[1].world_size
)


def rounds() -> list[list[tuple[str, Layout, int]]]:
    """(family, layout, first process), as many side by side as four processes hold."""
    filled: list[list[tuple[str, Layout, int]]] = []
    free = 0
    for family, layout in CELLS:
        if free < layout.world_size:
            filled.append([])
            free = 4
        filled[-1].append((family, layout, 4 - free))
        free -= layout.world_size
    return filled


def main(folder: Path) -> None:
    process = int(os.environ["RANK"])
    check_vocab_parallel(folder, process)
    for family, layout, first in (cell for cells in rounds() for cell in cells):
        if first <= process < first + layout.world_size:
            join_world(folder / f"rendezvous-{family}-{layout.name}", process - first, layout.world_size)
            run_layout(folder, family, layout)
            parallel.shutdown()
    if process < 2:
        check_not_finite(folder, process)
        parallel.shutdown()
    for number, dtype in enumerate(("float32", "bfloat16")):
        for distributed, first in ((True, 0), (False, 2)):
            if first <= process < first + 2:
                join_world(folder / f"rendezvous-adam-{number}-{first}", process - first, 2)
                check_adam(folder, dtype, distributed)
                parallel.shutdown()


def join_world(rendezvous: Path, rank: int, world_size: int) -> None:
    """What ``launch.local`` would have told this process."""
    os.environ |= {"TRACE_RENDEZVOUS_FILE": str(rendezvous), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": "2"}


def run_layout(folder: Path, family: str, layout: Layout) -> None:
    torch.set_num_threads(1)
    loss = LOSSES[layout.loss]
    if loss.reference_model:
        loss = dataclasses.replace(loss, reference_model=str(folder / f"{family}-reference"))
    policy = Policy(
        PolicyConfig(model=str(folder / family), dtype="float32", peak_tflops=0.1, **layout.policy),
        OptimizerConfig(learning_rate=1e-3, distributed=layout.distributed),
        loss,
        temperature=TEMPERATURE,
        total_steps=10,
    )
    batches = step_batches(folder, family, layout)
    batches = in_driver_form(policy, lambda: policy.prepare(batches)) or batches
    # the ranks below work without a driver, so each needs what the driver has just prepared
    for batch in (batch for row in batches for batch in row):
        for prepared in (batch.reference_logprobs, batch.old_logprobs, batch.positive_mass, batch.negative_mass):
            dist.broadcast(prepared, src=0)
    trainer = policy._trainer
    trainer.accumulate(batches[policy._ranks.data_rank])
    if layout.is_sharded:
        gradients = None  # each rank holds its shard alone: the gradient norm and the replicated layout stand for it
    else:
        gradients = gathered_gradients(policy)

    def as_driver() -> None:
        logprobs = policy.logprobs(batches)
        stats = policy.train_step(batches)
        name = f"{family}-{layout.name}"
        (folder / f"{name}.json").write_text(json.dumps(dataclasses.asdict(stats)))
        tensors = {f"logprobs.{i}.{j}": values for i, row in enumerate(logprobs) for j, values in enumerate(row)}
        tensors |= {f"gradients.{key}": values for key, values in (gradients or {}).items()}
        save_file(tensors, folder / f"{name}.safetensors")

    in_driver_form(policy, as_driver)


def in_driver_form(policy: Policy, call):
    """Rank 0 calls, the others serve."""
    if not policy.is_driver:
        return policy.serve()
    with policy:
        return call()


def step_batches(folder: Path, family: str, layout: Layout) -> list[list[TreeBatch]]:
    stored = json.loads((folder / f"{family}-engine.json").read_text())
    logprobs = {tuple(map(int, key.split(","))): value for key, value in stored.items()}
    trees = with_logprobs(example_trees(vocab_size=200), logprobs)
    advantages = example_advantages(trees)
    if layout.only_tree is not None:
        trees, advantages = trees[layout.only_tree :][:1], advantages[layout.only_tree :][:1]
    num_ranks = layout.policy.get("data_parallel", 1)

    def pack(limit: int) -> list[list[TreeBatch]]:
        return pack_micro_batches(
            trees, advantages, tokens_per_micro_batch=limit, num_ranks=num_ranks, packed=layout.packed
        )

    # The most tokens that still make so many packs: what is below the first limit that makes fewer.
    limit = bisect_left(range(1, 401), True, key=lambda limit: len(pack(limit)[0]) < layout.num_packs)
    batches = pack(limit)
    assert len(batches[0]) == layout.num_packs, f"no limit gives {layout.num_packs} packs"
    return batches


def gathered_gradients(policy: Policy) -> dict[str, torch.Tensor]:
    """``main_grad`` of the whole model in HF names, on rank 0: put where the weights are, and gathered as they are."""
    parameters = [parameter for chunk in policy._trainer.model_chunks for parameter in chunk.parameters()]
    weights = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.copy_(parameter.main_grad)
    gradients = {}
    for name, tensor in iter_hf_weights(policy._trainer.model_chunks, policy._hf):
        if tensor is not None:
            gradients[name] = tensor.clone()
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data.copy_(weight)
    return gradients


def check_adam(folder: Path, dtype: str, distributed: bool) -> None:
    """Two replicas, three steps with given gradients, beside torch.optim.AdamW on float32 copies."""
    config = OptimizerConfig(learning_rate=3e-3, weight_decay=0.1, beta1=0.8, beta2=0.95, distributed=distributed)
    policy = Policy(
        PolicyConfig(model=str(folder / FAMILIES[0]), dtype=dtype, data_parallel=2), config, LossConfig(), total_steps=9
    )
    optimizer = policy._trainer.optimizer
    parameters = list(policy._trainer.model_chunks[0].parameters())
    copies = [torch.nn.Parameter(parameter.detach().float().clone()) for parameter in parameters]
    matrices, vectors = ([copy for copy in copies if (copy.dim() > 1) is wide] for wide in (True, False))
    adam = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=3e-3, weight_decay=0.1, betas=(0.8, 0.95)
    )
    generator = torch.Generator().manual_seed(3)
    for scale in (1e-3, 1.0, 1e-2):  # the second one is clipped
        for parameter, copy in zip(parameters, copies, strict=True):
            copy.grad = torch.randn(copy.shape, generator=generator) * scale
            parameter.main_grad.copy_(copy.grad)
        _, norm, _ = optimizer.step()
        expected_norm = torch.nn.utils.clip_grad_norm_(copies, 1.0)
        torch.testing.assert_close(float(norm), float(expected_norm), rtol=1e-5, atol=0.0)
        adam.step()
    for parameter, copy in zip(parameters, copies, strict=True):
        # bfloat16 weights are the float32 ones rounded: a difference of 1e-6 may tip over to the next number
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == "float32" else {"rtol": 2**-7, "atol": 1e-6}
        torch.testing.assert_close(parameter.detach().float(), copy.to(parameter.dtype).float(), **tolerance)
        assert not torch.equal(parameter, torch.zeros_like(parameter))
    if dist.get_rank() == 0:
        (folder / f"adam-{dtype}-{distributed}.ok").touch()


def check_not_finite(folder: Path, process: int) -> None:
    """A weight that is no number ends the step before the optimizer changes anything."""
    join_world(folder / "rendezvous-not-finite", process, 2)
    policy = Policy(
        PolicyConfig(model=str(folder / FAMILIES[0]), dtype="float32", pipeline_parallel=2),
        OptimizerConfig(learning_rate=1.0),
        LossConfig(),
    )
    parameters = list(policy._trainer.model_chunks[0].parameters())
    if process == 0:
        parameters[0].data[100] = torch.nan
    before = [parameter.detach().clone() for parameter in parameters]
    (batches,) = step_batches(folder, FAMILIES[0], LAYOUTS[0])
    with pytest.raises((RuntimeError, FloatingPointError)):
        policy._trainer.train_step(batches)
    assert all(torch.equal(a, b.nan_to_num()) for a, b in zip(map(torch.nan_to_num, before), parameters, strict=True))
    (folder / f"not-finite-{process}.ok").touch()


def check_vocab_parallel(folder: Path, process: int) -> None:
    """Four shards of a vocabulary of 10 padded to 16: one rank holds two real rows, one none. Against float64 torch."""
    join_world(folder / "rendezvous-vocabulary", process, 4)
    store = dist.FileStore(str(folder / "rendezvous-vocabulary"), 4)
    dist.init_process_group("gloo", store=store, rank=process, world_size=4)
    generator = torch.Generator().manual_seed(0)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        hidden = torch.randn(700, 6, generator=generator, dtype=torch.float64)
        weight = torch.randn(16, 6, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, 10, (700,), generator=generator)
        slope = torch.randn(700, generator=generator, dtype=torch.float64)
        whole = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        everything = (whole[0] @ whole[1][:10].t() / 0.7).log_softmax(-1)
        expected = everything.gather(1, labels[:, None])[:, 0]
        (expected * slope).sum().backward()
        mine = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight.chunk(4)[process])]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(logprobs, "CPU_LOGITS_PER_CHUNK", 256 * 4)  # three chunks
            found, entropy = logprobs.edge_logprobs(
                *mine, labels, temperature=0.7, vocab_size=10, group=dist.group.WORLD
            )
            (found * slope.to(dtype)).sum().backward()
        close = dict(rtol=tolerance, atol=tolerance * 100)
        torch.testing.assert_close(found.double(), expected.detach(), **close)
        torch.testing.assert_close(entropy.double(), -(everything.exp() * everything).sum(-1).detach(), **close)
        torch.testing.assert_close(mine[0].grad.double(), whole[0].grad, **close)
        torch.testing.assert_close(mine[1].grad.double(), whole[1].grad.chunk(4)[process], **close)
    dist.destroy_process_group()
    (folder / f"vocabulary-{process}.ok").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
