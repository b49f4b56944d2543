"""From a root plan to rollout trees, each prompt at its own pace: no prompt waits for another.

Per prompt: bare rollouts -> prefix scores -> prefix plan -> continuations. Source: arXiv 2606.11119, stage 2.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from trace_megatron.algorithm.scores import Scores
from trace_megatron.algorithm.selectors import PrefixView, Selector, fallback_rollouts, prefix_view
from trace_megatron.algorithm.tree import CONTINUATION_UNITS, prefix_anchors
from trace_megatron.config import RolloutConfig
from trace_megatron.errors import RolloutError
from trace_megatron.rollout.chat import ChatRenderer
from trace_megatron.rollout.engine import RolloutEngine
from trace_megatron.rollout.env import Environment
from trace_megatron.rollout.episode import Episode, EpisodeRunner, Visit
from trace_megatron.rollout.seeds import request_seed
from trace_megatron.types import ROOT, Anchor, Prompt, Rollout, RolloutTree

ScorePrefixes = Callable[[Sequence[RolloutTree]], Sequence[Scores]]
"""Trees -> per tree, V of ``prefix_anchors(tree)``, [A]. Called in a thread, with all trees that wait for scores."""
Progress = Callable[[int, int], None]
"""Called with (rollouts done, rollouts planned)."""

_SCORE_WINDOW_S = 0.003  # requests that arrive this soon after the first share its forward pass

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """What a step trains on."""

    trees: list[RolloutTree]
    """In the order in which they were planned."""
    hidden_s: float
    """Seconds that the step's own trees grew while nobody waited for them."""
    carried_units: float
    """Planned for the trees that go on growing."""


class Collector:
    """Spends root plans on the engine: ``begin`` lets a step's trees grow, ``take`` waits for those to train on.

    Every planned tree is taken exactly once, by the step that planned it or a later one.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        environment: Environment,
        renderer: ChatRenderer,
        selector: Selector,
        score_prefixes: ScorePrefixes,
        config: RolloutConfig,
        run_seed: int,
        max_model_len: int = 0,
    ) -> None:
        self._runner = EpisodeRunner(engine, environment, renderer, config, run_seed, max_model_len)
        self._selector = selector
        self._config = config
        self._run_seed = run_seed
        self._scorer = _BatchedScorer(score_prefixes)
        self._growing: list[_Growing] = []
        self._tree_ended = asyncio.Event()
        self._progress: Progress | None = None

    async def collect(
        self, prompts: Sequence[Prompt], root_counts: Sequence[int], step: int, progress: Progress | None = None
    ) -> list[RolloutTree]:
        """``begin``, and ``take`` all."""
        await self.begin(prompts, root_counts, step, version=step - 1)
        return (await self.take(step, progress=progress)).trees

    async def begin(self, prompts: Sequence[Prompt], root_counts: Sequence[int], step: int, version: int) -> None:
        """Let trees of the prompts with a positive count grow. ``root_counts``: [P].

        ``version``: of the engine's weights now, the oldest that can sample for them.
        """
        roots = [(prompt, int(count)) for prompt, count in zip(prompts, root_counts, strict=True) if count > 0]
        num_planned = sum(count + self._selector.prefix_budget(count) for _, count in roots)
        batch = _Batch(self._runner, step, num_planned, self._config.max_failed_share, self._report)
        for prompt, count in roots:
            units = count + CONTINUATION_UNITS * self._selector.prefix_budget(count)
            tree = _Growing(batch, version, units, asyncio.create_task(self._grow_tree(prompt, count, batch)))
            tree.task.add_done_callback(lambda _, tree=tree: self._ended(tree))
            self._growing.append(tree)

    async def take(self, step: int, carried_share: float = 0.0, progress: Progress | None = None) -> Taken:
        """Trees to train on in ``step``, as soon as trees with at most ``carried_share`` of the units are left.

        Those go on growing, to be taken later. A tree whose oldest token would then be more than ``max_staleness``
        updates old is waited for. Failed rollouts are part of their tree; they are spent units. Raises RolloutError
        when more than ``max_failed_share`` of a step's rollouts fail; then, and on other errors, nothing grows on.
        """
        start_s, self._progress = time.perf_counter(), progress
        try:
            while not self._enough(step, carried_share):
                self._tree_ended.clear()
                await self._tree_ended.wait()
            taken = [tree for tree in self._growing if tree.task.done()]
            trees = [tree.task.result() for tree in taken]
            for tree in taken:
                tree.batch.check()
        except BaseException:
            await self.cancel()
            raise
        finally:
            self._progress = None
        self._growing = [tree for tree in self._growing if not tree.task.done()]
        own = [tree for tree in taken if tree.batch.step == step]
        now_s = time.perf_counter()
        grown_s = max((tree.end_s or now_s) - tree.start_s for tree in own) if own else 0.0
        return Taken(trees, max(grown_s - (now_s - start_s), 0.0), sum(tree.units for tree in self._growing))

    async def cancel(self) -> None:
        """Give up what still grows."""
        trees, self._growing = self._growing, []
        for tree in trees:
            tree.task.cancel()
        await asyncio.gather(*(tree.task for tree in trees), return_exceptions=True)

    def _enough(self, step: int, carried_share: float) -> bool:
        """Whether ``step`` can be trained; raises what a tree raised."""
        for tree in self._growing:
            if tree.task.done() and not tree.task.cancelled():  # by the failure of another, which is found then
                tree.task.result()
        left = [tree for tree in self._growing if not tree.task.done()]
        if any(step - tree.version > self._config.max_staleness for tree in left):  # the step after trains ``step``
            return False
        return sum(tree.units for tree in left) <= carried_share * sum(tree.units for tree in self._growing)

    def _ended(self, tree: _Growing) -> None:
        tree.end_s = time.perf_counter()
        self._tree_ended.set()

    def _report(self, num_done: int, num_planned: int) -> None:
        """Over all steps whose trees grow."""
        if self._progress:
            batches = {tree.batch.step: tree.batch for tree in self._growing}.values()
            self._progress(sum(batch.num_done for batch in batches), sum(batch.num_planned for batch in batches))

    async def _grow_tree(self, prompt: Prompt, count: int, batch: _Batch) -> RolloutTree:
        bare = await _run_all(batch.play(prompt, k) for k in range(count))
        tree = RolloutTree(prompt, tuple(episode.rollout for episode in bare))
        budget = self._selector.prefix_budget(count)
        if not budget:
            return tree
        if not prefix_anchors(tree):
            extra = fallback_rollouts(budget)
            batch.num_planned += extra - budget
            more = await _run_all(batch.play(prompt, k) for k in range(count, count + extra))
            return _grown(tree, more)
        scores = await self._scorer.score(tree) if self._selector.needs_prefix_scores else None
        more = await self._play_continuations(prefix_view(tree, scores), tree.prompt, bare, budget, batch)
        return _grown(tree, more, () if scores is None else tuple(scores.tolist()))

    async def _play_continuations(
        self, view: PrefixView, prompt: Prompt, bare: Sequence[Episode], budget: int, batch: _Batch
    ) -> list[Episode]:
        """Continuations anchor by anchor, each from its bare rollout's visit."""
        # The prompt's own generator: the plan must not depend on which prompt came back first.
        rng = np.random.default_rng(request_seed(self._run_seed, batch.step, prompt.prompt_id, ROOT, 0, 0))
        counts = self._selector.select_prefixes(view, budget, rng)
        return await _run_all(
            batch.play(prompt, k, anchor, bare[anchor.rollout].visits[anchor.turn - 1])
            for anchor, count in zip(view.anchors, counts, strict=True)
            for k in range(count)
        )


def _grown(tree: RolloutTree, more: Sequence[Episode], prefix_probs: tuple[float, ...] = ()) -> RolloutTree:
    return RolloutTree(tree.prompt, (*tree.rollouts, *(episode.rollout for episode in more)), prefix_probs)


async def evaluate(
    engine: RolloutEngine,
    environment: Environment,
    renderer: ChatRenderer,
    config: RolloutConfig,
    prompts: Sequence[Prompt],
    samples: int,
    run_seed: int,
    step: int,
    max_model_len: int = 0,
    progress: Progress | None = None,
) -> list[list[Rollout]]:
    """``samples`` bare rollouts of every prompt; raises RolloutError as ``Collector.collect`` does."""
    runner = EpisodeRunner(engine, environment, renderer, config, run_seed, max_model_len)
    batch = _Batch(runner, step, len(prompts) * samples, config.max_failed_share, progress)
    episodes = await _run_all(batch.play(prompt, k) for prompt in prompts for k in range(samples))
    batch.check()
    rollouts = [episode.rollout for episode in episodes]
    return [rollouts[index * samples : (index + 1) * samples] for index in range(len(prompts))]


@dataclasses.dataclass(slots=True)
class _Growing:
    """A tree on its way."""

    batch: _Batch
    version: int
    units: float
    """Planned."""
    task: asyncio.Task[RolloutTree]
    start_s: float = dataclasses.field(default_factory=time.perf_counter)
    end_s: float = 0.0


@dataclasses.dataclass(slots=True)
class _Batch:
    """The rollouts that one step planned: plays and counts them, and raises as soon as too many have failed."""

    runner: EpisodeRunner
    step: int
    num_planned: int
    max_failed_share: float
    progress: Progress | None
    num_done: int = 0
    num_failed: int = 0
    first_failure: str = ""

    async def play(self, prompt: Prompt, k: int, anchor: Anchor = ROOT, start: Visit | None = None) -> Episode:
        episode = await self.runner.play(prompt, step=self.step, k=k, anchor=anchor, start=start)
        rollout = episode.rollout
        self.num_done += 1
        if rollout.status.failed:
            self.num_failed += 1
            self.first_failure = self.first_failure or f"{rollout.status}: {rollout.info.get('error')}"
            self.check()
        if self.progress:
            self.progress(self.num_done, self.num_planned)
        return episode

    def check(self) -> None:
        if self.num_failed > self.max_failed_share * self.num_planned:
            raise RolloutError(
                f"{self.num_failed} of {self.num_planned} rollouts of step {self.step} failed, more than "
                f"rollout.max_failed_share={self.max_failed_share:g} allows; the first: {self.first_failure}"
            )


class _BatchedScorer:
    """Scores trees in a thread, one batch at a time: what arrives within a few ms, or during a batch, goes together."""

    def __init__(self, score_prefixes: ScorePrefixes) -> None:
        self._score_prefixes = score_prefixes
        self._waiting: list[tuple[RolloutTree, asyncio.Future[Scores]]] = []
        self._turn = asyncio.Lock()

    async def score(self, tree: RolloutTree) -> Scores:
        scores: asyncio.Future[Scores] = asyncio.get_running_loop().create_future()
        self._waiting.append((tree, scores))
        async with self._turn:
            if not scores.done():
                await asyncio.sleep(_SCORE_WINDOW_S)
                batch, self._waiting = self._waiting, []
                await self._score_batch(batch)
        return await scores

    async def _score_batch(self, batch: Sequence[tuple[RolloutTree, asyncio.Future[Scores]]]) -> None:
        try:
            results = await asyncio.to_thread(self._score_prefixes, [tree for tree, _ in batch])
            for (_, scores), result in zip(batch, results, strict=True):
                scores.set_result(result)
        finally:
            for _, scores in batch:  # nobody may wait for a batch that failed
                scores.cancel()


async def _run_all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order. The first exception cancels the rest, and is raised when they have ended, as itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as group_error:
        raise group_error.exceptions[0] from None
    return [task.result() for task in tasks]
