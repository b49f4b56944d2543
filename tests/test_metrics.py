import json
from dataclasses import dataclass

from trace_megatron.metrics import MetricsWriter, StepMetrics


@dataclass(frozen=True, slots=True)
class Numbers:
    loss: float
    histogram: list[int]
    absent: float | None = None


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write(folder, steps, first_step, loss):
    writer = MetricsWriter(folder, first_step)
    for step in steps:
        writer.write(StepMetrics(step, {"train": Numbers(loss, [1, 2])}, {"rollout": 0.5}))
    writer.close()


def test_a_resumed_run_replaces_the_steps_that_it_repeats(tmp_path):
    write(tmp_path, (1, 2, 3), 1, 1.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "train/lo')  # an interruption cut this line
    write(tmp_path, (3, 4), 3, 2.0)
    assert [(line["step"], line["train/loss"]) for line in lines(tmp_path)] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


def test_values_that_json_lacks_become_null_and_absent_ones_are_left_out(tmp_path):
    write(tmp_path, (1,), 1, float("nan"))
    assert lines(tmp_path) == [{"step": 1, "train/loss": None, "train/histogram": [1, 2], "seconds/rollout": 0.5}]
    assert list((tmp_path / "tensorboard").iterdir())
