"""What a grid run found: rows of TFLOPS, their summary, the JSON file, and the gate against an earlier file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashhopper.bench import BenchError
from flashhopper.bench.grid import PEAK_TFLOPS, Cell
from flashhopper.bench.passes import FORWARD, OUR_NAMES, OURS, OURS_DETERMINISTIC, PASSES, PEERS, Pass

MAX_DROP = 0.04  # twice the spread of medians between runs on one card


@dataclass(frozen=True)
class Row:
    """One cell's TFLOPS by implementation; None where it is absent or failed. ``memory`` is in MiB."""

    cell: Cell
    tflops: dict[str, float | None]
    memory: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, cell: Cell, milliseconds: dict[str, float], kind: Pass = FORWARD) -> Row:
        return cls(cell, {name: round(kind.flop_factor * cell.tflops(ms), 1) for name, ms in milliseconds.items()})

    def best_peer(self, among: Iterable[str] = PEERS) -> tuple[str, float] | None:
        """The fastest peer and its TFLOPS."""
        rates = [(rate, name) for name in among if (rate := self.tflops.get(name)) is not None]
        if not rates:
            return None
        rate, name = max(rates)
        return name, rate

    def ratio(self, among: Iterable[str] = PEERS) -> float | None:
        """Ours to the best peer."""
        ours, best = self.tflops.get(OURS), self.best_peer(among)
        return None if ours is None or best is None or best[1] == 0 else ours / best[1]

    def peers_present(self) -> set[str]:
        return {name for name in PEERS if self.tflops.get(name) is not None}

    def to_json(self, names: Sequence[str]) -> dict[str, Any]:
        cell = self.cell
        shape = {"dtype": cell.dtype, "d": cell.d, "causal": cell.causal, "s": cell.s, "b": cell.b, "h": cell.h}
        memory = {"memory": self.memory} if self.memory else {}
        return {**shape, **{name: self.tflops.get(name) for name in names}, **memory}

    @classmethod
    def from_json(cls, row: dict[str, Any], names: Sequence[str]) -> Row:
        cell = Cell(row["dtype"], row["d"], row["causal"], row["s"], row["b"], row["h"])
        return cls(cell, {name: row.get(name) for name in names}, row.get("memory", {}))


@dataclass
class GridResults:
    """A whole run. ``machine`` is the head of the file; ``skipped`` and ``checks`` say why a figure is missing."""

    machine: dict[str, Any]
    versions: dict[str, str | None]
    matmul_tflops: dict[str, float | None] = field(default_factory=lambda: {"before": None, "after": None})
    rows: list[Row] = field(default_factory=list)
    burst: list[Row] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    kind: Pass = FORWARD

    def skip(self, name: str, where: str, reason: str) -> None:
        """Note a missing figure; for our own implementation it is an error of the run."""
        self.skipped.append({"implementation": name, "where": where, "reason": reason})
        if name in OUR_NAMES:
            self.errors.append(f"{where}: {reason}")

    def summary(self) -> dict[str, Any]:
        return summarise(self.rows, self.burst, self.kind)

    def to_json(self) -> dict[str, Any]:
        return {
            **self.machine,
            **({} if self.kind == FORWARD else {"pass": self.kind.name}),
            "versions": self.versions,
            "matmul_tflops": self.matmul_tflops,
            "rows": [row.to_json(self.kind.names) for row in self.rows],
            "burst": [row.to_json(self.kind.names) for row in self.burst],
            "summary": self.summary(),
            "checks": self.checks,
            "skipped": self.skipped,
            "errors": self.errors,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GridResults:
        kind = PASSES[data.get("pass", FORWARD.name)]
        return cls(
            machine={key: data.get(key) for key in ("device", "date", "torch", "driver")},
            versions=data.get("versions", {}),
            matmul_tflops=data.get("matmul_tflops", {"before": None, "after": None}),
            rows=[Row.from_json(row, kind.names) for row in data["rows"]],
            burst=[Row.from_json(row, kind.names) for row in data.get("burst", [])],
            checks=data.get("checks", []),
            skipped=data.get("skipped", []),
            errors=data.get("errors", []),
            kind=kind,
        )


def write_json(path: Path, data: dict[str, Any]) -> None:
    """One row a line, so that a diff of two runs reads well."""
    parts = []
    for key, value in data.items():
        if isinstance(value, list) and value:
            lines = ",\n".join("    " + json.dumps(item, allow_nan=False) for item in value)
            text = f"[\n{lines}\n  ]"
        else:
            text = json.dumps(value, indent=2, allow_nan=False).replace("\n", "\n  ")
        parts.append(f"  {json.dumps(key)}: {text}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def read_results(path: Path) -> GridResults:
    if not path.is_file():
        raise BenchError(f"no file {path}: `flashhopper bench forward`, `backward` and `train` write such files")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return GridResults.from_json(data)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise BenchError(f"{path} is not a result file of bench forward, backward or train: {error!r}") from error


def summarise(rows: Sequence[Row], burst: Sequence[Row] = (), kind: Pass = FORWARD) -> dict[str, Any]:
    """Geometric mean and worst of ours to the best peer, to each peer, and the long head_dim 128 shapes' headline."""
    ratios = [(ratio, row) for row in rows if (ratio := row.ratio()) is not None]
    worst = min(ratios, key=lambda pair: pair[0], default=None)
    deterministic = [1 / ratio for row in rows if (ratio := row.ratio([OURS_DETERMINISTIC]))]
    return {
        "cells": len(ratios),
        "wins": sum(ratio >= 1.0 for ratio, _ in ratios),
        "geomean_vs_best_peer": geomean([ratio for ratio, _ in ratios]),
        "min_ratio": round(worst[0], 3) if worst else None,
        "min_ratio_cell": str(worst[1].cell) if worst else None,
        "geomean_vs": {
            name: geomean([ratio for row in rows if (ratio := row.ratio([name])) is not None]) for name in kind.peers
        },
        **({"geomean_deterministic": geomean(deterministic)} if OURS_DETERMINISTIC in kind.names else {}),
        "headline": {"sustained": headline(rows), "burst": headline(burst)},
    }


def headline(rows: Sequence[Row]) -> dict[str, list[float] | None]:
    """Lowest and highest fraction of the data-sheet peak, and speed-up over FA2, at d128 and s = 8k to 32k."""
    rows = [row for row in rows if row.cell.is_headline]
    fractions = [ours / PEAK_TFLOPS for row in rows if (ours := row.tflops.get(OURS)) is not None]
    speedups = [ratio for row in rows if (ratio := row.ratio(["fa2"])) is not None]
    return {"peak_fraction": _extremes(fractions), "speedup_over_fa2": _extremes(speedups)}


def _extremes(values: Sequence[float]) -> list[float] | None:
    return [round(min(values), 3), round(max(values), 3)] if values else None


def geomean(values: Sequence[float]) -> float | None:
    return round(statistics.geometric_mean(values), 3) if values else None


@dataclass(frozen=True)
class Comparison:
    """The gate's verdict: cells whose ratio to the best peer dropped, and what could not be compared."""

    compared: int
    drops: list[str]
    problems: list[str]

    @property
    def passed(self) -> bool:
        return self.compared > 0 and not self.drops and not self.problems


def compare(new: Sequence[Row], old: Sequence[Row], max_drop: float = MAX_DROP) -> Comparison:
    """Compare ratios, never TFLOPS: the peers in the same run stand for the card's state.

    A cell is compared over the peers that both runs have, so that a peer missing today does not look like a gain.
    Cells that only one of the runs measured are left out; a cell where ours is missing today is a problem.
    """
    before = {row.cell: row for row in old}
    drops, problems, compared = [], [], 0
    for row in new:
        then = before.get(row.cell)
        if then is None or then.tflops.get(OURS) is None:
            continue
        if row.tflops.get(OURS) is None:
            problems.append(f"{row.cell}: ours has no figure, it had {then.tflops[OURS]} TFLOPS")
            continue
        common = row.peers_present() & then.peers_present()
        ratio, ratio_then = row.ratio(common), then.ratio(common)
        if ratio is None or ratio_then is None:
            continue
        compared += 1
        if ratio / ratio_then < 1.0 - max_drop:
            drops.append(f"{row.cell}: {ratio:.3f} of the best peer, was {ratio_then:.3f}")
    if compared == 0 and not problems:
        problems.append("no cell with a common peer is in both runs: nothing was compared")
    return Comparison(compared, drops, problems)
