"""A run's checkpoints: taken between two steps, written while the run goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trace_megatron.background import in_background
from trace_megatron.log import say
from trace_megatron.predictor.protocol import Predictor
from trace_megatron.run_folder import RunFolder


class CheckpointedPolicy(Protocol):
    """What of the policy a checkpoint needs; calls act on all ranks."""

    def start_checkpoint(self, folder: Path) -> None: ...

    def finish_checkpoint(self, wait: bool) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Unfinished:
    step: int
    state: str
    predictor: Future[None]
    """Its file."""


class Checkpoints:
    """One is written at a time. What ends the run before it is complete leaves the one before as the latest."""

    def __init__(self, folder: RunFolder, policy: CheckpointedPolicy, predictor: Predictor) -> None:
        self._folder = folder
        self._policy = policy
        self._predictor = predictor
        self._unfinished: _Unfinished | None = None

    def start(self, step: int, state: Mapping[str, Any]) -> None:
        """Copy all that is needed to go on after ``step``, and begin to write it."""
        self.finish()
        partial = self._folder.open_checkpoint(step)
        self._policy.start_checkpoint(partial / "policy")
        write = self._predictor.snapshot()
        written = in_background(lambda: write(partial / "predictor"))
        self._unfinished = _Unfinished(step, json.dumps(state), written)

    def finish(self, wait: bool = True) -> None:
        """Let the checkpoint that was started appear; without ``wait``, only if all of it is written."""
        here = self._unfinished
        if here is None or not (wait or here.predictor.done()) or not self._policy.finish_checkpoint(wait):
            return
        here.predictor.result()
        self._unfinished = None
        say(f"checkpoint: {self._folder.complete_checkpoint(here.step, here.state)}")
