"""Replay BFCL's ground truth through the environment: all 800 conversations, as a policy's tool calls.

    python tools/check_bfcl.py [--rounds 3] [--concurrent 32] [--seed 0]

Random order, many at once, one process. Each conversation is also played wrongly first (its first call is left out),
and its observations are compared with those of the package's own executor. Ends with exit code 1 unless every right
replay earns 1, every observation is equal, and memory stays flat over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import random
import sys
import time
from dataclasses import dataclass, field

import psutil
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils

from trace_megatron.envs.bfcl import BFCL
from trace_megatron.envs.bfcl_data import Entry, load_entries
from trace_megatron.envs.bfcl_replay import ground_truth_actions
from trace_megatron.types import Task

MAX_GROWTH_MIB = 8.0
"""Of resident memory between the first round's end and the last's: the allocator's noise."""


@dataclass
class Count:
    right: int = 0
    wrong_with_reward: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    num_steps: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrent", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    memory_mib, passed = [], True
    for number in range(arguments.rounds):
        start_s, globals_before = time.perf_counter(), len(vars(multi_turn_utils))
        count = asyncio.run(play_all(arguments.concurrent, arguments.seed + number))
        memory_mib.append(psutil.Process().memory_info().rss / 2**20)
        leaked = len(vars(multi_turn_utils)) - globals_before
        print(
            f"round {number}: {count.right}/{len(load_entries())} right, {len(count.wrong_with_reward)} wrong replays "
            f"with reward, {len(count.different)} with other observations, {leaked} instances left, "
            f"{count.num_steps} steps in {time.perf_counter() - start_s:.1f} s, {memory_mib[-1]:.1f} MiB"
        )
        for line in [*count.failed, *count.different][:10]:
            print(f"  {line}")
        passed &= count.right == len(load_entries()) and not count.different and not leaked
    growth = memory_mib[-1] - memory_mib[0]
    print(f"memory grew by {growth:.1f} MiB after the first round")
    sys.exit(not passed or growth > MAX_GROWTH_MIB)


async def play_all(concurrent: int, seed: int) -> Count:
    entries = list(load_entries().values())
    random.Random(seed).shuffle(entries)
    environment, count, slots = BFCL(), Count(), asyncio.Semaphore(concurrent)

    async def play(entry: Entry) -> None:
        async with slots:
            await play_entry(environment, entry, count)

    await asyncio.gather(*(play(entry) for entry in entries))
    return count


async def play_entry(environment: BFCL, entry: Entry, count: Count) -> None:
    actions = ground_truth_actions(entry)
    first_call = next(index for index, action in enumerate(actions) if "<tool_call>" in action)
    reward, _ = await replay(environment, entry, actions[:first_call] + actions[first_call + 1 :], count)
    if reward:
        count.wrong_with_reward.append(entry.entry_id)
    reward, results = await replay(environment, entry, actions, count)
    count.right += reward == 1.0
    if reward != 1.0:
        count.failed.append(f"{entry.entry_id} was judged wrong")
    for (call, expected), result in zip(official_results(entry), results, strict=True):
        if result != expected:
            count.different.append(f"{entry.entry_id}, {call}: expected {expected[:200]!r}, found {result[:200]!r}")


async def replay(environment: BFCL, entry: Entry, actions: list[str], count: Count) -> tuple[float, list[str]]:
    """The reward at the end, and what the tools answered."""
    state = await environment.reset(Task(entry.entry_id, (), {"entry_id": entry.entry_id}))
    results: list[str] = []
    for action in actions:
        await asyncio.sleep(0)  # others go on here
        transition = await environment.step(state, action)
        state = transition.state
        results += [message["content"] for message in transition.observation if message["role"] == "tool"]
        count.num_steps += 1
    if not transition.done:
        raise AssertionError(f"{entry.entry_id} did not end with its ground truth")
    return transition.reward, results


def official_results(entry: Entry) -> list[tuple[str, str]]:
    """Each call of the ground truth with the answer of the package's own executor."""
    name = "official_executor"
    calls = [call for turn in entry.ground_truth for call in turn]
    with contextlib.redirect_stdout(io.StringIO()):
        answers, _ = multi_turn_utils.execute_multi_turn_func_call(
            calls,
            entry.record["initial_config"],
            list(entry.classes),
            name,
            entry.entry_id,
            long_context=entry.subset == "long_context",
        )
    for key in [key for key in vars(multi_turn_utils) if key.startswith(name)]:
        delattr(multi_turn_utils, key)
    return list(zip(calls, answers, strict=True))


if __name__ == "__main__":
    main()
