"""Checks on a GPU what tests can only run on a CPU. Prints a line per check and writes all of them as JSON.

    python tools/gpu_check.py kernels      # needs torch 2.11 or newer, nvcc and one GPU; under 8 minutes
    python tools/gpu_check.py system       # needs the whole installation: Megatron, vLLM, a model folder

kernels: builds the extension, runs every op and the predictor's scorer and allocator against their references, under
compute-sanitizer where it is installed, and times them against what memory and arithmetic allow.
system: the engine, weights live by each backend, sleep and wake, and one TRACE step; each with a time limit.

Exit code 0 where nothing failed, 1 where a check did, 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
import compile_kernels  # noqa: E402
from gpu_checks.results import Check, Outcome, SkippedError, Verdict, format_result, run_check, run_checks, summary  # noqa: E402

LIMIT_S = {"kernels": 360.0, "system": 3600.0}  # no check starts later
_BUILD_LIMIT_S, _SANITIZER_LIMIT_S = 300.0, 100.0  # ninja makes the build several times faster


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(
            f"error: expected a GPU that torch {torch.__version__} can use, found none: run this on a machine with "
            "one, with a CUDA build of torch (--device cpu tries the checks themselves, at small sizes)",
            file=sys.stderr,
        )
        return 2
    part = kernel_checks(options, device) if options.part == "kernels" else system_checks(options)
    results = []
    for result in part:
        results.append(result)
        print(format_result(result), flush=True)
    report = {**machine(device), "part": options.part, "results": [asdict(result) for result in results]}
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{summary(results)}; {options.out}")
    return int(any(result.verdict == Verdict.FAIL for result in results))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog=__doc__.split("\n\n", 1)[1],
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("part", choices=("kernels", "system"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small sizes, no floors")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="checks whose name contains one of these"
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--model", type=Path, default=ROOT / "models/smollm2-135m-instruct", help="of part system")
    return parser.parse_args(arguments)


def machine(device: torch.device) -> dict[str, str]:
    """What the figures belong to."""
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "device": name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
    }


def kernel_checks(options: argparse.Namespace, device: torch.device):
    """Build first: what is imported after it finds the extension."""
    build = [
        run_check(check) for check in chosen([Check("build: extension", lambda: build_extension(device))], options.only)
    ]
    yield from build
    from gpu_checks.correctness import correctness_checks
    from gpu_checks.floors import peak_of
    from gpu_checks.scorer import scorer_checks
    from gpu_checks.timing import timing_checks

    on_gpu = device.type == "cuda"
    checks = correctness_checks(device, rounds=60 if on_gpu else 3)
    checks += scorer_checks(device, num_trees=64 if on_gpu else 3)
    checks += timing_checks(device, peak_of(machine(device)["device"]) if on_gpu else None, small=not on_gpu)
    checks += [
        Check(f"sanitizer: {tool}", lambda tool=tool: sanitize(device, tool)) for tool in ("memcheck", "racecheck")
    ]
    yield from run_checks(chosen(checks, options.only), LIMIT_S["kernels"] - sum(result.seconds for result in build))


def chosen(checks: list[Check], only: list[str]) -> list[Check]:
    return [check for check in checks if any(text in check.name for text in only)]


def build_extension(device: torch.device) -> Outcome:
    if device.type != "cuda":
        raise SkippedError("needs a GPU")
    nvcc = compile_kernels.find_nvcc()
    if nvcc is None:
        raise RuntimeError(
            "expected nvcc in $NVCC, $CUDA_HOME, PATH or this Python's packages, found none: "
            "pip install --no-deps -r requirements-nvcc.txt"
        )
    major, minor = torch.cuda.get_device_capability(device)
    environment = {
        "TRACE_BUILD": "cuda",
        "CUDA_HOME": os.environ.get("CUDA_HOME", str(Path(nvcc).parents[1])),
        "TORCH_CUDA_ARCH_LIST": f"{major}.{minor}",
        "MAX_JOBS": str(os.cpu_count()),
    }
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=_BUILD_LIMIT_S,
    )
    if done.returncode:
        raise RuntimeError(f"expected the extension to build, found {done.stderr[-1500:]}")
    return Outcome(f"TRACE_BUILD=cuda for {major}.{minor}")


def sanitize(device: torch.device, tool: str) -> Outcome:
    """The ops' checks again under compute-sanitizer, which slows them down a lot."""
    path = shutil.which("compute-sanitizer")
    if device.type != "cuda" or path is None:
        raise SkippedError("needs a GPU and compute-sanitizer")
    names = ["correct: allocate", "correct: tree_block", "correct: value", "correct: prefix"]
    command = [path, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, "kernels", "--only", *names]
    try:
        done = subprocess.run(
            [*command, "--out", os.devnull], capture_output=True, text=True, timeout=_SANITIZER_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise SkippedError(f"took longer than {_SANITIZER_LIMIT_S:.0f} s") from None
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    return Outcome("no errors")


def system_checks(options: argparse.Namespace):
    from gpu_checks.system import system_checks

    return run_checks(chosen(system_checks(options.model), options.only), LIMIT_S["system"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
