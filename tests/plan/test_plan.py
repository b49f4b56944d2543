"""The plan against what Megatron holds: parameters, gradients, optimizer to the byte, kept activations by count."""

import dataclasses
import math

import pytest
import torch
from tiny_models import write_tiny_model
from typer.testing import CliRunner

from trace_megatron.algorithm.pack import trained_edges
from trace_megatron.cli import app
from trace_megatron.config import Config, EngineConfig, LossConfig, OptimizerConfig, PlanConfig, PolicyConfig
from trace_megatron.errors import UserError
from trace_megatron.plan.hardware import DEVICES, GIB, device_named
from trace_megatron.plan.layouts import device_memory, fitting_layouts
from trace_megatron.plan.memory import layer_activations, num_parameters, parameters_by_stage, trainer_memory
from trace_megatron.plan.timing import forward_flops, step_time, workload
from trace_megatron.policy import parallel
from trace_megatron.policy.hf_config import parse_hf_config, read_hf_config
from trace_megatron.policy.worker import Policy
from trace_megatron.types import TreeBatch

MODELS = {
    "llama-tied": {"hidden": 128, "ffn": 320, "heads": 4, "kv_heads": 2, "num_layers": 3},
    "qwen3-untied": {"family": "qwen3", "tied": False, "hidden": 96, "ffn": 256, "heads": 6, "kv_heads": 2,
                     "head_dim": 32, "num_layers": 4},
    "qwen2-bias": {"family": "qwen2", "hidden": 64, "ffn": 192, "heads": 4, "kv_heads": 4, "num_layers": 5},
}  # fmt: skip
TOKENS = 1024


def chain_batch(num_tokens, vocab):
    """One long rollout, half of it trained."""
    index = torch.arange(num_tokens)
    mass = (index >= num_tokens // 2).float() / num_tokens
    floats = {name: torch.zeros(num_tokens) for name in ("rollout_logprobs", "old_logprobs", "reference_logprobs")}
    values = {
        "tokens": index % vocab,
        "position_ids": index,
        "subtree_end": torch.full((num_tokens,), num_tokens, dtype=torch.int32),
        "predecessor": (index - 1).int(),
        "positive_mass": mass,
        "negative_mass": torch.zeros(num_tokens),
        "weight": mass,
        "num_unpacked_tokens": num_tokens,
    }
    names = [field.name for field in dataclasses.fields(TreeBatch)]
    return TreeBatch(**{name: {**floats, **values}.get(name, torch.ones(num_tokens)) for name in names})


@pytest.fixture(scope="module", params=MODELS)
def built(request, tmp_path_factory):
    """A real policy of one rank in bfloat16, and the plan for it."""
    folder = write_tiny_model(tmp_path_factory.mktemp("plan") / request.param, **MODELS[request.param])
    policy = PolicyConfig(model=str(folder), tokens_per_micro_batch=TOKENS)
    config = Config(policy=policy)
    built = Policy(policy, OptimizerConfig(), LossConfig())
    yield built, read_hf_config(folder), config
    parallel.shutdown()


def test_parameters_gradients_and_optimizer_to_the_byte(built):
    policy, hf, config = built
    (plan,) = trainer_memory(hf, config, num_micro_batches=1)
    trainer = policy._trainer
    parameters = [p for chunk in trainer.model_chunks for p in chunk.parameters()]
    assert plan.num_parameters == sum(p.numel() for p in parameters)
    assert plan.weights == sum(p.numel() * p.element_size() for p in parameters)
    buffers = [buffer.grad_data for replica in trainer._replicas for buffer in replica.buffers]
    assert plan.gradients == pytest.approx(sum(b.numel() * b.element_size() for b in buffers), rel=0.1)
    held = set()
    size = 0
    for part in trainer.optimizer.chained_optimizers:
        main = [p for group in part.optimizer.param_groups for p in group["params"]]
        states = [value for state in part.optimizer.state.values() for value in state.values() if value.dim()]
        for tensor in (*main, *states):
            if tensor.data_ptr() not in held:
                held.add(tensor.data_ptr())
                size += tensor.numel() * tensor.element_size()
    assert plan.optimizer == pytest.approx(size, rel=0.1)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_kept_activations(built, recompute):
    """What autograd holds on to between forward and backward, weights apart."""
    policy, hf, config = built
    chunk = policy._trainer.model_chunks[0]
    weights = {p.data_ptr() for p in chunk.parameters()}
    chunk.config.recompute_granularity = "full" if recompute == "full" else None
    chunk.config.recompute_method = "uniform" if recompute == "full" else None
    chunk.config.recompute_num_layers = 1 if recompute == "full" else None
    chunk.train()
    kept: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = chain_batch(TOKENS, hf.vocab_size)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        scores = policy._forward(chunk, batch)
    assert scores.logprobs.numel() == trained_edges(batch).numel() > 0
    scores.logprobs.sum().backward()
    planned = dataclasses.replace(config, policy=dataclasses.replace(config.policy, recompute=recompute))
    # the final norm's input, and the rows that the vocabulary head is asked about
    head = TOKENS * hf.hidden_size * 2 + TOKENS // 2 * hf.hidden_size * 2
    expected = hf.num_layers * layer_activations(hf, planned, native=True) + head
    assert sum(kept.values()) == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen3-0.6B", 0.596),
        ("Qwen3-8B", 8.19),
        ("Qwen3-14B", 14.77),
        ("Qwen3-32B", 32.76),
        ("Llama-3.2-3B-Instruct", 3.21),
    ],
)
def test_sizes_of_real_models(trace_data, name, billions):
    assert num_parameters(read_config(trace_data, name)) / 1e9 == pytest.approx(billions, rel=2e-3)


def read_config(trace_data, name):
    import json

    path = trace_data / "models" / "configs" / f"{name}.json"
    return parse_hf_config(json.loads(path.read_text()), str(path))


def test_stages_hold_the_model_once(trace_data):
    hf = read_config(trace_data, "Qwen3-14B")
    config = Config(policy=PolicyConfig(tensor_parallel=4, pipeline_parallel=4, sequence_parallel=True))
    counts = parameters_by_stage(hf, config)
    assert len(counts) == 4
    assert sum(counts) * 4 == pytest.approx(num_parameters(hf), rel=1e-3)  # norms are on every rank
    shared = dataclasses.replace(config, policy=dataclasses.replace(config.policy, data_parallel=4))
    for alone, among_four in zip(trainer_memory(hf, config, 8), trainer_memory(hf, shared, 8), strict=True):
        assert among_four.optimizer == alone.optimizer // 4 and among_four.weights == alone.weights


def test_flops_are_twice_the_parameters_for_short_contexts(trace_data):
    hf = read_config(trace_data, "Qwen3-8B")  # untied: the embedding is read, not multiplied
    active = num_parameters(hf) - hf.vocab_size * hf.hidden_size
    assert forward_flops(hf, 1, 0) == pytest.approx(2 * active, rel=1e-3)
    assert forward_flops(hf, 10, 4096) > 10 * forward_flops(hf, 1, 0)


def big_config(**policy):
    return Config(
        policy=PolicyConfig(tokens_per_micro_batch=16384, **policy),
        engine=EngineConfig(tensor_parallel=2, gpu_memory_utilization=0.4),
    )


def test_what_does_not_fit_is_refused_and_what_is_proposed_fits(trace_data):
    hf, device = read_config(trace_data, "Qwen3-14B"), device_named("H100")
    config = big_config(data_parallel=16)
    assert not device_memory(hf, None, config, device).fits
    proposed = list(fitting_layouts(hf, None, config, device))
    assert proposed
    for policy, memory in proposed:
        assert policy.num_ranks == 16 and memory.fits and memory.training < 79 * GIB
    assert not list(fitting_layouts(hf, None, big_config(), device))  # on one device nothing does


def test_time_follows_the_hardware(trace_data):
    hf = read_config(trace_data, "Qwen3-8B")
    config = dataclasses.replace(
        big_config(tensor_parallel=4, data_parallel=4), plan=PlanConfig(prompt_tokens=500, response_tokens=2000)
    )
    slow, fast = (step_time(hf, None, config, device_named(name)) for name in ("A100-80G", "H100"))
    ahead = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, max_staleness=1))
    overlapped = step_time(hf, None, ahead, device_named("H100"))
    assert overlapped.total == pytest.approx(max(fast.rollouts, fast.policy_update) + fast.weight_sync)
    assert slow.policy_update / fast.policy_update == pytest.approx(989 / 312)
    assert slow.rollouts > 1.3 * fast.rollouts
    assert fast.predictor_scoring == fast.predictor_update == 0.0
    work = workload(config)
    assert work.unpacked_tokens == config.budget.rollouts * 2500 and work.packing_ratio > 1.0
    assert all(math.isfinite(value) and value >= 0 for value in dataclasses.astuple(fast))


def test_the_command(tmp_path, tiny_folder):
    path = tmp_path / "config.yaml"
    limits = "rollout: {max_prompt_tokens: 1024, max_response_tokens: 1024}\n"
    path.write_text(f"policy: {{model: {tiny_folder}}}\nengine: {{gpu_memory_utilization: 0.3}}\n{limits}")
    result = CliRunner().invoke(app, ["plan", "-c", str(path)])
    assert result.exit_code == 0, result.output
    for part in ("optimizer", "KV cache", "policy update", "trajectory tokens/s a device"):
        assert part in result.output
    wrong = CliRunner().invoke(app, ["plan", "-c", str(path), "plan.device=H10"])
    assert isinstance(wrong.exception, UserError) and "did you mean 'H100'" in str(wrong.exception)
    wrong = CliRunner().invoke(app, ["plan", "-c", str(path), "plan.response_tokens=-5"])
    assert isinstance(wrong.exception, UserError) and "plan.response_tokens of at least 0" in str(wrong.exception)
    full = CliRunner().invoke(app, ["plan", "-c", str(path), "engine.gpu_memory_utilization=1.0"])
    assert isinstance(full.exception, UserError) and "expected at most 79 GiB on a H100" in str(full.exception)
    assert set(DEVICES) >= {"H100", "H200"}


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
