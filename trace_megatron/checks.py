"""Mistakes that can be found before anything is started: one sentence each, nothing written."""

from __future__ import annotations

import http.client
import re
import urllib.request
from pathlib import Path

import torch

from trace_megatron.algorithm.selectors import build_selector
from trace_megatron.config import Config
from trace_megatron.envs import build_environment
from trace_megatron.errors import UserError
from trace_megatron.policy.hf_config import read_hf_config
from trace_megatron.policy.layout import check_parallel
from trace_megatron.policy.offload import check_offload

_ANSWER_S = 30.0
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # aiohttp, which calls them later, asks none


def check_config(config: Config) -> None:
    """Raise UserError for settings that cannot work together or whose files are not there."""
    check_engine(config)
    if not config.env.urls:
        _check_tasks(config)
    model = read_hf_config(config.policy.model)
    check_parallel(model, config.policy)
    check_offload(config, model.num_layers)
    rollout, loss = config.rollout, config.loss
    if rollout.top_p < 1 and loss.old_logprobs == "bypass":
        raise UserError(
            f"expected rollout.top_p=1 with loss.old_logprobs=bypass, found {rollout.top_p}: the engine's logprobs are"
            f" those of the truncated distribution, so set loss.old_logprobs=decoupled"
        )
    if config.engine.colocated and config.engine.urls:
        raise UserError("expected no engine.urls with engine.colocated=true: servers have devices of their own")
    if config.engine.colocated and config.policy.dtype == "float32" and torch.cuda.is_available():
        raise UserError(
            "expected policy.dtype=bfloat16 with engine.colocated=true, found float32: Megatron's optimizer holds"
            " float32 weights themselves, and would move them apart from the model's"
        )
    _check_overlap(config)
    if 0 < loss.dual_clip <= 1:
        raise UserError(f"expected loss.dual_clip above 1, or 0 for none, found {loss.dual_clip}")
    if loss.reference_model:
        read_hf_config(loss.reference_model)
    selector = build_selector(config.method, config.budget)
    if (selector.needs_root_scores or selector.needs_prefix_scores) and config.predictor.kind == "none":
        raise UserError(
            f"expected a predictor for method.selector={config.method.selector}, found predictor.kind=none:"
            f" set predictor.kind=model and predictor.model, or predictor.kind=constant as a control"
        )
    if config.predictor.kind == "model" and not (Path(config.predictor.model) / "config.json").is_file():
        raise UserError(f"expected a Hugging Face folder at predictor.model, found none at '{config.predictor.model}'")


def check_servers(config: Config) -> None:
    """Raise UserError for a server that is not there, or is another's. For the process that drives the run."""
    for url in config.engine.urls:
        try:
            with _opener.open(f"{url.rstrip('/')}/health", timeout=_ANSWER_S):
                pass
        except (OSError, http.client.HTTPException) as error:
            raise UserError(
                f"expected a vllm server of engine.urls at {url}, found none that answers: {error}; start it there "
                "(docs/engines.md), or take it out of engine.urls"
            ) from error
    if config.env.urls:
        _check_tasks(config)


def _check_tasks(config: Config) -> None:
    if not len(build_environment(config.env).tasks("train")):
        raise UserError("expected tasks to train on, found an empty data set: check env.params")


def _check_overlap(config: Config) -> None:
    rollout, loss = config.rollout, config.loss
    if rollout.max_staleness < 0:
        raise UserError(f"expected rollout.max_staleness of at least 0, found {rollout.max_staleness}")
    if rollout.max_staleness and loss.old_logprobs != "decoupled":
        raise UserError(
            f"expected loss.old_logprobs=decoupled with rollout.max_staleness={rollout.max_staleness}, found"
            f" {loss.old_logprobs}: rollouts of older weights need importance weights"
        )
    if rollout.max_staleness and config.engine.colocated:
        raise UserError(
            f"expected rollout.max_staleness=0 with engine.colocated=true, found {rollout.max_staleness}: engines that"
            " sleep while the policy trains cannot sample meanwhile"
        )
    if not 0 <= rollout.carried_share < 1:
        raise UserError(f"expected rollout.carried_share in [0, 1), found {rollout.carried_share}")
    if rollout.carried_share and rollout.max_staleness < 2:
        raise UserError(
            f"expected rollout.max_staleness of at least 2 with rollout.carried_share={rollout.carried_share:g}, found"
            f" {rollout.max_staleness}: a tree that is carried over is trained two updates late"
        )


def check_engine(config: Config) -> None:
    """The part of the checks that evaluation needs too."""
    model = read_hf_config(config.policy.model)
    rollout, validation = config.rollout, config.validation
    counts = {
        "run.steps": config.run.steps,
        "policy.tokens_per_micro_batch": config.policy.tokens_per_micro_batch,
        "rollout.max_turns": rollout.max_turns,
        "rollout.max_new_tokens": rollout.max_new_tokens,
        "rollout.max_prompt_tokens": rollout.max_prompt_tokens,
        "rollout.max_response_tokens": rollout.max_response_tokens,
        "engine.tensor_parallel": config.engine.tensor_parallel,
        "engine.max_num_seqs": config.engine.max_num_seqs,
        "engine.num_engines": config.engine.num_engines,
        "validation.prompts": validation.prompts,
        "validation.samples": validation.samples,
    }
    for name, count in counts.items():
        if count < 1:
            raise UserError(f"expected {name} of at least 1, found {count}")
    for option, urls in (("engine.urls", config.engine.urls), ("env.urls", config.env.urls)):
        for url in urls:
            if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url):
                raise UserError(f"expected addresses like http://HOST:PORT in {option}, found '{url}'")
        if len(set(urls)) < len(urls):
            raise UserError(f"expected servers once each in {option}, found {', '.join(urls)}")
    if config.engine.timeout_s <= 0:
        raise UserError(f"expected engine.timeout_s above 0, found {config.engine.timeout_s}: 1800 is half an hour")
    if validation.temperature <= 0:
        raise UserError(
            f"expected validation.temperature above 0, found {validation.temperature}: 0.01 is all but greedy"
        )
    if rollout.temperature <= 0:
        raise UserError(
            f"expected rollout.temperature above 0, found {rollout.temperature}: greedy rollouts have no group"
        )
    if not 0 < rollout.top_p <= 1:
        raise UserError(f"expected rollout.top_p in (0, 1], found {rollout.top_p}")
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    if longest > model.max_positions:
        raise UserError(
            f"expected rollout.max_prompt_tokens + rollout.max_response_tokens within the model's {model.max_positions}"
            f" positions, found {longest}: lower one of them"
        )
    if model.num_heads % config.engine.tensor_parallel:
        raise UserError(
            f"expected engine.tensor_parallel to divide the model's {model.num_heads} attention heads,"
            f" found {config.engine.tensor_parallel}"
        )
