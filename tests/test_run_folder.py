import os
import signal
import threading
import time

import pytest

from trace_megatron.checkpoints import Checkpoints
from trace_megatron.config import Config, RunConfig, load_config
from trace_megatron.errors import UserError
from trace_megatron.run_folder import RunFolder, read_state


@pytest.fixture
def config(tmp_path):
    return Config(run=RunConfig(name="a", output_dir=str(tmp_path)))


class Part:
    """A policy of one rank and a predictor at once: what they save is ``text``."""

    def __init__(self, text="x", before_writing=lambda: None):
        self.text, self.before_writing = text, before_writing

    def start_checkpoint(self, folder):
        self.folder = folder

    def finish_checkpoint(self, wait):
        self.folder.write_text(self.text)
        return True

    def snapshot(self):
        text = self.text

        def write(folder):
            self.before_writing()
            folder.write_text(text)

        return write


def save(folder, step, part=None):
    part = part or Part()
    checkpoints = Checkpoints(folder, part, part)
    checkpoints.start(step, {"step": step})
    checkpoints.finish()
    return folder.latest_checkpoint()


def test_a_run_is_never_overwritten(config):
    folder = RunFolder.of(config)
    folder.prepare(config, resume=False)
    (folder.root / "metrics.jsonl").write_text("precious")
    with pytest.raises(UserError, match="--resume"):
        folder.prepare(config, resume=False)
    assert (folder.root / "metrics.jsonl").read_text() == "precious"
    assert load_config(folder.config) == config


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "/a"])
def test_a_run_stays_below_its_output_folder(name):
    with pytest.raises(UserError, match=r"expected the name of a folder in run\.name"):
        RunFolder.of(Config(run=RunConfig(name=name)))


def test_a_file_where_runs_should_go_is_named(tmp_path):
    (tmp_path / "file").touch()
    config = Config(run=RunConfig(name="a", output_dir=str(tmp_path / "file")))
    with pytest.raises(UserError, match=r"below '.*/file', found: .*run\.output_dir"):
        RunFolder.of(config).prepare(config, resume=False)


def test_resume_needs_a_checkpoint(config):
    with pytest.raises(UserError, match="without --resume"):
        RunFolder.of(config).prepare(config, resume=True)


def test_the_newest_complete_checkpoint_is_found(config):
    folder = RunFolder.of(config)
    folder.prepare(config, resume=False)
    save(folder, 2)
    newest = save(folder, 10)

    def fail():
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save(folder, 11, Part(before_writing=fail))
    assert folder.latest_checkpoint() == newest
    assert read_state(newest) == {"step": 10}
    folder.prepare(config, resume=True)
    assert save(folder, 11).name == "step_000011"  # the half-written one does not stand in the way


def test_a_checkpoint_is_of_its_moment_and_appears_when_all_of_it_is_written(config):
    folder = RunFolder.of(config)
    folder.prepare(config, resume=False)
    go_on = threading.Event()
    part, state = Part(before_writing=go_on.wait), {"step": 4, "position": 7}
    checkpoints = Checkpoints(folder, part, part)
    checkpoints.finish()  # none was started
    checkpoints.start(4, state)
    state["position"] = 8
    checkpoints.finish(wait=False)
    assert folder.latest_checkpoint() is None
    go_on.set()
    checkpoints.start(5, {"step": 5})  # the one before comes first
    assert read_state(folder.latest_checkpoint()) == {"step": 4, "position": 7}
    checkpoints.finish()
    assert {path.name for path in folder.latest_checkpoint().iterdir()} == {"policy", "predictor", "state.json"}


def test_a_run_killed_while_it_writes_leaves_the_checkpoint_before(config):
    folder = RunFolder.of(config)
    folder.prepare(config, resume=False)
    before = save(folder, 2)
    reading, writing = os.pipe()

    def begin():
        os.write(writing, b"x")
        time.sleep(60)

    if (child := os.fork()) == 0:
        save(folder, 4, Part(before_writing=begin))
        os._exit(0)  # not reached
    assert os.read(reading, 1) == b"x"
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert folder.latest_checkpoint() == before
    assert read_state(save(folder, 4)) == {"step": 4}  # of the run that resumes


def test_an_unreadable_state_is_named(config):
    folder = RunFolder.of(config)
    folder.prepare(config, resume=False)
    checkpoint = save(folder, 1)
    (checkpoint / "state.json").write_text("{")
    with pytest.raises(UserError, match=r"state\.json"):
        read_state(checkpoint)


def test_a_run_is_finished_with_its_last_checkpoint_and_its_export(config):
    folder = RunFolder.of(config)
    folder.prepare(config, resume=False)
    assert not folder.is_finished(config)
    save(folder, config.run.steps - 1)
    assert not folder.is_finished(config)
    save(folder, config.run.steps)
    assert not folder.is_finished(config)  # killed while it exported
    folder.hf.mkdir()
    assert folder.is_finished(config)
