"""One of four ranks: weights by every way in and out, at one layout after the other.

    weights_ranks.py WORK     WORK/<model>/ is an HF folder, WORK/<model>-converted/ its distributed checkpoint

Writes WORK/held-<case>.<rank>.json, the names that a rank holds, and WORK/saved-<case>/, as Megatron saves the model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[2]))
from trace_megatron.config import PolicyConfig
from trace_megatron.policy import cpu, parallel

cpu.install()

from megatron.core import dist_checkpointing  # noqa: E402, after the CPU layer

from tests.policy.layout_ranks import join_world  # noqa: E402
from trace_megatron.memfd import place_of, share  # noqa: E402
from trace_megatron.policy import shared_weights  # noqa: E402
from trace_megatron.policy.hf_config import read_hf_config  # noqa: E402
from trace_megatron.policy.hf_weights import hf_tensor_infos, iter_hf_weights, load_hf_weights  # noqa: E402
from trace_megatron.policy.live_weights import held_names, iter_full_weights, iter_held_weights  # noqa: E402
from trace_megatron.policy.model import build_model  # noqa: E402
from trace_megatron.policy.names import named_parameters  # noqa: E402

CASES = {
    "qwen2-tp2pp2": ("qwen2", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "qwen3-pp4": ("qwen3", {"pipeline_parallel": 4}),
    "qwen3-tp4": ("qwen3", {"tensor_parallel": 4}),
    "moe-pp2ep2": ("moe", {"pipeline_parallel": 2, "data_parallel": 2, "expert_parallel": 2}),
    "moe-tp2ep4": (
        "moe",
        {"tensor_parallel": 2, "data_parallel": 2, "expert_parallel": 4, "sequence_parallel": True},
    ),
}
SAVED = ("qwen2-tp2pp2", "moe-pp2ep2")


def main(work: Path) -> None:
    rank = int(sys.argv[2])
    for name, (model, layout) in CASES.items():
        join_world(work / f"rendezvous-{name}", rank, 4)
        policy = PolicyConfig(model=str(work / model), dtype="float32", **layout)
        parallel.initialize(policy, seed=0)
        torch.set_num_threads(1)
        check(work, name, model, policy)
        dist.barrier()
        parallel.shutdown()
    (work / f"done.{rank}").touch()


def check(work: Path, name: str, model: str, policy: PolicyConfig) -> None:
    hf = read_hf_config(work / model)
    chunks = build_model(hf, policy)
    share(parameter for chunk in chunks for parameter in chunk.parameters())
    load_hf_weights(chunks, work / model, hf)
    expected = {key: value.detach().clone() for key, value in named_parameters(chunks).items()}

    def forget() -> None:
        for parameter in named_parameters(chunks).values():
            parameter.data.fill_(float("nan"))

    def assert_restored() -> None:
        for key, value in named_parameters(chunks).items():
            assert torch.equal(value, expected[key]), key

    # the converted checkpoint, as Megatron loads it and as we do
    forget()
    loaded = dist_checkpointing.load(chunks[0].sharded_state_dict(), str(work / f"{model}-converted"))
    chunks[0].load_state_dict(loaded, strict=False)
    assert_restored()
    forget()
    load_hf_weights(chunks, work / f"{model}-converted", hf)
    assert_restored()

    source = load_file(work / model / "model.safetensors")
    infos = hf_tensor_infos(hf, torch.float32)

    def assert_whole(item, info) -> None:
        assert item[0] == info.name
        assert tuple(item[1].shape) == info.shape and item[1].dtype is info.dtype, info
        assert torch.equal(item[1], source[info.name]), info

    for item, info in zip(iter_hf_weights(chunks, hf), infos, strict=True):
        if dist.get_rank() == 0:
            assert_whole(item, info)
        else:
            assert item == (info.name, None)
    shared = shared_weights.connect(chunks, shared_weights.find_places(chunks), hf, dist.group.WORLD)
    assert (shared is not None) == (dist.get_rank() == 0)
    for sign in (1, -1, 1):
        if shared is not None:
            for (key, split), info in zip(shared, infos, strict=True):
                assert split.shape == info.shape
                assert_whole((key, sign * split.join()), info)
                # Where ranks outnumber the key-value heads, queries, keys and values are put together.
                assert all(map(place_of, split.parts)) or (name == "qwen3-tp4" and "_proj" in key), key
        dist.barrier()
        for parameter in named_parameters(chunks).values():
            parameter.data.mul_(-1)
        dist.barrier()
    for parameter in named_parameters(chunks).values():
        parameter.data.mul_(-1)
    dist.barrier()
    for _ in range(2):
        for item, info in zip(iter_full_weights(chunks, hf), infos, strict=True):
            assert_whole(item, info)
    held = held_names(chunks, hf)
    for item, info in zip(iter_held_weights(chunks, hf), infos, strict=True):
        if info.name in held:
            assert_whole(item, info)
        else:
            assert item == (info.name, None)
    (work / f"held-{name}.{dist.get_rank()}.json").write_text(json.dumps(sorted(held)))
    if name in SAVED:
        target = work / f"saved-{name}"
        if dist.get_rank() == 0:
            target.mkdir()
        dist.barrier()
        dist_checkpointing.save(chunks[0].sharded_state_dict(), str(target))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
