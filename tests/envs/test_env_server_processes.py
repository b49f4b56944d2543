"""`trace-megatron serve-env` as processes: a step over two, the death of one, and nothing that outlives them."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import psutil
import pytest
from env_clients import client, tasks_of
from scripted_engine import ScriptedEngine, build_renderer

from trace_megatron.algorithm.selectors import build_selector
from trace_megatron.algorithm.tree import num_units, prefix_anchors
from trace_megatron.config import BudgetConfig, EnvConfig, MethodConfig, RolloutConfig
from trace_megatron.envs import build_environment
from trace_megatron.errors import UserError
from trace_megatron.rollout.collector import Collector
from trace_megatron.types import Prompt, RolloutStatus, Task

COUNTS = [2, 3, 2, 1, 3, 3]


@contextmanager
def server_processes(folder, config: EnvConfig, count: int, owner: int = 0):
    """URLs and processes of `trace-megatron serve-env`."""
    path = folder / "env.yaml"
    path.write_text(json.dumps({"env": {"name": config.name, "params": dict(config.params)}}))
    command = [sys.executable, "-m", "trace_megatron.cli", "serve-env", "-c", str(path), "--port", "0"]
    command += ["--owner", str(owner)]
    with ExitStack() as stack:
        servers = []
        for _ in range(count):
            servers.append(stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
            stack.callback(servers[-1].kill)
        yield [server.stdout.readline().strip().removeprefix("listening on ") for server in servers], servers


def collect(environment, engine=None, progress=None, **rollout):
    """Trees of one step over an environment: the engine's actions follow from the histories."""
    renderer = build_renderer()
    config = RolloutConfig(max_turns=4, max_new_tokens=8, max_response_tokens=400, max_prompt_tokens=100, **rollout)
    budget = BudgetConfig(candidates=6, rollouts=14, continuations=2)
    selector = build_selector(MethodConfig(selector="trace"), budget)

    def score(trees):
        return [np.full(len(prefix_anchors(tree)), 0.5) for tree in trees]

    async def run():
        tasks = await tasks_of(environment)
        tasks = [await asyncio.to_thread(tasks.__getitem__, number) for number in range(6)]
        prompts = [Prompt(task.task_id, task, renderer.prompt_ids(task.messages)) for task in tasks]
        collector = Collector(engine or calculating(), environment, renderer, selector, score, config, run_seed=1)
        try:
            return await collector.collect(prompts, COUNTS, 1, progress)
        finally:
            await environment.close()

    return asyncio.run(run())


def calculating() -> ScriptedEngine:
    """Some answers are right, and some time passes."""

    def action(call) -> str:
        rng = random.Random(f"{call.token_ids}:{call.seed}")
        return rng.choice(["1+2", "2-1", "what", f"={rng.randint(0, 3)}"])

    async def wait(number, call) -> None:
        await asyncio.sleep(0.005)

    return ScriptedEngine(action=action, before=wait)


def test_a_step_over_two_server_processes_is_that_of_the_environment_here_and_survives_the_death_of_one(tmp_path):
    config = EnvConfig("calculator", {"max_operations": 1, "max_number": 2, "size": 20})
    here = collect(build_environment(config))
    finished = [rollout for tree in here for rollout in tree.rollouts if rollout.status is RolloutStatus.FINISHED]
    assert 0 < sum(rollout.reward for rollout in finished) < len(finished)
    with server_processes(tmp_path, config, 2) as (urls, (first, second)):
        there = replace(config, urls=tuple(urls))
        assert collect(build_environment(there)) == here  # every token, reward, anchor and info

        def kill(num_done, num_planned):
            if num_done == 4:
                first.kill()

        struck = collect(build_environment(there), progress=kill, max_failed_share=1.0)
        assert [num_units(tree) for tree in struck] == [num_units(tree) for tree in here]
        bare = [
            (after, before)
            for count, mine, theirs in zip(COUNTS, struck, here, strict=True)
            for after, before in zip(mine.rollouts[:count], theirs.rollouts[:count], strict=True)
        ]
        failed = [after for after, _ in bare if after.status is RolloutStatus.ENV_ERROR]
        assert 0 < len(failed) < len(bare) and not any(rollout.trained for rollout in failed)
        assert all(f"{urls[0]} is lost" in rollout.info["error"] for rollout in failed)
        assert all(after == before for after, before in bare if after not in failed)

        with pytest.raises(UserError, match=f"{urls[0]}.*trace-megatron serve-env, or take it out of env.urls"):
            collect(build_environment(there))
        assert collect(build_environment(replace(config, urls=(urls[1],)))) == here
        second.terminate()
        assert second.wait(10) == 0


def test_no_sandbox_outlives_its_server(bubblewrap, tmp_path):
    config = EnvConfig("python_tool", {"workers": 1})

    async def use(url):
        async with client(url, config=config) as there:
            state = await there.reset(Task("t", (), {"answers": ["6"]}))
            return (await there.step(state, "```python\nprint(2 * 3)\n```")).observation[0]["content"]

    async def use_all(urls):
        return await asyncio.gather(*map(use, urls))

    with ExitStack() as stack:
        owner = stack.enter_context(subprocess.Popen(["sleep", "600"]))
        stack.callback(owner.kill)
        urls, servers = stack.enter_context(server_processes(tmp_path, config, 2, owner.pid))
        assert asyncio.run(use_all(urls)) == ["```output\n6\n```"] * 2
        families = [psutil.Process(server.pid).children(recursive=True) for server in servers]
        assert all(families)
        servers[0].kill()
        assert servers[0].wait(10) == -signal.SIGKILL
        owner.kill()
        assert servers[1].wait(10) == 0
        assert not psutil.wait_procs([process for family in families for process in family], timeout=5)[1]
