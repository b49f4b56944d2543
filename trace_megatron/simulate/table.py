"""Simulated rows as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from trace_megatron.simulate.compare import Estimate, Row

_COLUMNS = {  # field of StepOutcome: (heading, format)
    "effective_ratio": ("effective ratio", "{:.1%}"),
    "mixed_trees": ("mixed trees", "{:.1f}"),
    "contrasts_per_unit": ("pairs / unit", "{:.3f}"),
    "gradient_per_unit": ("squared gradient / unit", "{:.2f}"),
    "units": ("units", "{:.0f}"),
    "tokens": ("tokens", "{:,.0f}"),
}


def describe_rows(title: str, rows: Sequence[Row]) -> str:
    """A line for each row: mean ± standard error over the simulated steps."""
    cells = [["method", "M", "N", *(heading for heading, _ in _COLUMNS.values())]]
    for row in rows:
        figures = [_figure(row.estimates[name], text) for name, (_, text) in _COLUMNS.items()]
        cells.append([row.method, str(row.rollouts), str(row.continuations), *figures])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join([title, *lines, ""])


def _figure(estimate: Estimate, text: str) -> str:
    mean = text.format(estimate.mean)
    return f"{mean} ± {text.format(estimate.standard_error)}" if estimate.standard_error > 0.0 else mean
