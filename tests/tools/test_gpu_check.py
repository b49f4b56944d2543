"""tools/gpu_check.py without a GPU: its checks on the CPU's ops, its table, and what it says where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import gpu_check  # noqa: E402
from gpu_checks import floors, shapes, system  # noqa: E402
from gpu_checks.results import (  # noqa: E402
    Check,
    Outcome,
    Result,
    SkippedError,
    Verdict,
    format_result,
    run_checks,
    summary,
)

from trace_megatron.config import load_config  # noqa: E402


def fail():
    raise ValueError("expected 1,\n found 2")


def skip():
    raise SkippedError("no such thing")


def test_every_check_of_the_kernels_part_holds_on_a_cpu(tmp_path):
    """In a process of its own, which must not import what that part cannot count on."""
    names = ("transformers", "vllm", "megatron", "yaml")
    code = f"import sys; sys.modules.update(dict.fromkeys({names}))\n"
    code += "import gpu_check; sys.exit(gpu_check.main(sys.argv[1:]))"
    out = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-c", code, "kernels", "--device", "cpu", "--out", str(out)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    results = {result["name"]: result for result in report["results"]}
    assert report["part"] == "kernels" and report["torch"] == torch.__version__ and len(results) == 20
    skipped = {name for name, result in results.items() if result["verdict"] == "skip"}
    assert skipped == {
        "build: extension",
        "scorer: nothing read back",
        "sanitizer: memcheck",
        "sanitizer: racecheck",
    }
    assert all(result["measured_ms"] > 0 for name, result in results.items() if name.startswith("time: "))
    assert "16 pass, 0 fail, 4 skip" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("part", ["kernels", "system"])
def test_without_a_gpu_it_says_so(part, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert gpu_check.main([part]) == 2
    assert "expected a GPU that torch" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_unknown_parts_are_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        gpu_check.main(["everything"])
    assert caught.value.code == 2 and "everything" in capsys.readouterr().err


def test_what_checks_raise_becomes_their_result():
    checks = [Check("a", lambda: Outcome("fine", 2.0, 0.5)), Check("b", fail), Check("c", skip)]
    results = list(run_checks(checks, 60.0))
    assert [result.verdict for result in results] == [Verdict.PASS, Verdict.FAIL, Verdict.SKIP]
    assert [result.detail for result in results] == ["fine", "ValueError: expected 1, found 2", "no such thing"]
    assert summary(results) == "1 pass, 1 fail, 1 skip"
    assert "2.000 ms, floor 0.500 ms (4.0x)" in format_result(results[0])


def test_no_check_starts_after_the_limit():
    checks = [Check("slow", lambda: time.sleep(0.05) or Outcome("")), Check("late", fail)]
    assert [result.verdict for result in run_checks(checks, 0.01)] == [Verdict.PASS, Verdict.SKIP]


def test_a_failed_check_is_exit_code_1(monkeypatch, tmp_path):
    failed = Result("x", Verdict.FAIL, "", 0.0)
    monkeypatch.setattr(gpu_check, "kernel_checks", lambda options, device: iter([failed]))
    assert gpu_check.main(["kernels", "--device", "cpu", "--out", str(tmp_path / "report.json")]) == 1


def test_the_build_is_asked_for_this_gpu_and_says_what_failed(monkeypatch):
    calls = []

    def run(command, **options):
        calls.append((command, options))
        return subprocess.CompletedProcess(command, 1, "", "no such header")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    monkeypatch.setattr(gpu_check.compile_kernels, "find_nvcc", lambda: "/toolkit/bin/nvcc")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(RuntimeError, match="no such header"):
        gpu_check.build_extension(torch.device("cuda"))
    ((command, options),) = calls
    wanted = {"TRACE_BUILD": "cuda", "CUDA_HOME": "/toolkit", "TORCH_CUDA_ARCH_LIST": "9.0"}
    assert command[1:] == ["setup.py", "build_ext", "--inplace"] and wanted.items() <= options["env"].items()
    monkeypatch.setattr(gpu_check.compile_kernels, "find_nvcc", lambda: None)
    with pytest.raises(RuntimeError, match=r"expected nvcc .*, found none: pip install --no-deps -r requirements-nvcc"):
        gpu_check.build_extension(torch.device("cuda"))


def test_floors():
    peak = floors.peak_of("NVIDIA H200 NVL")
    assert floors.floor_ms(4.8e9, 0, peak) == pytest.approx(1.0)
    assert floors.floor_ms(0, 989e9, peak) == pytest.approx(1.0)
    assert floors.peak_of("GeForce") is None and floors.floor_ms(1, 1, None) is None


def test_pairs_are_counted_as_the_mask_says():
    generator = torch.Generator().manual_seed(1)
    forests = [shapes.random_forest(size, 3, generator) for size in (30, 1, 17)]
    layout = shapes.layout_of(forests, [20, 0, 3], generator)
    end, i = layout.subtree_end, torch.arange(48)
    seen = (i <= i[:, None]) & (i[:, None] < end)
    assert shapes.num_pairs(layout) == int(seen.sum()) + 30 * 20 + 17 * 3
    assert shapes.rollout_forest(2, 2, 3).tolist() == [8, 8, 5, 5, 5, 8, 8, 8]


def test_cases_of_the_system_part_end_with_their_families(tmp_path):
    assert system.run_case(["-c", "print('one'); print('two')"], 20.0) == "two"
    with pytest.raises(RuntimeError, match="exit code 3: broken"):
        system.run_case(["-c", "print('broken'); raise SystemExit(3)"], 20.0)
    marker = tmp_path / "alive"
    child = f"import time; time.sleep(3); open({str(marker)!r}, 'w')"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    with pytest.raises(RuntimeError, match="an end within 1 s"):
        system.run_case(["-c", parent], 1.0)
    time.sleep(3)
    assert not marker.exists()


@pytest.mark.parametrize("colocated", [False, True])
def test_the_step_s_configuration_is_one(colocated, tmp_path):
    settings = system.step_settings(tmp_path, str(tmp_path), colocated)
    config = load_config(ROOT / "configs/quickstart.yaml", settings)
    assert config.engine.colocated is colocated and config.run.output_dir == str(tmp_path) and config.run.steps == 1


def test_a_missing_model_or_second_gpu_skips(tmp_path):
    for check in system.system_checks(tmp_path):
        if check.name.endswith(("wakes", "step", "turns", "nccl")):
            with pytest.raises(SkippedError, match="needs an"):
                check.run()
