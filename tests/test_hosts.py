"""Training over several hosts: two trainer hosts meet over gloo; a third one samples and plays the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import yaml
from hosts import INTERFACE, hosts
from served import serve
from tiny_models import write_tiny_model

from trace_megatron.config import ENV_TOKEN
from trace_megatron.tree_files import read_trees

STEPS = 2
ENV = {"name": "reasoning_gym", "params": {"tasks": {"letter_counting": {"min_words": 1, "max_words": 3}}}}
TIMEOUT_S = 400
WAIT = """
import sys, time, urllib.request
for url in sys.argv[1:]:
    while True:
        try:
            urllib.request.urlopen(url + "/health", timeout=5)
            break
        except OSError:
            time.sleep(0.5)
"""


def write_config(folder: Path, model: Path, url: str, env_url: str, address: str) -> Path:
    values = {
        "run": {"name": "run", "output_dir": str(folder), "steps": STEPS, "seed": 3},
        "policy": {"model": str(model), "dtype": "float32", "pipeline_parallel": 2, "tokens_per_micro_batch": 1024},
        "optimizer": {"learning_rate": 1e-3},
        "method": {"selector": "treepo", "advantage": "tree_rpo"},
        "budget": {"candidates": 4, "rollouts": 8, "continuations": 2},
        "rollout": {"max_turns": 2, "max_new_tokens": 8, "max_prompt_tokens": 256, "max_response_tokens": 256},
        "engine": {"dtype": "float32", "urls": [url]},
        "sync": {"address": address},
        "env": ENV | {"urls": [env_url]},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def start_rank(host, rank: int, master: str, config: Path, log: Path) -> subprocess.Popen:
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": master,
        "MASTER_PORT": "29511",
        "GLOO_SOCKET_IFNAME": INTERFACE,
        ENV_TOKEN: "secret",
    }
    command = [*host.prefix, sys.executable, "-m", "trace_megatron.cli", "train", "-c", str(config)]
    with log.open("w") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output)


@contextmanager
def serve_environment(host, folder: Path) -> Iterator[str]:
    """The address of an environment server on a host."""
    path = folder / "env.yaml"
    path.write_text(yaml.safe_dump({"env": ENV}))
    command = [*host.prefix, sys.executable, "-m", "trace_megatron.cli", "serve-env", "-c", str(path)]
    server = subprocess.Popen([*command, "--host", host.address], env=os.environ | {ENV_TOKEN: "secret"})
    try:
        yield f"http://{host.address}:8500"
    finally:
        server.terminate()
        assert server.wait(10) == 0


def test_two_trainer_hosts_and_servers_on_a_third(tmp_path):
    model = write_tiny_model(tmp_path / "model", "qwen3", tied=False, head_dim=32)
    with ExitStack() as stack:
        first, second, third = stack.enter_context(hosts(3))
        # The model runs in the engine's process: test_served_engine.py has a server with a worker, ten seconds more.
        prefix = [*third.prefix, "env", "VLLM_ENABLE_V1_MULTIPROCESSING=0"]
        address = {"host": third.address, "port": 8000, "prefix": prefix}
        url, _ = stack.enter_context(serve(model, tmp_path / "server.log", wait=False, **address))
        env_url = stack.enter_context(serve_environment(third, tmp_path))
        config = write_config(tmp_path, model, url, env_url, first.address)
        # Only these hosts' network reaches the servers; so the wait is on it too.
        subprocess.run([*first.prefix, sys.executable, "-c", WAIT, url, env_url], check=True, timeout=TIMEOUT_S)
        logs = [tmp_path / f"rank{rank}.log" for rank in range(2)]
        ranks = [start_rank(host, rank, first.address, config, logs[rank]) for rank, host in enumerate((first, second))]
        try:
            codes = [rank.wait(TIMEOUT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    said = "\n".join(log.read_text() for log in logs)
    assert codes == [0, 0], said
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["engines/alive"] == 1 and line["sync/bytes"] > 0 for line in lines)
    assert all(line["rollout/failed_share"] == 0 for line in lines)
    trees = read_trees(tmp_path / "run" / "trees" / "step_000002.jsonl.zst")
    versions = {turn.weight_version for tree in trees for rollout in tree.rollouts for turn in rollout.turns}
    assert versions == {1}
