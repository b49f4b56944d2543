"""Copies in place of vLLM's loader: the same weights in every layer bit by bit, or the reason why not."""

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from trace_megatron.split_tensor import SplitTensor
from trace_megatron.weight_sync import direct_loading
from trace_megatron.weight_sync.direct_loading import DirectLoading
from trace_megatron.weight_sync.layerwise_loading import LayerwiseLoading

ROWS, COLUMNS = 32, 64
NAMES = ("gate", "up", "gate.bias", "up.bias", "norm")


class Fused(nn.Module):
    """Of two tensors the rows of one rank of two, packed for products; a bias beside."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(ROWS, COLUMNS, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(ROWS, dtype=dtype), requires_grad=False)
        self.weight.weight_loader = self.bias.weight_loader = self.load
        self.quant_method = UnquantizedLinearMethod()

    def load(self, param, loaded, part):
        size = len(loaded) // 2
        param.data.narrow(0, part * size, size).copy_(loaded.narrow(0, size, size))


class Norm(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(COLUMNS, dtype=dtype), requires_grad=False)
        self.weight.weight_loader = self.load

    def load(self, param, loaded):
        param.data.copy_(loaded)


class Model(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.fused, self.norm = Fused(dtype), Norm(dtype)
        record_metadata_for_reloading(self)
        self.fused.quant_method.process_weights_after_loading(self.fused)

    def load_weights(self, tensors):
        filled = set()
        for name, tensor in tensors:
            part, _, kind = name.partition(".")
            if part == "norm":
                self.norm.weight.weight_loader(self.norm.weight, tensor)
                filled.add("norm.weight")
            else:
                param = self.fused.bias if kind else self.fused.weight
                param.weight_loader(param, tensor, ("gate", "up").index(part))
                filled.add(f"fused.{kind or 'weight'}")
        return filled

    def results(self):
        x = torch.linspace(-1, 1, 2 * COLUMNS).view(2, COLUMNS).to(self.norm.weight.dtype)
        return self.fused.cpu_linear(x, self.fused.weight, None), self.fused.bias.data.clone(), self.norm.weight.data


def tensors(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((ROWS, COLUMNS), (ROWS, COLUMNS), (ROWS,), (ROWS,), (COLUMNS,))
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in zip(NAMES, shapes, strict=True)}


def in_one_part(tensors):
    return [(name, SplitTensor.of(tensor)) for name, tensor in tensors]


def load_layerwise(model, tensors, watched=False):
    loading = LayerwiseLoading(model, None, watched)
    for item in tensors.items():  # each in a bucket of its own: the layer waits for its parts
        loading.load(iter([item]))
    assert not loading.unfilled()
    loading.finish()
    return loading.watch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arrangement", ["in one bucket", "apart", "side by side"])
def test_copies_do_what_the_loader_does(monkeypatch, dtype, arrangement):
    model, other = Model(dtype), Model(dtype)
    watch = load_layerwise(model, tensors(1, dtype), watched=True)
    assert not watch.obstacle
    load_layerwise(other, tensors(1, dtype))
    for found, expected in zip(model.results(), other.results(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)  # watching changed nothing
    direct = DirectLoading(model, None, watch)
    live = model.norm.weight.data_ptr()
    for seed in (2, 3):
        new = tensors(seed, dtype)
        if arrangement == "side by side":  # the halves that land are the second and the third of these
            memory = torch.cat([new["gate"], new["up"].roll(ROWS // 2, 0)])
            monkeypatch.setattr(direct_loading._Layer, "_put_together", None)  # packed where they are
            new |= {"gate": memory[:ROWS], "up": memory[ROWS // 2 : ROWS // 2 + ROWS]}
        direct.start()
        for items in [[item] for item in new.items()] if arrangement == "apart" else [list(new.items())]:
            direct.load(in_one_part(items))
        direct.finish()
        assert not direct.unfilled()
        load_layerwise(other, new)
        for found, expected in zip(model.results(), other.results(), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert model.norm.weight.data_ptr() == live
    whole = torch.cat([new[name][ROWS // 2 :] for name in ("gate", "up")]).double()
    x = torch.linspace(-1, 1, 2 * COLUMNS).view(2, COLUMNS).to(dtype).double()
    torch.testing.assert_close(model.results()[0].double(), x @ whole.T, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize(("dtype", "sent"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_tensors_of_another_dtype_than_the_engine_s_are_cast(dtype, sent):
    model, other = Model(dtype), Model(dtype)
    direct = DirectLoading(model, None, load_layerwise(model, tensors(1, sent), watched=True))
    new = tensors(2, sent)
    memory = torch.cat([new["gate"], new["up"].roll(ROWS // 2, 0)])  # what lands lies one behind the other
    new |= {"gate": memory[:ROWS], "up": memory[ROWS // 2 : ROWS // 2 + ROWS]}
    direct.start()
    direct.load(in_one_part(new.items()))
    direct.finish()
    load_layerwise(other, new)
    for found, expected in zip(model.results(), other.results(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_set_of_tensors_unlike_the_first_is_refused():
    model = Model()
    direct = DirectLoading(model, None, load_layerwise(model, tensors(1), watched=True))
    for name, tensor in (("other", torch.zeros(3)), ("up", torch.zeros(3)), ("norm", torch.ones(COLUMNS).bfloat16())):
        direct.start()
        with pytest.raises(ValueError, match=f"found '{name}'"):
            direct.load(in_one_part([(name, tensor)]))
        direct.give_up()
    direct.start()
    direct.load(in_one_part(item for item in tensors(2).items() if item[0] != "up"))
    assert direct.unfilled() == ["fused"]


def test_what_fails_in_the_background_fails_the_update_and_not_the_next(monkeypatch):
    model, other = Model(), Model()
    direct = DirectLoading(model, None, load_layerwise(model, tensors(1), watched=True))
    direct.start()
    with monkeypatch.context() as patch:
        patch.setattr(model.fused, "quant_method", None)
        direct.load(in_one_part(tensors(2).items()))
        with pytest.raises(AttributeError, match="process_weights_after_loading"):
            direct.unfilled()  # not only at the end, which vLLM expects to succeed
    direct.give_up()
    direct.start()
    direct.load(in_one_part(tensors(3).items()))
    direct.finish()
    load_layerwise(other, tensors(3))
    for found, expected in zip(model.results(), other.results(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("for_amx", [False, True])
def test_onednn_packs_by_all_threads_as_for_the_loader(monkeypatch, for_amx):
    """For another number it may choose another layout, which vLLM's products of that shape would misread."""
    monkeypatch.setattr(direct_loading, "check_cpu_sgl_kernel", lambda rows, columns, dtype: for_amx)
    found, before = {}, torch.get_num_threads()
    take_in = direct_loading._Layer.take_in

    def noting(layer):
        found[type(layer.module)] = torch.get_num_threads()
        take_in(layer)

    monkeypatch.setattr(direct_loading._Layer, "take_in", noting)
    torch.set_num_threads(2)
    try:
        model = Model()
        direct = DirectLoading(model, None, load_layerwise(model, tensors(1), watched=True))
        for _ in range(2):
            direct.start()
            direct.load(in_one_part(tensors(2).items()))
            direct.finish()
            assert found == {Fused: 1 if for_amx else 2, Norm: 1}
    finally:
        torch.set_num_threads(before)


def test_after_an_update_that_the_loader_refused_another_is_whole():
    model = Model()
    load_layerwise(model, tensors(1))
    before = [result.clone() for result in model.results()]
    loading = LayerwiseLoading(model, None, True)
    loading.load(iter([("gate", tensors(2)["gate"])]))
    assert {"fused", "norm.weight"} < set(loading.unfilled())
    with pytest.raises(ValueError, match=r"refused a tensor, 'up' of shape \(32,\)"):
        loading.load(iter([("up", torch.zeros(ROWS))]))
    loading.give_up()  # without another try of what was refused
    for found, expected in zip(model.results(), before, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not load_layerwise(model, tensors(3), watched=True).obstacle
    other = Model()
    load_layerwise(other, tensors(3))
    for found, expected in zip(model.results(), other.results(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def doubled(self, param, loaded):
    param.data.copy_(loaded * 2)


def in_place(self, param, loaded):
    param.data.copy_(loaded)
    param.data.mul_(2)


def by_value(self, param, loaded):
    if loaded[0].item() < 1e9:
        param.data.copy_(loaded)


def upside_down(self, param, loaded, part):
    """Not so as long as the layer waits on the meta device."""
    size = len(loaded) // 2
    source = loaded.narrow(0, size, size)
    if not param.is_meta and param.ndim > 1:
        source = source.flip(0)
    param.data.narrow(0, part * size, size).copy_(source)


def into_the_same_part(self, param, loaded, part):
    size = len(loaded) // 2
    param.data.narrow(0, 0, size).copy_(loaded.narrow(0, size, size))


class Negating(QuantizeMethodBase):
    def process_weights_after_loading(self, layer):
        layer.weight.data.neg_()

    create_weights = apply = None


@pytest.mark.parametrize(
    ("layer", "loader", "obstacle"),
    [
        (Norm, doubled, "what is loaded into Norm.weight is not what arrived"),
        (Norm, in_place, "computes Norm.weight in place"),
        (Norm, by_value, "reads a value of 'norm'"),
        (Fused, upside_down, "Fused.weight, put together by copies, is not what vLLM made of it"),
        (Fused, into_the_same_part, "'gate' and 'up' both become the same part of Fused.weight"),
        (Norm, None, "Norm.weight is processed in a way of its own"),
    ],
)
def test_what_copies_cannot_repeat_stays_with_the_loader(monkeypatch, layer, loader, obstacle):
    if loader:
        monkeypatch.setattr(layer, "load", loader)
    model = Model()
    if not loader:
        model.norm.quant_method = Negating()
    assert obstacle in load_layerwise(model, tensors(1), watched=True).obstacle
