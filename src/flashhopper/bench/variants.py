"""What runs of explicit configurations found: rows, and why a figure is missing."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flashhopper.bench.configs import DEFAULT, AnyConfig
from flashhopper.bench.grid import Cell
from flashhopper.bench.passes import FORWARD, Pass


class Ratio(NamedTuple):
    """A speed relative to the default's, and by how much it may be wrong: twice the standard error of a median."""

    value: float
    noise: float

    @classmethod
    def of(cls, base: Sequence[float], samples: Sequence[float]) -> Ratio:
        """Of milliseconds, one of each per round. The noise is that of the rounds' own ratios: what a round does to
        both is none."""
        value = statistics.median(base) / statistics.median(samples)
        if len(samples) < 2:
            return cls(value, math.inf)
        ratios = [one / other for one, other in zip(base, samples, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        # Of normal values the quartiles are 1.349 standard deviations apart, and a median's standard error is 1.253
        # times a mean's.
        return cls(value, 2 * 1.253 / 1.349 * (high - low) / math.sqrt(len(ratios)))


@dataclass(frozen=True)
class VariantRow:
    """One configuration (or peer: ``config`` is None) in one cell, and its speed relative to the default there."""

    cell: Cell
    variant: str
    config: AnyConfig | None
    tflops: float
    ratio: float | None
    noise: float | None = None

    def to_json(self) -> dict[str, Any]:
        config = None if self.config is None else dataclasses.asdict(self.config)
        figures = {"variant": self.variant, "tflops": self.tflops, "ratio": self.ratio, "noise": self.noise}
        return {**dataclasses.asdict(self.cell), **figures, "config": config}


def rows_of(
    cell: Cell, samples: Mapping[str, Sequence[float]], configs: Mapping[str, AnyConfig], kind: Pass = FORWARD
) -> list[VariantRow]:
    """A row for each entry of ``samples``, milliseconds by name."""
    base, rows = samples.get(DEFAULT), []
    for name, times in samples.items():
        tflops = round(kind.flop_factor * cell.tflops(statistics.median(times)), 1)
        ratio = noise = None
        if base is not None:
            found = Ratio.of(base, times)
            ratio, noise = round(found.value, 3), round(found.noise, 4) if math.isfinite(found.noise) else None
        rows.append(VariantRow(cell, name, configs.get(name), tflops, ratio, noise))
    return rows


@dataclass
class VariantResults:
    """A whole run. ``infeasible`` never reached the card; ``skipped`` failed on it or was not installed."""

    machine: dict[str, Any]
    rows: list[VariantRow] = field(default_factory=list)
    infeasible: list[dict[str, str]] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def skip(self, name: str, where: str, reason: str, error: bool = False) -> None:
        """Note a missing figure; a feasible configuration of ours that fails is an error of the run."""
        self.skipped.append({"variant": name, "where": where, "reason": reason})
        if error:
            self.errors.append(f"{name}: {where}: {reason}")

    def to_json(self) -> dict[str, Any]:
        return {
            **self.machine,
            "rows": [row.to_json() for row in self.rows],
            "infeasible": self.infeasible,
            "skipped": self.skipped,
            "errors": self.errors,
        }
