"""The CPU layer: nothing where a CUDA device exists, and nothing that others who share the process would notice."""

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.tensor_parallel import random

from trace_megatron.policy import cpu


def test_a_cuda_device_gets_none_of_it(monkeypatch):
    before = (torch.cuda.current_device, torch.cuda.synchronize, torch.Tensor.cuda, torch.Tensor.type)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu, "_installed", False)
    cpu.install()
    assert not cpu._installed
    assert before == (torch.cuda.current_device, torch.cuda.synchronize, torch.Tensor.cuda, torch.Tensor.type)


def test_installing_twice_wraps_once():
    cpu.install()
    wrapped, tracker = torch.Tensor.type, random.get_cuda_rng_tracker()
    cpu.install()
    assert torch.Tensor.type is wrapped and random.get_cuda_rng_tracker() is tracker
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"


def test_torch_itself_still_makes_tensors_where_it_is_told():
    cpu.install()
    with torch.device("meta"):
        made = [torch.tensor(1.0), torch.zeros(1), torch.ones(1), torch.empty(1), torch.full((1,), 2.0)]
    assert {tensor.device.type for tensor in made} == {"meta"}
    assert torch.zeros(1).type(torch.int64).dtype is torch.int64


def test_of_all_functions_megatrons_alone_stay_uncompiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model=None, **options: ("compiled", model, options))
    cpu.install_without_compiler()
    assert torch.compile(clip_grad_by_total_norm_fp32) is clip_grad_by_total_norm_fp32
    assert torch.compile(len, dynamic=True) == ("compiled", len, {"dynamic": True})
    assert torch.compile(method := torch.ones(1).add) == ("compiled", method, {})
    assert torch.compile(dynamic=True) == ("compiled", None, {"dynamic": True})
