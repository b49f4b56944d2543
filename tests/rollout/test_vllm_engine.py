"""A live vLLM engine beside torch.distributed in a rank that torchrun started, against transformers in float64."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.rollout.engine_owner import MAX_MODEL_LEN, PROMPTS, SETTINGS
from tests.tiny_models import write_tiny_model
from trace_megatron.config import EngineConfig
from trace_megatron.errors import UserError
from trace_megatron.rollout.engine import EngineError
from trace_megatron.rollout.engine_main import shared_files
from trace_megatron.rollout.vllm_engine import VLLMEngine

SHAPE = {"tied": False, "hidden": 64, "head_dim": 32, "initializer_range": 0.2}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return [write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", seed=seed, **SHAPE) for seed in (1, 2)]


@pytest.fixture(scope="module")
def owner(models, tmp_path_factory):
    """The rank's process, its answers, and (process id, folder) of its engine."""
    path = tmp_path_factory.mktemp("owner") / "answers.json"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": "0", "ROLE_RANK": "0"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.rollout.engine_owner", *map(str, models), str(path)],
        env={**os.environ, **ranks, **rendezvous},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        assert line, f"the engine's owner ended with exit code {process.wait()}"
        pid, folder = line.split()
        yield process, json.loads(path.read_text()), (int(pid), Path(folder))
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def answers(owner):
    return owner[1]


def token_ids(completions):
    return [completion["token_ids"] for completion in completions]


@torch.no_grad()
def expected_logprobs(model, prompt, completion, settings):
    """Of the distribution after temperature and top-p."""
    logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    logprobs = (logits / settings.temperature).log_softmax(-1)
    for row in logprobs if settings.top_p < 1 else ():
        order = row.argsort(descending=True)
        mass_before = row[order].exp().cumsum(0) - row[order].exp()
        row[order[mass_before >= settings.top_p]] = -torch.inf
    return logprobs.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


@pytest.mark.parametrize(
    ("answer", "settings", "which"),
    [(name, name, 0) for name in SETTINGS] + [("other model", "plain", 1)],
)
def test_logprobs_are_those_of_the_distribution_sampled_from(answers, models, answer, settings, which):
    model = AutoModelForCausalLM.from_pretrained(models[which], dtype=torch.float64)
    for prompt, completion in zip(PROMPTS, answers[answer], strict=True):
        expected = expected_logprobs(model, prompt, completion["token_ids"], SETTINGS[settings])
        assert expected.isfinite().all()
        found = torch.tensor(completion["logprobs"], dtype=torch.float64)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        assert completion["weight_version"] == which


@pytest.mark.parametrize("neighbours", ["alone", "backwards", "crowded"])
def test_a_seed_gives_the_same_tokens_in_any_company(answers, neighbours):
    assert token_ids(answers[neighbours]) == token_ids(answers["plain"])


def test_seeds_and_temperatures_change_what_is_sampled(answers):
    for other in ("other seeds", "cool", "nucleus", "other model"):
        assert all(
            mine != theirs for mine, theirs in zip(token_ids(answers[other]), token_ids(answers["plain"]), strict=True)
        )


def test_a_stop_token_ends_the_completion_and_is_kept(answers):
    plain, stopped = answers["plain"][0], answers["stopped"]
    assert not plain["stopped"] and len(plain["token_ids"]) == 16
    assert stopped["stopped"]
    length = 1 + min(
        plain["token_ids"].index(stop) for stop in (plain["token_ids"][5], 3) if stop in plain["token_ids"]
    )
    assert stopped["token_ids"] == plain["token_ids"][:length]
    assert len(stopped["logprobs"]) == length


def test_lengths_beyond_the_engine(answers):
    assert not answers["cut"]["stopped"]
    assert len(answers["cut"]["token_ids"]) == 4
    assert str(MAX_MODEL_LEN) in answers["too long"]


def test_a_completion_sampled_in_pieces_is_the_same_text(answers):
    """All but greedily, as pieces have seeds of their own: the plain-text scaffold of base models samples so."""
    whole, pieces = answers["greedy"]["token_ids"], answers["in pieces"]["token_ids"]
    assert len(pieces) == 80 and pieces == whole[:80]
    assert len(answers["in pieces"]["logprobs"]) == 80 and not answers["in pieces"]["stopped"]


def test_no_process_or_file_outlives_the_owner(owner):
    """Last: it kills the owner."""
    process, _, (core, folder) = owner
    family = [psutil.Process(core), *psutil.Process(core).children(recursive=True)]
    files = set().union(*(shared_files(member.pid) for member in family))
    assert files and folder.is_dir()
    listening = [entry for entry in psutil.Process(core).net_connections() if entry.status == psutil.CONN_LISTEN]
    assert {entry.laddr.ip for entry in listening} <= {"127.0.0.1", "::1"}
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(member.is_running() for member in family):
        time.sleep(0.05)
    assert not any(member.is_running() for member in family)
    assert not folder.exists()
    assert not any(file.exists() for file in files)


def refusal(engine):
    with pytest.raises(UserError) as caught:
        asyncio.run(engine.start())
    return str(caught.value)


def test_a_folder_without_a_model_is_refused(tmp_path):
    assert "no config.json" in refusal(VLLMEngine(tmp_path, EngineConfig(), max_model_len=64))


def test_more_tokens_than_positions_are_refused(models):
    message = refusal(VLLMEngine(models[0], EngineConfig(), max_model_len=4096))
    assert "at most 2048" in message and "4096" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="concerns vLLM's CPU attention")
def test_a_head_size_unknown_to_cpu_attention_is_refused(tmp_path):
    folder = write_tiny_model(tmp_path, "llama", head_dim=16)
    assert "found 16" in refusal(VLLMEngine(folder, EngineConfig(), max_model_len=64))


def test_an_engine_that_was_not_started_says_so():
    engine = VLLMEngine("nowhere", EngineConfig(), max_model_len=64)
    with pytest.raises(EngineError, match="call start"):
        asyncio.run(engine.generate([1], SETTINGS["plain"], 0))
    asyncio.run(engine.close())
