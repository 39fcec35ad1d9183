"""Loss curves as a PNG: what was learned, and below it how far each run has been from the reference."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from training import LEAST_NOISE, smoothed

from flashhopper.bench.plot import COLOURS, GRID_COLOUR, INK, QUIET, STYLE


def plot_losses(losses: dict[str, list[float]], pair: tuple[str, str], bound: float, path: Path) -> None:
    """``pair`` names ours and the reference among ``losses``; ``bound`` is where the verdict changes."""
    ours, reference = pair
    smooth = {name: smoothed(values) for name, values in losses.items()}
    steps = len(losses[ours])
    at = range(steps - len(smooth[ours]) + 1, steps + 1)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 6.5), facecolor="white")
        curves, differences = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        curves.set_title("Loss, nats per byte (grey: unsmoothed)", loc="left", color=INK)
        curves.plot(range(1, steps + 1), losses[ours], color=COLOURS["fa2"], alpha=0.4, linewidth=1)
        # Thin upon thick, so that both are seen where they agree.
        curves.plot(at, smooth[reference], color=COLOURS["fa4"], linewidth=5, label=reference)
        curves.plot(at, smooth[ours], color=COLOURS["ours"], linewidth=2, label=ours)
        differences.set_title(f"Largest distance of smoothed losses from {reference} so far", loc="left", color=INK)
        for name in (name for name in losses if name != reference):
            gap = (smooth[name] - smooth[reference]).abs().cummax(dim=0).values.clamp_min(LEAST_NOISE / 10)
            look = {"color": COLOURS["ours"], "linewidth": 2} if name == ours else {"color": COLOURS["fa2"], "ls": "--"}
            differences.plot(at, gap, label=name, **look)
        differences.axhline(bound, color=INK, linestyle=":", label="bound")
        differences.set_yscale("log")
        differences.set_xlabel("step")
        for axes in (curves, differences):
            axes.grid(axis="y", color=GRID_COLOUR, linewidth=0.9)
            axes.tick_params(which="both", length=0, labelcolor=QUIET)
            axes.spines[["top", "right", "left"]].set_visible(False)
        curves.legend(frameon=False)
        differences.legend(frameon=False, loc="lower right", ncols=2)
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
