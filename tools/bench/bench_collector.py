"""The driver's own cost: thousands of open episodes through the real collector, with a scripted engine and environment.

    python tools/bench/bench_collector.py [--episodes 3000] [--turns 40] [--selector uniform|trace]

An event is one turn: a request to the engine, its completion, the environment's answer, and the history that grows by
both through the chat template. Engine and environment answer at once, so the time is the driver's. Memory is the
process's, above what it held before the first episode.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from tiny_models import build_tokenizer

from trace_megatron.algorithm.selectors import build_selector
from trace_megatron.algorithm.tree import prefix_anchors
from trace_megatron.config import BudgetConfig, MethodConfig, RolloutConfig
from trace_megatron.rollout.chat import ChatRenderer
from trace_megatron.rollout.collector import Collector
from trace_megatron.rollout.engine import Completion, SamplingSettings
from trace_megatron.rollout.env import Transition
from trace_megatron.types import Prompt, RolloutTree, Task

PROCESS = psutil.Process()


class ScriptedEngine:
    """Answers with random ids of a fixed number, and counts the requests that are open."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self.num_open = self.most_open = self.num_requests = 0
        self.peak_bytes = 0

    async def generate(
        self, token_ids: Sequence[int], settings: SamplingSettings, seed: int, affinity: str = ""
    ) -> Completion:
        self.num_requests += 1
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        if self.num_requests % 1000 == 0:
            self.peak_bytes = max(self.peak_bytes, PROCESS.memory_info().rss)
        await asyncio.sleep(0)
        self.num_open -= 1
        rng = random.Random(seed)
        ids = (*(rng.randrange(32, 127) for _ in range(self._num_tokens - 1)), settings.stop_token_ids[0])
        return Completion(ids, (-1.0,) * len(ids), True, 1)


class ScriptedEnvironment:
    """Ends an episode after a number of turns that depends on what was said, ``longest`` at most."""

    def __init__(self, longest: int, observation: str) -> None:
        self._longest = longest
        self._observation = ({"role": "user", "content": observation},)

    def tasks(self, split: str) -> list[Task]:
        return []

    async def reset(self, task: Task) -> int:
        return 0

    async def step(self, state: int, action: str) -> Transition:
        if state + 1 >= self._longest or sum(map(ord, action)) % self._longest == 0:
            return Transition(state + 1, (), float(len(action) % 2), True)
        return Transition(state + 1, self._observation, 0.0, False)

    async def close(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=3000)
    parser.add_argument("--turns", type=int, default=40, help="the longest episode; the mean is about 25")
    parser.add_argument("--action-tokens", type=int, default=60)
    parser.add_argument("--observation-tokens", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--selector", default="uniform")
    arguments = parser.parse_args()
    print(f"load average before: {psutil.getloadavg()[0]:.1f} on {psutil.cpu_count()} cores")
    asyncio.run(measure(arguments))


async def measure(arguments: argparse.Namespace) -> None:
    renderer = ChatRenderer(build_tokenizer())
    engine = ScriptedEngine(arguments.action_tokens)
    environment = ScriptedEnvironment(arguments.turns, "o" * arguments.observation_tokens)
    budget = BudgetConfig(arguments.prompts, arguments.episodes, 2 if arguments.selector != "uniform" else 0)
    longest = arguments.turns * (arguments.action_tokens + arguments.observation_tokens + 60)
    config = RolloutConfig(max_turns=arguments.turns, max_response_tokens=longest)
    selector = build_selector(MethodConfig(selector=arguments.selector), budget)
    collector = Collector(engine, environment, renderer, selector, constant_scores, config, run_seed=0)
    tasks = [Task(str(n), ({"role": "user", "content": f"Task {n}" * 20},), {}) for n in range(arguments.prompts)]
    prompts = [Prompt(task.task_id, task, renderer.prompt_ids(task.messages)) for task in tasks]
    counts = np.full(arguments.prompts, arguments.episodes // arguments.prompts)
    before = PROCESS.memory_info().rss
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    trees = await collector.collect(prompts, counts, step=1)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    rollouts = [rollout for tree in trees for rollout in tree.rollouts]
    num_tokens = sum(len(t.action_ids) + len(t.observation_ids) for rollout in rollouts for t in rollout.turns)
    peak_bytes = max(engine.peak_bytes, PROCESS.memory_info().rss) - before
    print(f"{len(rollouts)} episodes, {engine.most_open} open at once, {engine.num_requests} events")
    wall_us, cpu_us = (1e6 * seconds / engine.num_requests for seconds in (wall_s, cpu_s))
    print(f"{wall_s:.1f} s, per event {wall_us:.0f} us ({cpu_us:.0f} us of processor time)")
    print(f"memory +{peak_bytes / 2**20:.0f} MiB at its peak, {peak_bytes / num_tokens:.0f} bytes per token")


def constant_scores(trees: Sequence[RolloutTree]) -> list[np.ndarray]:
    return [np.full(len(prefix_anchors(tree)), 0.5) for tree in trees]


if __name__ == "__main__":
    main()
