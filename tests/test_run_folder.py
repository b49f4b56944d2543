import pytest

from trace_megatron.config import Config, RunConfig, load_config
from trace_megatron.errors import UserError
from trace_megatron.run_folder import RunFolder, read_state


@pytest.fixture
def config(tmp_path):
    return Config(run=RunConfig(name="a", output_dir=str(tmp_path)))


def save(folder, step, text="x"):
    return folder.save_checkpoint(step, {"step": step}, {"policy": lambda path: path.write_text(text)})


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

    def fail(path):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        folder.save_checkpoint(11, {}, {"policy": fail})
    assert folder.latest_checkpoint() == newest
    assert read_state(newest) == {"step": 10}
    folder.prepare(config, resume=True)
    assert save(folder, 11, "again").name == "step_000011"  # the half-written one does not stand in the way


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
