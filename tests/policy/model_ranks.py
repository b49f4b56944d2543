"""One of four ranks: every model at every layout against the logits and tensors of transformers.

    model_ranks.py WORK     WORK/<model>/ is an HF folder, WORK/<model>.safetensors its tokens, logits, the gradient of
                            some loss by them ("upstream") and by every parameter ("grad." + its HF name)

Writes WORK/result.<rank>.json: a list of findings, and WORK/export-<layout>/ of the model "qwen3-tied".
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from trace_megatron.config import PolicyConfig
from trace_megatron.errors import UserError
from trace_megatron.policy import cpu

cpu.install()

from megatron.core import parallel_state  # noqa: E402 - after the CPU layer, as the product does
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

from trace_megatron.policy.hf_config import HFModelConfig, read_hf_config  # noqa: E402
from trace_megatron.policy.hf_weights import (  # noqa: E402
    export_hf,
    hf_tensor_infos,
    iter_hf_weights,
    load_hf_weights,
)
from trace_megatron.policy.model import build_model  # noqa: E402
from trace_megatron.policy.names import from_shards, model_weights, named_parameters  # noqa: E402
from trace_megatron.policy.tree_attention import TreeSequence  # noqa: E402

LAYOUTS = {
    "tp2": PolicyConfig(dtype="float32", tensor_parallel=2, data_parallel=2),
    "pp2": PolicyConfig(dtype="float32", pipeline_parallel=2, data_parallel=2, recompute="full"),
    "tp2pp2sp": PolicyConfig(dtype="float32", tensor_parallel=2, pipeline_parallel=2, sequence_parallel=True),
    "tp4": PolicyConfig(dtype="float32", tensor_parallel=4),
    "bf16": PolicyConfig(dtype="bfloat16", tensor_parallel=2, pipeline_parallel=2),
}


def main(work: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    findings = []
    for layout, policy in LAYOUTS.items():
        parallel_state.initialize_model_parallel(policy.tensor_parallel, policy.pipeline_parallel)
        for reference in sorted(work.glob("*.safetensors")):
            finding = {"layout": layout, "model": reference.stem}
            findings.append(finding | check(work / reference.stem, load_file(reference), policy))
            if reference.stem == "qwen3-tied":
                check_export(work / reference.stem, work / f"export-{layout}", policy)
        parallel_state.destroy_model_parallel()
    (work / f"result.{dist.get_rank()}.json").write_text(json.dumps(findings))


def check(folder: Path, reference: dict[str, torch.Tensor], policy: PolicyConfig) -> dict:
    hf = read_hf_config(folder)
    chunks = build_model(hf, policy)
    load_hf_weights(chunks, folder, hf)
    finding = check_logits(chunks, hf, reference)
    finding |= check_round_trip(chunks, hf, load_file(folder / "model.safetensors"))
    if policy.pipeline_parallel == 1:
        finding |= check_gradients(chunks[0], hf, reference)
    return finding


def check_logits(chunks: list, hf: HFModelConfig, reference: dict[str, torch.Tensor]) -> dict:
    """The largest relative error, and the largest probability of a padded row, on the last stage."""
    tokens = reference["tokens"]
    length = tokens.shape[1]
    tree = chain(length)

    def step(_, model):
        return model(tokens, None, None, packed_seq_params=tree), lambda logits, non_loss_data: logits

    outputs = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter([]),
        model=chunks,
        num_microbatches=1,
        seq_length=length,
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    if not parallel_state.is_pipeline_last_stage():
        return {}
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(outputs[0]) for _ in range(group.size())]
    dist.all_gather(parts, outputs[0].contiguous(), group=group)
    logits = torch.cat(parts, dim=-1).float()
    expected = reference["logits"]
    return {
        "logits_error": ((logits[..., : hf.vocab_size] - expected).abs().max() / expected.abs().max()).item(),
        "padded_rows": logits.shape[-1] - hf.vocab_size,
        "padded_mass": logits.softmax(-1)[..., hf.vocab_size :].sum().item(),
    }


def check_gradients(model: torch.nn.Module, hf: HFModelConfig, reference: dict[str, torch.Tensor]) -> dict:
    """The HF tensor whose gradient is off most, and by how much of its largest entry."""
    group = parallel_state.get_tensor_model_parallel_group()
    tokens, upstream = reference["tokens"], reference["upstream"]
    upstream = torch.nn.functional.pad(upstream, (0, -upstream.shape[-1] % group.size()))
    logits = model(tokens, None, None, packed_seq_params=chain(tokens.shape[1]))
    logits.backward(upstream.chunk(group.size(), dim=-1)[group.rank()].contiguous())
    parameters, errors = named_parameters([model]), []
    for weight in model_weights(hf):
        if weight.is_copy:
            continue
        grad = parameters[weight.megatron[0]].grad
        shards = [torch.empty_like(grad) for _ in range(group.size())]
        dist.all_gather(shards, grad, group=group)
        if weight.megatron[0].endswith(("q_layernorm.weight", "k_layernorm.weight")):
            shards = [sum(shards)]  # each rank saw its own heads; Megatron sums these after the backward pass
        for name, found in zip(weight.hf, from_shards(weight, shards, hf), strict=True):
            expected = reference[f"grad.{name}"]
            errors.append((((found - expected).abs().max() / expected.abs().max()).item(), name))
    return {"gradient_error": max(errors)}


def check_round_trip(chunks: list, hf: HFModelConfig, source: dict[str, torch.Tensor]) -> dict:
    """Whether names, order, shapes, dtypes and bits come back on rank 0, and names alone on the others."""
    dtype = next(chunks[0].parameters()).dtype
    infos = hf_tensor_infos(hf, dtype)
    found = list(iter_hf_weights(chunks, hf))
    assert [name for name, _ in found] == [info.name for info in infos]
    if dist.get_rank() != 0:
        return {"only_names": all(tensor is None for _, tensor in found)}
    for (_, tensor), info in zip(found, infos, strict=True):
        assert (tuple(tensor.shape), tensor.dtype) == (info.shape, info.dtype), info.name
    unequal = [name for name, tensor in found if not torch.equal(tensor, source[name].to(dtype))]
    return {"unequal": unequal, "same_names": {name for name, _ in found} == set(source)}


def check_export(folder: Path, target: Path, policy: PolicyConfig) -> None:
    """Every rank must come back from an export, from one that fails on rank 0 and from one that is refused."""
    hf = read_hf_config(folder)
    chunks = build_model(hf, policy)
    load_hf_weights(chunks, folder, hf)
    try:
        export_hf(chunks, hf, folder / "missing", target)
    except OSError:
        assert dist.get_rank() == 0
    export_hf(chunks, hf, folder, target)
    try:
        export_hf(chunks, hf, folder, target)
    except UserError:
        return
    raise AssertionError("an existing folder was accepted")


def chain(length: int) -> TreeSequence:
    return TreeSequence(torch.full((length,), length, dtype=torch.int32), torch.arange(length))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
