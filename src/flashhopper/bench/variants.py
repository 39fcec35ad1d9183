"""What runs of explicit configurations found: rows, and why a figure is missing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from flashhopper.bench.grid import Cell
from flashhopper.config import ForwardConfig


@dataclass(frozen=True)
class VariantRow:
    """One configuration (or peer: ``config`` is None) in one cell, and its speed relative to the default there."""

    cell: Cell
    variant: str
    config: ForwardConfig | None
    tflops: float
    ratio: float | None

    def to_json(self) -> dict[str, Any]:
        config = None if self.config is None else dataclasses.asdict(self.config)
        figures = {"variant": self.variant, "tflops": self.tflops, "ratio": self.ratio, "config": config}
        return {**dataclasses.asdict(self.cell), **figures}


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
