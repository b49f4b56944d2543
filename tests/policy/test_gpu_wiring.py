"""What only a GPU machine has, by stand-ins: Transformer Engine's layers, a fused Adam. Nothing here runs on a GPU."""

from types import SimpleNamespace

import pytest
import torch

from trace_megatron.policy import flops, model, optimizer
from trace_megatron.policy.tree_attention import TreeCoreAttention


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
