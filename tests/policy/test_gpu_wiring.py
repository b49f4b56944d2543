"""What only a GPU machine has, by stand-ins: Transformer Engine's layers, a fused Adam. Nothing here runs on a GPU."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from tiny_models import write_tiny_model

from trace_megatron.config import Config, EngineConfig, LossConfig, OptimizerConfig, PolicyConfig
from trace_megatron.errors import UserError
from trace_megatron.policy import flops, model, offload, optimizer, parallel, trainer
from trace_megatron.policy.hf_config import read_hf_config
from trace_megatron.policy.tree_attention import TreeCoreAttention
from trace_megatron.policy.worker import Policy


def layer_spec():
    attention = SimpleNamespace(
        submodules=SimpleNamespace(core_attention="Transformer Engine's", q_layernorm="its own")
    )
    mlp = SimpleNamespace(submodules=SimpleNamespace(activation_func="its own"))
    return SimpleNamespace(submodules=SimpleNamespace(self_attention=attention, mlp=mlp, input_layernorm="its own"))


@pytest.mark.parametrize(("on_gpu", "has_te"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("num_experts", [None, 4])
def test_transformer_engine_layers_read_the_tree(monkeypatch, on_gpu, has_te, num_experts):
    asked = {}

    def spec_of(name):
        def build(**options):
            asked[name] = options
            return layer_spec()

        return build

    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(model, "HAVE_TE", has_te)
    monkeypatch.setattr(model, "get_gpt_layer_with_transformer_engine_spec", spec_of("te"))
    monkeypatch.setattr(model, "get_gpt_layer_local_spec", spec_of("local"))
    monkeypatch.setattr(model, "get_num_layers_to_build", lambda config, stage: 3)
    uses_te = on_gpu and has_te
    own_activation = not uses_te and num_experts is None
    block = model.build_layer_spec(
        SimpleNamespace(num_moe_experts=num_experts, qk_layernorm=True, use_te_activation_func=own_activation)
    )
    assert list(asked) == ["te" if uses_te else "local"]
    assert all(options["num_experts"] == num_experts and options["qk_layernorm"] for options in asked.values())
    assert block.layer_norm is (model.TENorm if uses_te else model.RMSNorm)
    assert len(block.layer_specs) == 3
    for spec in block.layer_specs:
        attention = spec.submodules.self_attention.submodules
        assert attention.core_attention is TreeCoreAttention
        # fused norms are part of Transformer Engine's linear layers; Megatron's own norm refuses sequence parallelism
        assert spec.submodules.input_layernorm == ("its own" if uses_te else model.RMSNorm)
        assert attention.q_layernorm == ("its own" if uses_te else model.RMSNorm)
        activation = spec.submodules.mlp.submodules.activation_func
        assert activation == (model.SwiGLU if own_activation else "its own")


def test_the_step_of_a_fused_adam_is_kept_in_its_groups():
    """Apex's and Transformer Engine's FusedAdam count in param_groups, torch's in its state."""
    fused = [SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{"step": 9}, {}])) for _ in range(2)]
    optimizer.restore_step(SimpleNamespace(chained_optimizers=fused), 5)
    assert all(group["step"] == 5 for part in fused for group in part.optimizer.param_groups)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("Unknown", None),
    ],
)
def test_the_peak_of_a_device_by_its_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert flops.peak_tflops(torch.device("cuda", 0)) == peak


class HostStream:
    """A stream of a device that is the host: everything on it is done."""

    def wait_stream(self, stream): ...

    def record_event(self):
        return self

    def wait(self, stream): ...

    def synchronize(self): ...


class HalfOnTheHost(HybridDeviceOptimizer):
    """Megatron's own, with every second parameter taken for offloaded: which of them are on a device it asks torch."""

    def _get_sub_optimizer_param_groups(self, offload_fraction):
        self.pin_cpu_grads = False
        host, device, copies, mains = [], [], {}, {}
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                main = parameter.detach().clone().float()
                mains[parameter] = main
                if index % 2:
                    copies[parameter] = main
                (host if index % 2 else device).append({**group, "params": [main]})
        return host, device, copies, {main: parameter for parameter, main in copies.items()}, mains


def test_an_offloaded_optimizer_does_the_same_and_gives_its_state(monkeypatch, tmp_path):
    from megatron.core import optimizer as megatron_optimizer
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    stream = HostStream()
    folder = write_tiny_model(tmp_path / "model")
    config = PolicyConfig(str(folder), "bfloat16")
    with Policy(config, OptimizerConfig(), LossConfig()) as policy:
        weights = {name: weight.clone() for name, weight in policy._trainer.model_chunks[0].named_parameters()}
        monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(offload, "_need", lambda option: None)
        monkeypatch.setattr(optimizer_config, "is_te_min_version", lambda version: True)
        states = []
        for share in (0.0, 0.5):
            (chunk,) = model.build_model(read_hf_config(folder), config)
            chunk.load_state_dict(weights, strict=False)
            replica = trainer._wrap(chunk, distributed_optimizer=True)
            if share:
                for module in (megatron_optimizer, distrib_optimizer):
                    monkeypatch.setattr(module, "HybridDeviceOptimizer", HalfOnTheHost)
            adam = optimizer.build_optimizer([replica], OptimizerConfig(1e-2, weight_decay=0.1, offload_share=share))
            assert isinstance(adam.chained_optimizers[0].optimizer, HalfOnTheHost) == bool(share)
            states.append({})
            for step in range(3):
                generator = torch.Generator().manual_seed(step)
                for parameter in replica.parameters():
                    parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
                assert adam.step()[0]
                if step == 1:  # as a run that goes on from a checkpoint
                    for parameter in replica.parameters():
                        optimizer.restore_state(adam, parameter, optimizer.gather_state(adam, parameter))
                    optimizer.restore_step(adam, 2)
            for name, parameter in replica.module.named_parameters():
                states[-1][name] = {"weight": parameter.float(), **optimizer.gather_state(adam, parameter)}
    parallel.shutdown()
    assert all(set(of_one) == {"weight", "exp_avg", "exp_avg_sq", "main"} for of_one in states[1].values())
    torch.testing.assert_close(states[1], states[0])


def test_offload_options_are_megatrons(monkeypatch, tmp_path):
    hf = read_hf_config(write_tiny_model(tmp_path / "model", num_layers=3))
    layers = PolicyConfig(offload_layers=2, offload_weights=True)
    modules = PolicyConfig(offload_modules=("core_attn", "mlp_norm"), recompute="selective")
    with pytest.raises(UserError, match=r"expected a CUDA device with policy.offload_layers=2, found none"):
        model.build_transformer_config(hf, layers)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = model.build_transformer_config(hf, modules)
    assert config.fine_grained_activation_offloading and config.offload_modules == ["core_attn", "mlp_norm"]
    with pytest.raises(UserError, match=r"expected Transformer Engine with policy.offload_layers=2, found none"):
        model.build_transformer_config(hf, layers)
    monkeypatch.setattr(gpt_layer_specs, "HAVE_TE", True)
    config = model.build_transformer_config(hf, layers)
    assert config.cpu_offloading and config.cpu_offloading_activations and config.cpu_offloading_weights
    assert config.cpu_offloading_num_layers == 2


@pytest.mark.parametrize(
    ("policy", "share", "colocated", "sentence"),
    [
        ({"offload_layers": -1}, 0.0, False, "from 0 to below the model's 3 layers, found -1"),
        ({"offload_layers": 3}, 0.0, False, "from 0 to below the model's 3 layers, found 3"),
        ({"offload_layers": 1, "pipeline_parallel": 2}, 0.0, False, "policy.offload_layers=1, found 2 and none"),
        ({"offload_layers": 1, "recompute": "full"}, 0.0, False, "policy.offload_layers=1, found 1 and full"),
        ({"offload_weights": True}, 0.0, False, "expected policy.offload_layers above 0 with policy.offload_weights"),
        ({"offload_layers": 1, "offload_modules": ("core_attn",)}, 0.0, False, "found both"),
        ({"offload_modules": ("mlp",)}, 0.0, False, "found 'mlp'"),
        ({"offload_modules": ("attn_proj",)}, 0.0, False, "expected core_attn beside attn_proj"),
        ({}, 1.5, False, r"expected optimizer.offload_share in \[0, 1\], found 1.5"),
        ({"dtype": "float32"}, 0.5, False, "found float32 and true"),
        ({}, 0.5, True, "expected optimizer.offload_share=0 with engine.colocated=true, found 0.5"),
    ],
)
def test_what_cannot_be_offloaded_together_is_refused(policy, share, colocated, sentence):
    config = Config(
        policy=PolicyConfig(**policy),
        optimizer=OptimizerConfig(offload_share=share),
        engine=EngineConfig(colocated=colocated),
    )
    with pytest.raises(UserError, match=sentence):
        offload.check_offload(config, 3)
