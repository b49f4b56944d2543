"""One rank of `trace-megatron train`: all build the policy, rank 0 drives the steps."""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trace_megatron.algorithm.selectors import PromptHistory, build_selector
from trace_megatron.checkpoints import Checkpoints
from trace_megatron.config import Config, load_config
from trace_megatron.errors import ColocationError, RolloutError, UserError, WeightSyncError
from trace_megatron.event_loop import EventLoop
from trace_megatron.log import progress, say
from trace_megatron.memory import used_memory_gib
from trace_megatron.metrics import MetricsWriter, StepMetrics, read_lines
from trace_megatron.policy.worker import Policy
from trace_megatron.predictor import ConstantPredictor, NeuralPredictor, Predictor, TimedScores, build_predictor
from trace_megatron.report.lines import describe_failures, describe_step, describe_totals
from trace_megatron.rollout.collector import Collector
from trace_megatron.rollout.engine import EngineError
from trace_megatron.run_folder import RunFolder, read_state
from trace_megatron.sampling import Sampling, max_model_len, open_sampling
from trace_megatron.step import Parts, Planned, grow, push_weights, run_step
from trace_megatron.tree_files import as_prompt, write_trees
from trace_megatron.weight_sync.colocation import Colocation
from trace_megatron.weight_sync.push import WeightSync

COLOCATION_LIMIT_S = 300.0
"""Of a sleep, a wake or an offload: moving a full GPU's memory over a slow bus takes a tenth of that."""


def run_rank(folder: RunFolder, config: Config, resume: bool) -> int:
    """One rank of a run; returns its exit code, having said in one line what went wrong.

    ``config`` comes from the caller, not from ``folder``: rank 0 of a cluster's job may still be preparing that.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that engines are closed
    try:
        train(folder, config, resume)
    except UserError as error:
        say(f"error: {error}")
        return 2
    except (ColocationError, WeightSyncError, EngineError, RolloutError) as error:
        say(f"error: {error}")
        return 1
    return 0


def train(folder: RunFolder, config: Config, resume: bool) -> None:
    """All ranks build the policy; rank 0 drives the steps, the others serve it until it stops."""
    with build_policy(config) as policy:
        # Scores asked for while the policy trains must not send its ranks anything: the driver then scores alone.
        alone = config.rollout.max_staleness > 0
        if alone and not policy.is_driver:
            policy.serve()
            return
        replicas = None if alone else policy.shared_ranks
        predictor = build_predictor(config.predictor, config.run.seed, replicas=replicas)
        if not policy.is_driver:
            policy.serve(predictor.repeat if isinstance(predictor, NeuralPredictor) else None)
            return
        checkpoint = folder.latest_checkpoint() if resume else None
        if checkpoint:  # before the engine starts: a checkpoint of another shape is refused at once
            policy.load_checkpoint(checkpoint / "policy")
        if config.engine.colocated:  # the engines' start finds the room that they will have
            policy.offload()
        with EventLoop() as loop, open_sampling(config, loop) as sampling:
            parts = build_parts(config, policy, predictor or ConstantPredictor(), sampling, loop)
            drive(parts, folder, checkpoint)


def drive(parts: Parts, folder: RunFolder, checkpoint: Path | None) -> None:
    """The run: restore, synchronise, step by step with validations and checkpoints, export."""
    config = parts.config
    first_step, unfinished = 1, []
    if checkpoint:
        last_step, unfinished = _restore(parts, checkpoint)
        first_step = last_step + 1
        say(f"resumed after step {last_step} from {checkpoint}")
    # The engine read its weights from disk. Now it gets the trainer's, and they are compared before a step is spent.
    sync, difference = push_weights(parts, version=first_step - 1)
    say(f"weights pushed in {sync.seconds:.1f} s; engine and trainer agree to {difference.max:.1e} in logprob")
    for step in sorted({planned.step for planned in unfinished}):
        grow(parts, step, [planned for planned in unfinished if planned.step == step], version=first_step - 1)
    writer = MetricsWriter(folder.root, first_step)
    checkpoints = Checkpoints(folder, parts.policy, parts.predictor)
    try:
        for step in range(first_step, config.run.steps + 1):
            metrics, trees = run_step(parts, step)
            metrics = _validated(parts, metrics)
            writer.write(metrics)
            say(describe_step(metrics, config.run.steps) + describe_failures(metrics))
            write_trees(folder.trees / f"step_{step:06d}.jsonl.zst", trees)
            checkpoints.finish(wait=False)  # of an earlier step, written meanwhile
            if _is_due(step, config.run.checkpoint_every) or step == config.run.steps:
                checkpoints.start(step, _state(parts, step))
        checkpoints.finish()
    finally:
        parts.loop.run(parts.collector.cancel())
        writer.close()
    if config.run.export_hf and not folder.hf.exists():
        parts.policy.export_hf(folder.hf)
        say(f"policy exported to {folder.hf}")
    for line in describe_totals([json.loads(text) for text in read_lines(folder.root / "metrics.jsonl")]):
        say(line)


def build_policy(config: Config) -> Policy:
    """On every rank. Raises UserError for a model folder, a layout or a number of processes that do not fit."""
    return Policy(
        config.policy,
        config.optimizer,
        config.loss,
        temperature=config.rollout.temperature,
        total_steps=config.run.steps,
        seed=config.run.seed,
    )


def build_parts(config: Config, policy: Policy, predictor: Predictor, sampling: Sampling, loop: EventLoop) -> Parts:
    """What ``drive`` works with, on a running engine."""
    prefix_scores = TimedScores(predictor)
    selector = build_selector(config.method, config.budget)
    return Parts(
        config=config,
        prompts=sampling.prompts("train"),
        predictor=predictor,
        prefix_scores=prefix_scores,
        selector=selector,
        history=PromptHistory(),
        collector=Collector(
            sampling.engine,
            sampling.environment,
            sampling.renderer,
            selector,
            prefix_scores,
            config.rollout,
            config.run.seed,
            max_model_len(config),
        ),
        planned={},
        policy=policy,
        weight_sync=WeightSync(sampling.engine, config.sync),
        colocation=Colocation(
            engines=lambda: list(sampling.engine),
            trainer=policy,
            measure=used_memory_gib,
            limit_s=COLOCATION_LIMIT_S,
            enabled=config.engine.colocated,
        ),
        sampling=sampling,
        loop=loop,
    )


def _state(parts: Parts, step: int) -> dict[str, Any]:
    """What a checkpoint after ``step`` holds beside policy and predictor.

    Of trees that still grow, the plan alone: a resumed run grows them from the root, with the same budget.
    """
    return {
        "step": step,
        "prompts": parts.prompts.state(),
        "history": parts.history.state_dict(),
        "planned": [asdict(planned) for planned in parts.planned.values()],
    }


def _restore(parts: Parts, checkpoint: Path) -> tuple[int, list[Planned]]:
    """Put every part but the policy where the checkpoint left it.

    Returns the step after which it was written, and what was planned by then and not trained on.
    """
    state = read_state(checkpoint)
    parts.predictor.load(checkpoint / "predictor")
    parts.prompts.load_state(state["prompts"])
    parts.history.load_state_dict(state["history"])
    planned = state.get("planned", [])  # checkpoints of earlier versions have none
    return state["step"], [Planned(**{**values, "prompt": as_prompt(values["prompt"])}) for values in planned]


def _validated(parts: Parts, metrics: StepMetrics) -> StepMetrics:
    if not _is_due(metrics.step, parts.config.validation.every):
        return metrics
    start_s = time.perf_counter()
    with progress("validation") as report:
        accuracy = parts.loop.run(parts.sampling.validate(report.update))
    seconds = {**metrics.seconds, "validation": time.perf_counter() - start_s}
    return StepMetrics(metrics.step, {**metrics.groups, "validation": accuracy}, seconds)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


if __name__ == "__main__":
    started = RunFolder(Path(sys.argv[1]))
    sys.exit(run_rank(started, load_config(started.config), resume="--resume" in sys.argv))
