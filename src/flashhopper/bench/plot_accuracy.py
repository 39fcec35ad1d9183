"""The errors that ``flashhopper accuracy fp8`` found, as dots on a logarithmic scale."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from flashhopper.bench.plot import GRID_COLOUR, INK, STYLE

MARKERS = "osD^vPX*"


def plot_accuracy(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG: a line per distribution, a marker per variant."""
    names = list(dict.fromkeys(f"{row['distribution']}, {row['keys']} keys" for row in rows))
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 1.6 + 0.7 * len(names)), facecolor="white", layout="constrained")
        axes = figure.subplots()
        for variant, marker in zip(variants, MARKERS, strict=False):
            chosen = [row for row in rows if row["variant"] == variant]
            heights = [names.index(f"{row['distribution']}, {row['keys']} keys") for row in chosen]
            axes.plot([row["rmse"] for row in chosen], heights, marker, label=variant, markersize=8, alpha=0.85)
        axes.set_xscale("log")
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.grid(color=GRID_COLOUR)
        axes.set_xlabel("root mean square error against fp64", color=INK)
        figure.legend(loc="outside right upper", frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
