"""A real `vllm serve` for tests."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trace_megatron.rollout.serve_flags import SERVE_FLAGS

START_S = 240
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
# The CPU build's package is not called vllm, which its `vllm` command does not survive; this is the same server.
SERVE = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--dtype", "float32", "--enforce-eager")
SERVE += ("--block-size", "32", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serve(
    model: Path,
    log: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    flags: str = SERVE_FLAGS,
    max_model_len: int = 512,
    prefix: Sequence[str] = (),
    wait: bool = True,
) -> Iterator[tuple[str, subprocess.Popen]]:
    """URL and process of a server of ``model``; ``prefix``: a command that runs it, as in another namespace."""
    port = port or free_port()
    command = [*prefix, *SERVE, "--model", str(model), "--host", host, "--port", str(port)]
    command += ["--max-model-len", str(max_model_len), *shlex.split(flags)]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **ENVIRONMENT}, stdout=output, stderr=output, start_new_session=True
        )
    url = f"http://{host}:{port}"
    try:
        if wait:
            wait_until_up(url, process, log)
        yield url, process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()


def wait_until_up(url: str, process: subprocess.Popen, log: Path) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(f"no server after {START_S} s: {log.read_text()[-3000:]}")
