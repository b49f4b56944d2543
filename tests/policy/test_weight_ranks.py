"""Four ranks: the converted loads by Megatron's own means, what Megatron saved converts, every tensor is held."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.policy.weights_ranks import CASES, SAVED
from tests.tiny_models import write_tiny_model
from trace_megatron.policy.convert import hf_to_megatron, megatron_to_hf
from trace_megatron.policy.convert_check import TOLERANCE, compare_logits
from trace_megatron.policy.hf_config import read_hf_config
from trace_megatron.policy.hf_weights import hf_tensor_infos
from trace_megatron.policy.names import ParallelSizes
from trace_megatron.weight_sync.source import RankSource

MODELS = {
    "qwen2": ({"family": "qwen2", "tied": False, "vocab": 261}, ParallelSizes(1, 4)),
    "qwen3": ({"family": "qwen3", "tied": True, "vocab": 262, "head_dim": 32, "kv_heads": 1}, ParallelSizes(2, 2)),
    "moe": ({"family": "qwen3_moe", "tied": False, "vocab": 261}, ParallelSizes(2, 2, 2)),
}
"""Options, and the layout that the checkpoint is cut for: never the one that loads it."""


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    work = tmp_path_factory.mktemp("weights")
    for index, (name, (options, sizes)) in enumerate(MODELS.items()):
        write_tiny_model(work / name, seed=index, num_layers=4, hidden=32, ffn=48, **options)
        hf_to_megatron(work / name, work / f"{name}-converted", sizes)
    script = str(Path(__file__).with_name("weights_ranks.py"))
    logs = [work / f"rank{rank}.log" for rank in range(4)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("w") as file:
            command = [sys.executable, script, str(work), str(rank)]
            ranks.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
    try:
        codes = [rank.wait(240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    failed = [log.read_text()[-3000:] for log, code in zip(logs, codes, strict=True) if code]
    assert not failed, failed[0]
    return work


def test_every_rank_agrees(work):
    assert len(list(work.glob("done.*"))) == 4


@pytest.mark.parametrize("name", SAVED)
def test_what_megatron_saves_converts(work, name, tmp_path):
    source = work / CASES[name][0]
    megatron_to_hf(work / f"saved-{name}", tmp_path / "back", like=source)
    expected, found = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", CASES)
def test_what_ranks_hold_is_the_model_and_sources_keep_the_contract(work, name):
    model, layout = CASES[name]
    infos = hf_tensor_infos(read_hf_config(work / model), torch.float32)
    tensors = load_file(work / model / "model.safetensors")
    held = [set(json.loads((work / f"held-{name}.{rank}.json").read_text())) for rank in range(4)]
    assert set.union(*held) == {info.name for info in infos}
    if layout.get("pipeline_parallel", 1) > 1 or layout.get("expert_parallel", 1) > 1:
        assert all(len(names) < len(infos) for names in held)
    for names in held:
        source = RankSource(
            infos, lambda names=names: ((i.name, tensors[i.name] if i.name in names else None) for i in infos), names
        )
        assert [(meta.name, meta.shape, meta.dtype) for meta in source.metadata()] == [
            (info.name, info.shape, info.dtype) for info in infos
        ]
        for _ in range(2):
            yielded = [item for batch in source.iter_groups() for item in zip(*batch, strict=True)]
            assert [name for name, _ in yielded] == [name for group in source.groups() for name in group]
            assert {name for name, tensor in yielded if tensor is not None} == names
    full = RankSource(infos, lambda: ((info.name, tensors[info.name]) for info in infos))
    assert full.held_names() is None
    assert [name for names, _ in full.iter_groups() for name in names] == [info.name for info in infos]


@pytest.mark.parametrize("model", ["qwen2", "moe"])
def test_verify_compares_logits(work, model):
    assert compare_logits(work / model, work / f"{model}-converted") < TOLERANCE / 10
