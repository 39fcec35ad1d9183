"""What ``flashhopper tune`` finds out about a row of a tile table: who is faster, by how much, and the row to write."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashhopper.bench import BenchError
from flashhopper.bench.configs import DEFAULT, AnyConfig, MainSpec, main_spec, problem_of
from flashhopper.bench.grid import Cell, short_seqlen
from flashhopper.bench.passes import BACKWARD, Pass
from flashhopper.bench.search import search_variants
from flashhopper.bench.table_rows import AnyRow, row_source
from flashhopper.bench.variants import Ratio, VariantRow
from flashhopper.heuristics import BACKWARD_TABLE, TILE_TABLE, BackwardRow, TileRow, select_backward_row, select_row

MIN_GAIN = 0.01  # a row changes for more than this, and for more than the noise
TABLE_CARD = "NVIDIA H200"  # of the tables' figures; reasons name any other


@dataclass(frozen=True)
class LengthClass:
    """A row of a tile table under one mask, the shapes that stand for it, and the configurations to try by name."""

    kind: Pass
    number: int
    cells: tuple[Cell, ...]
    configs: Mapping[str, AnyConfig]

    @property
    def row(self) -> AnyRow:
        return table_of(self.kind)[self.number]

    @property
    def causal(self) -> bool:
        return self.cells[0].causal

    @property
    def base(self) -> AnyConfig:
        return self.configs[DEFAULT]

    @property
    def specs(self) -> dict[str, MainSpec]:
        """The main kernels, by the same names."""
        problem = problem_of(self.cells[0])
        return {name: main_spec(self.kind, problem, config) for name, config in self.configs.items()}

    @property
    def side(self) -> str:
        """What the lengths of the row are lengths of."""
        return "queries" if self.kind is BACKWARD else "keys"

    def __str__(self) -> str:
        row = self.row
        most = row.max_seqlen_q if isinstance(row, BackwardRow) else row.max_seqlen_k
        limit = "" if most is None else f", {self.side} up to {short_seqlen(most)}"
        return f"{table_name(self.kind)} {self.cells[0].head_dims} {self.cells[0].mask}{limit}"


def table_name(kind: Pass) -> str:
    return "BACKWARD_TABLE" if kind is BACKWARD else "TILE_TABLE"


def table_of(kind: Pass) -> Sequence[AnyRow]:
    return BACKWARD_TABLE if kind is BACKWARD else TILE_TABLE


def length_classes(cells: Sequence[Cell], kind: Pass, skip: Collection[str] = ()) -> list[LengthClass]:
    """The classes that cells of the same head dimensions fall into, in the table's order, without the configurations
    named in ``skip``. BenchError if they have no row of their own, or nothing has that name."""
    table = table_of(kind)
    found: dict[tuple[int, bool], list[Cell]] = {}
    for cell in cells:
        problem = problem_of(cell)
        row: AnyRow = select_backward_row(problem) if kind is BACKWARD else select_row(problem)
        if (row.head_dim, row.head_dim_v) != (cell.d, cell.head_dim_v):
            rows = ", ".join(dict.fromkeys(f"{row.head_dim} {row.head_dim_v}" for row in table))
            raise BenchError(
                f"{table_name(kind)} has no row of its own for {cell.head_dims}; head dims of rows: {rows}"
            )
        number = next(number for number, one in enumerate(table) if one is row)
        found.setdefault((number, cell.causal), []).append(cell)
    variants = search_variants(cells[0].d, cells[0].head_dim_v)
    classes, unknown = [], set(skip)
    for (number, _), of_row in sorted(found.items()):
        every = variants(main_spec(kind, problem_of(of_row[0])).config)
        unknown -= every.keys() - {DEFAULT}
        configs = {name: config for name, config in every.items() if name == DEFAULT or name not in skip}
        classes.append(LengthClass(kind, number, tuple(of_row), configs))
    if unknown:
        raise BenchError(f"--skip names {', '.join(sorted(unknown))}; --dry-run lists the configurations")
    return classes


@dataclass(frozen=True)
class Standing:
    """One configuration in the last round that it took part in; ``gain`` is the geometric mean over the shapes."""

    name: str
    config: AnyConfig
    rows: tuple[VariantRow, ...]
    gain: Ratio

    @classmethod
    def of(cls, name: str, rows: Sequence[VariantRow], ratios: Sequence[Ratio]) -> Standing:
        config = rows[0].config
        assert config is not None  # peers take no part
        value = math.exp(sum(math.log(ratio.value) for ratio in ratios) / len(ratios))
        noise = math.sqrt(sum(ratio.noise**2 for ratio in ratios)) / len(ratios)
        return cls(name, config, tuple(rows), Ratio(value, noise))

    @property
    def is_faster(self) -> bool:
        """Than the row, by what justifies changing it."""
        return self.gain.value > 1 + max(MIN_GAIN, self.gain.noise)


@dataclass(frozen=True)
class Finding:
    """What is known of a class: the finalists, fastest first, the row's own among them."""

    of: LengthClass
    standings: tuple[Standing, ...]

    @property
    def base(self) -> Standing:
        return next(standing for standing in self.standings if standing.name == DEFAULT)

    @property
    def best(self) -> Standing | None:
        """What should take the row's place, if anything should."""
        first = self.standings[0]
        return first if first.is_faster else None

    def row(self, device: str) -> AnyRow | None:
        """The row to write, for the class's mask alone; None where the present one stays."""
        best = self.best
        if best is None:
            return None
        row, reason = self.of.row, self.reason(device)
        changes: dict[str, Any] = {"config": best.config, "reason": reason}
        if isinstance(row, TileRow):
            if self.of.cells[0].dtype == "float16":
                changes = {"exact": best.config, "reason": f"{row.reason}; {reason}"}
            elif row.exact is None:
                changes["exact"] = row.config  # float16 keeps what it has
        return row._replace(**changes, causal=self.of.causal)

    def reason(self, device: str) -> str:
        """``311, 436 and 550 TFLOPS at 512, 1k and 2k keys; num_stages=3: 300, 430 and 541``."""
        best = self.standings[0]
        lengths = listed(short_seqlen(cell.s) for cell in self.of.cells)
        parts = [f"{_rates(best)} TFLOPS at {lengths} {self.of.side}"]
        others = [other for other in self.standings[1:3] if other.name != DEFAULT][:1]
        parts += [f"{difference(best.config, other.config)}: {_rates(other)}" for other in (self.base, *others)]
        notes = [device] * (device != TABLE_CARD) + ["float16"] * (self.of.cells[0].dtype == "float16")
        return "; ".join(parts) + (f" ({', '.join(notes)})" if notes else "")

    def hints(self) -> list[str]:
        """Shapes in which another finalist is faster than the first by more than the noise of both: it may pay to split
        the row by length."""
        found = []
        first = self.standings[0]
        for index, cell in enumerate(self.of.cells):
            top = max(self.standings, key=lambda standing: standing.rows[index].ratio or 0.0)
            one, other = top.rows[index], first.rows[index]
            if one.ratio and other.ratio and one.ratio / other.ratio > 1 + max(MIN_GAIN, _noise(one) + _noise(other)):
                where = f"at {short_seqlen(cell.s)} {self.of.side}"
                found.append(f"{where} {top.name} is faster: {one.tflops:.0f} to {other.tflops:.0f} TFLOPS")
        return found

    def to_json(self, device: str) -> dict[str, Any]:
        row, best = self.row(device), self.best
        return {
            "class": str(self.of),
            "cells": [str(cell) for cell in self.of.cells],
            "row": row_source(self.of.row),
            "standings": [
                {"variant": one.name, "gain": round(one.gain.value, 4), "noise": _finite(one.gain.noise)}
                for one in self.standings
            ],
            "best": None if best is None else best.name,
            "new_row": None if row is None else row_source(row),
        }


def _finite(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def _noise(row: VariantRow) -> float:
    return math.inf if row.noise is None else row.noise


def _rates(standing: Standing) -> str:
    return listed(f"{row.tflops:.0f}" for row in standing.rows)


def listed(words: Iterable[str]) -> str:
    """``a, b and c``."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def difference(config: AnyConfig, other: AnyConfig) -> str:
    """What ``other`` has in place of what ``config`` has: ``192×128, num_stages=4``."""
    parts = []
    if (config.tile_m, config.tile_n) != (other.tile_m, other.tile_n):
        parts.append(f"{other.tile_m}×{other.tile_n}")
    for f in dataclasses.fields(other):
        if f.name not in ("tile_m", "tile_n") and getattr(config, f.name) != getattr(other, f.name):
            parts.append(f"{f.name}={getattr(other, f.name)}")
    return ", ".join(parts)
