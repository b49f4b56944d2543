"""A run's folder: ``config.yaml  metrics.jsonl  trees/  checkpoints/step_000010/  hf/``. Nothing is overwritten."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from trace_megatron.config import Config, dump_config
from trace_megatron.errors import UserError


class RunFolder:
    """Paths of one run, and its checkpoints."""

    def __init__(self, root: Path):
        self.root = root
        self.config = root / "config.yaml"
        self.trees = root / "trees"
        self.hf = root / "hf"
        self._checkpoints = root / "checkpoints"

    @classmethod
    def of(cls, config: Config) -> RunFolder:
        """Raises UserError for a name that is no folder's own, below ``run.output_dir``."""
        name = config.run.name
        if name in ("", ".", "..") or "/" in name:
            raise UserError(
                f"expected the name of a folder in run.name, found '{name}': run.output_dir says below which folder"
            )
        return cls(Path(config.run.output_dir) / name)

    def prepare(self, config: Config, resume: bool) -> None:
        """Make the folder and write the resolved configuration into it.

        Raises UserError where a run of that name exists and ``resume`` was not asked for, or the other way round.
        """
        if resume and self.latest_checkpoint() is None:
            raise UserError(f"expected a checkpoint below '{self._checkpoints}', found none: start without --resume")
        if not resume and self.root.exists():
            raise UserError(
                f"expected no run at '{self.root}', found one: go on with --resume, choose another name with"
                f" run.name=NAME, or delete that folder"
            )
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"expected to write below '{self.root.parent}', found: {error}: choose another run.output_dir"
            ) from error
        self.config.write_text(dump_config(config))

    def is_finished(self, config: Config) -> bool:
        """True where the last step's checkpoint is there, and the exported policy if one is asked for."""
        checkpoint = self.latest_checkpoint()
        if checkpoint is None or read_state(checkpoint)["step"] < config.run.steps:
            return False
        return self.hf.exists() or not config.run.export_hf

    def latest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint; ``state.json`` is in a folder only once all else is."""
        complete = sorted(path.parent for path in self._checkpoints.glob("step_*/state.json"))
        return complete[-1] if complete else None

    def open_checkpoint(self, step: int) -> Path:
        """A folder to write a checkpoint's parts into. It is none yet."""
        partial = self._checkpoints / f".step_{step:06d}.partial"
        if partial.exists():  # left by an interrupted save
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        return partial

    def complete_checkpoint(self, step: int, state: str) -> Path:
        """When all parts are written: add ``state.json``, and give the folder its name."""
        partial = self._checkpoints / f".step_{step:06d}.partial"
        (partial / "state.json").write_text(state)
        return partial.rename(self._checkpoints / f"step_{step:06d}")


def read_state(checkpoint: Path) -> dict[str, Any]:
    """``state.json`` of a checkpoint. Raises UserError where it is not readable."""
    path = checkpoint / "state.json"
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"expected a readable checkpoint state at '{path}', found: {error}") from error
