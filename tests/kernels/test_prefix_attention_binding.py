"""The op prefix_attention of csrc/cuda, checks and launch, with its kernel on the CPU, through ops.prefix_attention."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_models import write_tiny_model

from trace_megatron.algorithm.tree import prefix_anchors
from trace_megatron.ops import PrefixPlan
from trace_megatron.ops import prefix_attention as attend
from trace_megatron.ops.prefix_plan import PrefixLayout
from trace_megatron.predictor.key_values import KeyValuePages
from trace_megatron.predictor.model import load_value_model
from trace_megatron.predictor.pack import history_paths
from trace_megatron.predictor.score import score_paths
from trace_megatron.types import ROOT, Prompt, Rollout, RolloutStatus, RolloutTree, Task, Turn

from .test_binding import ops
from .test_prefix_attention import HALF_UNIT, dense, make_inputs, make_layout

MODULE = "trace_megatron.ops.prefix_attention"


@pytest.fixture
def on_the_runner(monkeypatch):
    """ops.prefix_attention takes the kernel's path, on the CPU."""
    module = __import__(MODULE, fromlist=["kernel_takes"])
    monkeypatch.setattr(module, "kernel_takes", lambda q: True)
    monkeypatch.setattr(module.torch.ops, "trace_megatron", ops())


@pytest.mark.parametrize("lengths", [[20, 0], [0, 0]])
def test_the_whole_path(on_the_runner, lengths):
    generator = torch.Generator().manual_seed(1)
    layout = make_layout([9, 4], lengths, generator)
    q, k, v, *pages = make_inputs(layout, 2, 3, 64, generator)
    wanted = dense(layout, q, k, v, *pages, 0.125)
    if not any(lengths):
        pages = [None, None]
    fused = torch.cat([q, k, v], 1)
    actual = attend(fused[:, :6], fused[:, 6:8], fused[:, 8:], *pages, PrefixPlan(layout, 6, 2), 0.125)
    assert float(((actual.double() - wanted).abs() - HALF_UNIT * (wanted.abs() + 1.0)).max()) <= 0.0


def test_no_tokens(on_the_runner):
    layout = PrefixLayout(torch.tensor([0]), *[torch.zeros(0).long()] * 2, torch.zeros(0).int())
    empty = torch.zeros(0, 2, 64).bfloat16()
    assert attend(empty, empty, empty, None, None, PrefixPlan(layout, 2, 2), 0.125).shape == (0, 2, 64)


def test_wrong_arguments_are_named_before_any_launch():
    generator = torch.Generator().manual_seed(2)
    layout = make_layout([5, 3], [0, 16], generator)
    q, k, v, key_pages, value_pages = make_inputs(layout, 2, 2, 64, generator)
    tiles = PrefixPlan(layout, 4, 2).tiles
    odd = torch.from_numpy(np.zeros(8 * 4 * 64 + 8, dtype=np.int16))[1:].view(torch.bfloat16)
    odd = odd[: 8 * 4 * 64].view(8, 4, 64)
    good = {
        "q": q,
        "k": k,
        "v": v,
        "key_pages": key_pages,
        "value_pages": value_pages,
        "subtree_end": tiles.subtree_end,
        "page_table": tiles.page_table,
        "items": tiles.items,
        "key_tiles": tiles.key_tiles,
        "rows": tiles.rows,
        "scale": 0.125,
    }
    ops().prefix_attention(**good)
    for change, message in [
        ({"q": q.float()}, r"q as BFloat16 \[8, 4, 64\] on cpu, found Float \[8, 4, 64\] on cpu"),
        ({"q": q[..., :32]}, r"with D 64 or 128 and H a multiple of G, found q \[8, 4, 32\]"),
        ({"q": q[:, :3]}, r"H a multiple of G, found q \[8, 3, 64\], k \[8, 2, 64\]"),
        ({"q": odd}, "q on 16 bytes, found 2 bytes beyond"),
        (
            {"k": torch.zeros(8, 2, 65).bfloat16()[..., :64]},
            r"k with strides of whole 16 bytes.*found strides \[130, 65",
        ),
        ({"v": v.half()}, r"v as BFloat16 \[8, 2, 64\] on cpu, found Half"),
        ({"v": v.transpose(1, 2).contiguous().transpose(1, 2)}, r"without gaps, found strides \[128, 1, 2\]"),
        ({"value_pages": value_pages[:8]}, rf"value_pages as BFloat16 \[{len(key_pages)}, 2, 64\]"),
        ({"key_pages": key_pages.repeat(1, 1, 2)[..., :64]}, "key_pages without gaps"),
        ({"subtree_end": tiles.subtree_end.long()}, r"subtree_end as Int \[8\] on cpu, found Long"),
        ({"items": tiles.items[:, :5]}, r"items as Int \[\d+, 6\] on cpu, found Int \[\d+, 5\]"),
        ({"rows": 32}, "rows 64 or 128, found 32"),
        ({"scale": -1.0}, "a positive scale, found -1"),
        ({"q": q.as_strided((2**31, 4, 64), (0, 64, 1))}, r"at most \d+ tokens, found 2147483648"),
        ({"q": q.to("meta")}, "q on a cpu device, found meta"),
    ]:
        with pytest.raises((ValueError, NotImplementedError), match=f"expected .*{message}|Meta"):
            ops().prefix_attention(**(good | change))


def test_the_predictor_scores_through_the_kernel(tmp_path, monkeypatch, request):
    """Prompts known from pages, prefixes on top: the kernel against its twin, in bfloat16 both."""
    folder = write_tiny_model(tmp_path / "model", num_layers=2, head_dim=64)
    model = load_value_model(folder, dtype="bfloat16")
    rng = np.random.default_rng(1)

    def ids(size):
        return tuple(rng.integers(1, 60, size).tolist())

    trees = []
    for index in range(2):
        turns = [Turn(ids(3), (-0.5,) * 3, ids(2), 0) for _ in range(3)]
        rollouts = tuple(Rollout(ROOT, tuple(turns[:count]), 1.0, RolloutStatus.FINISHED) for count in (2, 3))
        trees.append(RolloutTree(Prompt(f"p{index}", Task("t", (), {}), ids(20 + index)), rollouts))
    requests = [(RolloutTree(tree.prompt, ()), (ROOT,)) for tree in trees]
    prefixes = [(tree, prefix_anchors(tree)) for tree in trees]

    def scores():
        pages = KeyValuePages(model.backbone.config, model.product_dtype, model.device, 1 << 22)
        found = []
        for asked, keep in ((requests, True), (prefixes, False)):
            found.append(torch.zeros(sum(len(anchors) for _, anchors in asked), dtype=torch.float64))
            score_paths(model, history_paths(asked), 1000, found[-1], pages, keep)
        assert len(pages) == 2
        return torch.cat(found)

    twin = scores()
    request.getfixturevalue("on_the_runner")
    launches = []
    run = ops().prefix_attention
    counted = SimpleNamespace(prefix_attention=lambda *inputs: launches.append(1) or run(*inputs))
    monkeypatch.setattr(torch.ops, "trace_megatron", counted)
    kernel = scores()
    assert len(launches) == 2 * 2  # layers, passes
    assert float(twin.std()) > 1e-3
    torch.testing.assert_close(kernel, twin, rtol=0, atol=5e-3)
