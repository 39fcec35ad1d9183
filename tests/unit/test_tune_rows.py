"""The rows that ``flashhopper tune`` finds, and how they come into the source of the tables."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tune_fakes import ROWS, backward_configs, forward_configs

from flashhopper import heuristics
from flashhopper.bench import BenchError, findings
from flashhopper.bench.configs import DEFAULT, AnyConfig
from flashhopper.bench.findings import Finding, LengthClass, Standing, length_classes
from flashhopper.bench.grid import Cell
from flashhopper.bench.passes import BACKWARD, FORWARD
from flashhopper.bench.table_rows import AnyRow, replace_rows, row_source, unused_names
from flashhopper.bench.variants import Ratio, rows_of
from flashhopper.heuristics import BACKWARD_TABLE, TILE_TABLE, BackwardRow

SOURCE = inspect.getsource(heuristics)


def made_up_finding(one: LengthClass, milliseconds: dict[str, list[float]]) -> Finding:
    """Standings of a class with these times, one a shape, each of two equal rounds."""
    configs = {name: one.configs[name] for name in milliseconds}
    rows: dict[str, list[Any]] = {name: [] for name in configs}
    for index, cell in enumerate(one.cells):
        samples = {name: [times[index]] * 2 for name, times in milliseconds.items()}
        for row in rows_of(cell, samples, configs, one.kind):
            rows[row.variant].append(row)
    ratios = {
        name: [Ratio(base / time, 0.0) for base, time in zip(milliseconds[DEFAULT], times, strict=True)]
        for name, times in milliseconds.items()
    }
    standings = [Standing.of(name, rows[name], ratios[name]) for name in configs]
    return Finding(one, tuple(sorted(standings, key=lambda standing: -standing.gain.value)))


def test_float16_is_searched_with_the_exact_softmax() -> None:
    (one,) = length_classes([Cell.of("float16", 128, False, 4096)], FORWARD)
    assert {spec.dtype for spec in one.specs.values()} == {"float16"}
    assert {getattr(config, "softmax", None) for config in one.configs.values()} == {"exact"}
    finding = made_up_finding(one, {DEFAULT: [1.0], "128x112:q_stages=2,softmax=exact,prefetch=on": [0.5]})
    row = finding.row(findings.TABLE_CARD)
    assert row is not None
    assert row.config == dataclasses.replace(one.row.config, tile_n=112)
    assert row.reason.endswith(" (float16)")


def test_the_reason_has_the_figures_of_the_new_row_the_old_and_the_next_best() -> None:
    cells = [Cell.of("bfloat16", 128, True, s) for s in (512, 1024, 2048)]
    (one,) = length_classes(cells, FORWARD)
    times = {
        DEFAULT: [0.1, 0.2, 0.4],
        "128x112:q_stages=2,waves=8": [0.081, 0.162, 0.36],
        "128x128:q_stages=2": [0.09, 0.18, 0.26],
    }
    finding = made_up_finding(one, times)
    assert finding.best is not None
    rates = {name: [f"{c.tflops(t):.0f}" for c, t in zip(cells, ms, strict=True)] for name, ms in times.items()}
    first, second, third = rates["128x128:q_stages=2"]
    row = finding.row("NVIDIA H200")
    assert row is not None
    old, other = rates[DEFAULT], rates["128x112:q_stages=2,waves=8"]
    assert row.reason == (
        f"{first}, {second} and {third} TFLOPS at 512, 1k and 2k keys; group_waves=8: {old[0]}, {old[1]} and {old[2]}; "
        f"128×112, group_waves=8: {other[0]}, {other[1]} and {other[2]}"
    )
    assert row._replace(reason="", config=one.row.config) == one.row._replace(reason="")
    assert row.config == dataclasses.replace(one.row.config, group_waves=2)
    assert (finding.row("NVIDIA H20") or row).reason.endswith(f"{other[2]} (NVIDIA H20)")
    assert finding.hints() == [
        f"at {s} keys 128x112:q_stages=2,waves=8 is faster: {new} to {now} TFLOPS"
        for s, new, now in (("512", other[0], first), ("1k", other[1], second))
    ]
    assert finding.to_json("NVIDIA H200")["new_row"] == row_source(row)


def test_a_row_that_nothing_beats_stays() -> None:
    (one,) = length_classes([Cell.of("bfloat16", 128, True, 512)], FORWARD)
    finding = made_up_finding(one, {DEFAULT: [1.0], "128x112:q_stages=2,waves=8": [0.995]})
    assert finding.standings[0].name != DEFAULT
    assert finding.row("NVIDIA H200") is None
    assert finding.hints() == []


def test_a_row_of_the_backward_can_be_split_by_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """As hints say; no row of the table is."""
    cells = [Cell.of("bfloat16", 128, True, s) for s in (512, 1024)]
    (one,) = length_classes(cells, BACKWARD)
    (hint,) = made_up_finding(one, {DEFAULT: [1.0, 1.0], next(reversed(one.configs)): [2.0, 0.2]}).hints()
    assert hint.startswith("at 512 queries default is faster")
    assert isinstance(one.row, BackwardRow)
    short = one.row._replace(max_seqlen_q=512)
    assert eval(row_source(short), vars(heuristics)) == short
    table = (*BACKWARD_TABLE[: one.number], short, *BACKWARD_TABLE[one.number :])
    for module in (heuristics, findings):
        monkeypatch.setattr(module, "BACKWARD_TABLE", table)
    assert [(str(part), part.row is short, part.cells) for part in length_classes(cells, BACKWARD)] == [
        ("BACKWARD_TABLE d128 causal, queries up to 512", True, (cells[0],)),
        ("BACKWARD_TABLE d128 causal", False, (cells[1],)),
    ]


@settings(deadline=None)
@given(st.sampled_from(ROWS), st.one_of(forward_configs, backward_configs), st.text(max_size=300))
def test_the_source_of_a_row_is_the_row(row: AnyRow, config: AnyConfig, reason: str) -> None:
    row = row._replace(config=config, reason=reason)  # type: ignore[arg-type]
    assert eval(row_source(row), vars(heuristics)) == row


def test_rows_are_formatted_as_the_formatter_would() -> None:
    pytest.importorskip("ruff")
    lines = [f"    {row_source(row)},\n" for row in ROWS]
    text = f"ROWS = (\n{''.join(lines)})\n"
    settings = ["--line-length", "120", "--isolated", "-"]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "format", *settings], input=text, capture_output=True, text=True, check=True
    )
    assert done.stdout == text


@pytest.mark.parametrize("table", ["TILE_TABLE", "BACKWARD_TABLE"])
def test_each_row_can_be_replaced_in_the_real_source(table: str) -> None:
    rows: tuple[AnyRow, ...] = getattr(heuristics, table)
    assert replace_rows(SOURCE, table, rows, {}) == SOURCE
    for number, row in enumerate(rows):
        new = [row._replace(reason="neu × “1”"), row._replace(head_dim=248)]
        names: dict[str, Any] = {"__name__": "copy"}
        source = replace_rows(SOURCE, table, rows, {number: new})
        exec(compile(source, "copy", "exec"), names)
        assert list(map(tuple, names[table])) == list(map(tuple, [*rows[:number], *new, *rows[number + 1 :]]))
        kept = [line for line in SOURCE.splitlines() if line.strip().startswith("#")]
        assert [line for line in source.splitlines() if line.strip().startswith("#")] == kept


def test_all_rows_are_replaced_at_once_and_what_they_leave_is_named() -> None:
    new = {number: [row._replace(reason="measured")] for number, row in enumerate(TILE_TABLE)}
    source = replace_rows(SOURCE, "TILE_TABLE", TILE_TABLE, new)
    assert unused_names(SOURCE) == []
    assert unused_names(source) == ["_D64_SHORT_CAUSAL", "_D64_SHORT_REASON", "_D96_SHORT_REASON"]


def test_a_source_of_another_form_is_refused() -> None:
    row = TILE_TABLE[0]
    with pytest.raises(BenchError, match="not the one that is running"):
        replace_rows(SOURCE, "TILE_TABLE", TILE_TABLE[1:], {0: [row]})
    with pytest.raises(BenchError, match="not the one that is running"):
        replace_rows(
            SOURCE.replace("TileRow(128, 128, False, 512", "TileRow(128, 128, False, 513"), "TILE_TABLE", TILE_TABLE, {}
        )
    with pytest.raises(BenchError, match="not a tuple of rows"):
        replace_rows("TILE_TABLE = tuple([])\n", "TILE_TABLE", TILE_TABLE, {})
