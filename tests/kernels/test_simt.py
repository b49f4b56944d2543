"""The runner of kernels itself: right results in any order of threads, and every planted fault seen every time."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from .simt import Counts, Kernel, KernelFault

SOURCE = Path(__file__).parent / "probes/probes.cu"
RACE = r"race with thread \d+ of block .* no barrier between|not written before"


@functools.cache
def probes() -> Kernel:
    return Kernel(SOURCE)


def line_of(text: str, occurrence: int = 0) -> str:
    """ "probes.cu:12" of the n-th line that holds this text."""
    lines = [number for number, line in enumerate(SOURCE.read_text().splitlines(), 1) if text in line]
    return f"probes.cu:{lines[occurrence]}"


def run(name, size=0, fault=0, inputs=None, halves=None, out=(1024,), seed=0, drop=""):
    fields = {
        "from": torch.zeros(1) if inputs is None else inputs,
        "halves": halves,
        "to": (out, torch.float32),
        "counts": ((2,), torch.int32),
        "size": size,
        "fault": fault,
    }
    return probes().run(name, "ProbeParams", fields, seed=seed, drop=drop)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 1000])
def test_a_sum_in_any_order_of_threads(size):
    values = torch.arange(size, dtype=torch.float32)
    for seed in range(5):
        assert run("sum", size, inputs=values, out=(3,), seed=seed)["to"].tolist() == [float(values.sum())] * 3
    assert probes().counts == Counts(3 * 4 * size, 3 * 4, 0, 3 * 8)


def test_a_missing_barrier_is_seen_every_time():
    barriers = [line_of("__syncthreads()", 0), line_of("__syncthreads()", 1)]
    for seed in range(100):
        with pytest.raises(KernelFault, match=RACE):
            run("sum", 128, inputs=torch.ones(128), out=(3,), seed=seed, drop=barriers[seed % 2])


def test_a_race_is_told_with_its_lines():
    wanted = f"thread 1 of block {{}} reads shared parts, bytes 0 to 4, at {line_of('= parts[0]')}: race with thread 0"
    wanted += f" of block {{}}, which writes it at {line_of('parts[threadIdx.x] +=')} with no barrier between"
    messages = set()
    for seed in range(30):
        with pytest.raises(KernelFault) as caught:
            run("sum", 128, inputs=torch.ones(128), out=(3,), seed=seed, drop=line_of("__syncthreads()", 1))
        messages.add(str(caught.value))
    assert messages & {wanted.format(block, block) for block in range(3)}


def test_warps_and_a_missing_warp_synchronisation():
    wanted = [float(i ^ 1) for i in range(128)]
    for seed in range(100):
        assert run("warp", out=(128,), seed=seed)["to"].tolist() == wanted
        with pytest.raises(KernelFault, match=rf"shared values.*({RACE})"):
            run("warp", out=(128,), seed=seed, drop=line_of("__syncwarp()", 0))


def test_copies_arrive_at_the_wait_and_not_before():
    values = torch.randn(4 * 512, generator=torch.Generator().manual_seed(1))
    wanted = values.clone().view(4, 128, 4)
    wanted[1:, 3] = 0.0  # not valid there
    for seed in range(10):
        assert torch.equal(run("copy", 4, inputs=values, out=(2048,), seed=seed)["to"], wanted.flatten())
    for seed in range(100):
        with pytest.raises(KernelFault, match=r"cp\.async into it that it has not waited for"):
            run("copy", 4, fault=1, inputs=values, out=(2048,), seed=seed)
        with pytest.raises(KernelFault, match=r"cp\.async"):
            run("copy", 4, inputs=values, out=(2048,), seed=seed, drop=line_of("cp_async_wait<1>()"))
        for barrier in (2, 3):
            with pytest.raises(KernelFault, match=rf"{RACE}|cp\.async"):
                run("copy", 4, inputs=values, out=(2048,), seed=seed, drop=line_of("__syncthreads()", barrier))


@pytest.mark.parametrize("transposed", [False, True])
def test_tensor_core_products_have_the_hardware_s_layout(transposed):
    generator = torch.Generator().manual_seed(2)
    a, b = torch.randint(-8, 8, (16, 16), generator=generator), torch.randint(-8, 8, (16, 8), generator=generator)
    right = torch.cat([b, torch.zeros_like(b)], 1) if transposed else torch.cat([b.T, torch.zeros_like(b.T)])
    halves = torch.cat([a.flatten(), right.flatten()]).bfloat16()
    to = run("product", fault=3 * transposed, halves=halves, out=(16, 8))["to"]
    assert torch.equal(to, (a @ b).float())
    with pytest.raises(KernelFault, match=RACE):
        run("product", halves=halves, out=(16, 8), drop=line_of("__syncwarp()", 1))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (1, r"writes 0 bytes beyond the end of shared values \(512 bytes\).*out of bounds"),
        (2, "reads shared values, bytes 28 to 32.*not written before"),
        (3, "reads to, bytes 4 to 8.*not written before"),
        (4, "writes counts, bytes 0 to 4.*race with thread"),
        (5, r"wait for each other: thread 0 at probes.cu:\d+ thread 64 at probes.cu:\d+, 0 ended"),
        (6, "reads from, bytes 4 to 12.*misaligned"),
        (7, "ends with a cp.async that it never waited for"),
        (8, "wait for each other"),
        (9, "reads shared ticket.*race with thread .* which updates it"),
        (10, "updates counts.*not written before"),
    ],
)
def test_faults_are_seen_every_time(fault, message):
    for seed in range(10):
        with pytest.raises(KernelFault, match=message):
            run("fault", fault=fault, inputs=torch.zeros(8), seed=seed)


def test_atomics_do_not_race_with_each_other():
    for seed in range(10):
        assert run("fault", seed=seed)["counts"].tolist() == [128, 128]


def test_reads_beyond_an_input_are_seen():
    with pytest.raises(KernelFault, match=r"reads 0 bytes beyond the end of from \(80 bytes\)"):
        run("sum", 20, fault=2, inputs=torch.zeros(20), out=(3,))
