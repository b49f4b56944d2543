"""`trace-megatron report`: one HTML file of a run, figures included, that needs no network and no script."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trace_megatron.errors import UserError
from trace_megatron.metrics import read_lines
from trace_megatron.report.lines import describe_totals
from trace_megatron.report.tree_view import Decode, describe_trees, draw_tree
from trace_megatron.tree_files import read_trees

FIGURES: dict[str, tuple[str, ...]] = {
    "Contrast: share of mixed trees": ("rollout/effective_ratio", "rollout/bare_effective_ratio"),
    "Reward": ("rollout/reward_mean", "validation/accuracy"),
    "Tokens trained": ("train/num_tokens", "train/num_unpacked_tokens"),
    "Engine against trainer": ("train/mismatch_kl", "train/clip_share"),
    "Gradient": ("train/grad_norm",),
    "Predictor: Spearman": ("calibration/root_spearman", "calibration/prefix_spearman"),
    "Predictor: Brier": ("calibration/root_brier", "calibration/prefix_brier"),
}
_SHOWN_TREES = 3
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222}
figure{display:inline-block;margin:.5rem}pre{background:#f6f6f6;padding:.75rem;overflow-x:auto;white-space:pre-wrap}
summary{cursor:pointer}h2{margin-top:2rem}"""


def write_report(run: Path, decode: Decode) -> Path:
    """Write ``run``/report.html from the run's own files. Raises UserError where there is no finished step."""
    lines = [json.loads(line) for line in read_lines(run / "metrics.jsonl")]
    if not lines:
        raise UserError(f"expected finished steps in '{run / 'metrics.jsonl'}', found none: give a run's configuration")
    target = run / "report.html"
    partial = target.with_suffix(".partial")
    partial.write_text("\n".join(_page(run, lines, decode)))
    partial.replace(target)
    return target


def _page(run: Path, lines: Sequence[Mapping[str, Any]], decode: Decode) -> Iterator[str]:
    title = html.escape(run.name)
    yield f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
    yield f"<h1>{title}</h1><p>{len(lines)} steps</p>"
    yield _text("\n".join(describe_totals(list(lines))))
    yield "<h2>Curves</h2>"
    for heading, keys in FIGURES.items():
        if any(line.get(key) is not None for line in lines for key in keys):
            yield _figure(heading, [line["step"] for line in lines], {key: _column(lines, key) for key in keys})
    yield "<h2>Where the time went</h2>"
    phases = sorted({key for line in lines for key in line if key.startswith("seconds/")})
    yield _figure("Seconds a step", [line["step"] for line in lines], {key: _column(lines, key) for key in phases})
    yield from _trees(run, decode)
    yield "<h2>Configuration</h2>" + _text((run / "config.yaml").read_text())


def _trees(run: Path, decode: Decode) -> Iterator[str]:
    files = sorted((run / "trees").glob("*.jsonl.zst"))
    if not files:
        return
    trees = read_trees(files[-1])
    yield f"<h2>Trees of the last step ({files[-1].name.partition('.')[0]})</h2>"
    yield _text("\n".join(describe_trees(trees)))
    for tree in sorted(trees, key=lambda tree: -len(tree.rollouts))[:_SHOWN_TREES]:
        text = _text("\n".join(draw_tree(tree, decode)))
        yield f"<details><summary>{html.escape(tree.prompt.task.task_id)}</summary>{text}</details>"


def _column(lines: Sequence[Mapping[str, Any]], key: str) -> list[float | None]:
    return [line.get(key) for line in lines]


def _figure(heading: str, steps: Sequence[int], curves: Mapping[str, Sequence[float | None]]) -> str:
    import matplotlib.figure  # half a second, which no other command should pay

    figure = matplotlib.figure.Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    for key, values in curves.items():
        points = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker=".", label=key.partition("/")[2].replace("_", " "))
    axes.set(title=heading, xlabel="step")
    axes.legend(fontsize="small")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<figure><img alt="{html.escape(heading)}" src="data:image/svg+xml;base64,{data}"></figure>'


def _text(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"
