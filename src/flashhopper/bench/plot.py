"""``flashhopper bench plot``: small multiples of TFLOPS over sequence length, from a result file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flashhopper.bench import BenchError
from flashhopper.bench.grid import short_seqlen
from flashhopper.bench.passes import LABELS, OURS
from flashhopper.bench.results import GridResults, Row

INK, QUIET, GRID_COLOUR = "#1b1f24", "#59636e", "#e4e7eb"
# Ours stands out by colour, width and filled markers; peers differ by marker as well, for readers who see no hue.
COLOURS = {
    "ours": "#d9480f",
    "ours_deterministic": "#f0986f",
    "fa4": "#1f5fa8",
    "fa3": "#5b9bd5",
    "cudnn": "#4f9a3a",
    "fa2": "#8a9099",
}
MARKERS = {"ours": "o", "ours_deterministic": "P", "fa4": "s", "fa3": "D", "cudnn": "^", "fa2": "v"}
STYLE: dict[Any, Any] = {
    "font.size": 12,
    "axes.edgecolor": GRID_COLOUR,
    "axes.labelcolor": QUIET,
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
}


def plot_grid(results: GridResults, path: Path) -> None:
    """Write a PNG: a row per mask, a column per head_dim, a line per implementation."""
    head_dims = sorted({row.cell.d for row in results.rows})
    masks = sorted({row.cell.causal for row in results.rows}, reverse=True)
    if not head_dims:
        raise BenchError("the result file has no rows: nothing to plot")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1.2 + 3.5 * len(head_dims), 1.5 + 2.9 * len(masks)), facecolor="white")
        grid = figure.subplots(len(masks), len(head_dims), sharey=True, squeeze=False)
        for axes_row, causal in zip(grid, masks, strict=True):
            for axes, d in zip(axes_row, head_dims, strict=True):
                rows = [row for row in results.rows if row.cell.d == d and row.cell.causal == causal]
                _panel(axes, sorted(rows, key=lambda row: row.cell.s), results.kind.names)
                axes.set_title(f"head_dim {d}, {'causal' if causal else 'full'}", loc="left", color=INK)
        grid[0][0].set_ylim(0, 1.1 * max(max(_rates(row), default=1.0) for row in results.rows))  # shared by all
        for axes in grid[-1]:
            axes.set_xlabel("sequence length")
        for axes_row in grid:
            axes_row[0].set_ylabel("TFLOPS")
        _head(figure, results)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


def _panel(axes: Axes, rows: list[Row], names: Sequence[str]) -> None:
    lengths = [row.cell.s for row in rows]
    for name in reversed(names):  # ours last, on top
        points = [(at, rate) for at, row in enumerate(rows) if (rate := row.tflops.get(name)) is not None]
        if not points:
            continue
        ours = name == OURS
        axes.plot(
            [at for at, _ in points],
            [rate for _, rate in points],
            color=COLOURS[name],
            marker=MARKERS[name],
            linewidth=3.0 if ours else 1.5,
            markersize=7 if ours else 4.5,
            label=LABELS[name],
            zorder=4 if ours else 3,
        )
        if ours:
            at, rate = points[-1]
            label = axes.annotate(f"{rate:.0f}", (at, rate), (0, 8), textcoords="offset points", ha="center")
            label.set(color=COLOURS[name], fontweight="bold")
    axes.set_xticks(range(len(lengths)), [short_seqlen(s) for s in lengths])
    axes.grid(axis="y", color=GRID_COLOUR, linewidth=0.9)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _rates(row: Row) -> list[float]:
    return [rate for rate in row.tflops.values() if rate is not None]


def _head(figure: Figure, results: GridResults) -> None:
    """Title, provenance and one legend for all panels, ours first."""
    lines: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            lines.setdefault(label, handle)
    labels = [LABELS[name] for name in results.kind.names if LABELS[name] in lines]
    dtype = results.rows[0].cell.dtype
    machine = results.machine
    height = figure.get_figheight()
    figure.text(0.015, 1 - 0.34 / height, f"{results.kind.title}, {dtype}", fontsize=16, fontweight="bold")
    figure.text(
        0.015,
        1 - 0.64 / height,
        f"{machine['device']}, {machine['date']}; 16k tokens, heads × head_dim = 2048, sustained load, more is better",
        color=QUIET,
    )
    figure.legend(
        [lines[label] for label in labels],
        labels,
        loc="upper right",
        ncols=len(labels),
        frameon=False,
        bbox_to_anchor=(0.995, 1.0),
        handlelength=1.6,
        columnspacing=1.2,
    )
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.75 / height))
