from pathlib import Path

import pytest

from trace_megatron.config import Config, dump_config, load_config
from trace_megatron.errors import UserError

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("**/*.yaml"))


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_defaults_survive_a_round_trip(tmp_path):
    assert load_config(write(tmp_path, dump_config(Config()))) == Config()


def test_overrides_win_and_have_the_type_of_the_option(tmp_path):
    path = write(tmp_path, "run: {steps: 3}\noptimizer: {learning_rate: 1e-6}\n")
    config = load_config(path, ["run.steps=5", "policy.sequence_parallel=true", "method.options={root: uniform}"])
    assert (config.run.steps, config.policy.sequence_parallel) == (5, True)
    assert config.optimizer.learning_rate == 1e-6  # YAML 1.1 reads it as text
    assert config.method.options == {"root": "uniform"}


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        ("policy: {tensor_paralel: 2}", [], ["policy.tensor_paralel", "policy.tensor_parallel"]),
        ("polcy: {}", [], ["polcy", "policy"]),
        ("", ["run.stpes=2"], ["run.stpes", "run.steps"]),
        ("", ["run.steps"], ["section.key=value", "run.steps"]),
        ("run: {steps: many}", [], ["int", "run.steps", "many"]),
        ("run: {steps: true}", [], ["int", "run.steps"]),
        ("policy: {sequence_parallel: 1}", [], ["bool", "sequence_parallel"]),
        ("policy: {dtype: float16}", [], ["float32", "bfloat16", "float16"]),
        ("env: {params: 3}", [], ["mapping", "env.params"]),
        ("run: 3", [], ["run", "3"]),
        ("- a", [], ["list"]),
        ("run: {steps: [", [], ["YAML"]),
        ("", ["run.name.deep=1"], ["run.name"]),
    ],
)
def test_a_mistake_is_one_sentence_that_names_it(tmp_path, text, overrides, words):
    with pytest.raises(UserError) as caught:
        load_config(write(tmp_path, text), overrides)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_of_the_project_loads(path):
    load_config(path)
