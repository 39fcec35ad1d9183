"""The rows that ``flashhopper tune`` finds, and how they come into the source of the tables."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tune_fakes import ROWS, backward_configs, forward_configs

from flashhopper import heuristics
from flashhopper.bench import BenchError, findings
from flashhopper.bench.configs import DEFAULT, AnyConfig, config_text
from flashhopper.bench.findings import Finding, LengthClass, Standing, length_classes
from flashhopper.bench.grid import Cell
from flashhopper.bench.passes import BACKWARD, FORWARD
from flashhopper.bench.table_rows import AnyRow, replace_rows, row_source, unused_names
from flashhopper.bench.variants import Ratio, rows_of
from flashhopper.config import ForwardConfig
from flashhopper.heuristics import BACKWARD_TABLE, TILE_TABLE, BackwardRow, TileRow

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


@pytest.mark.parametrize("head_dim", [64, 128])
def test_float16_is_searched_with_the_exact_softmax(head_dim: int) -> None:
    """From where its row has another configuration for that."""
    (one,) = length_classes([Cell.of("float16", head_dim, False, 4096)], FORWARD)
    assert isinstance(one.row, TileRow)
    assert {spec.dtype for spec in one.specs.values()} == {"float16"}
    assert {getattr(config, "softmax", None) for config in one.configs.values()} == {"exact"}
    assert (one.row.exact is None) == (head_dim == 64)
    assert one.base == dataclasses.replace(one.row.exact or one.row.config, softmax="exact")


@pytest.mark.parametrize("head_dim", [128, 256])
def test_a_finding_of_float16_is_for_the_exact_softmax_alone(head_dim: int) -> None:
    """Whether its row has another configuration for that or not, bfloat16's stays."""
    (one,) = length_classes([Cell.of("float16", head_dim, False, 4096)], FORWARD)
    changed = dataclasses.replace(one.base, group_waves=4)
    row = made_up_finding(one, {DEFAULT: [1.0], config_text(changed): [0.5]}).row(findings.TABLE_CARD)
    assert isinstance(row, TileRow)
    assert (row.config, row.exact) == (one.row.config, changed)
    assert row.reason.startswith(one.row.reason)
    assert row.reason.endswith(" (float16)")


def test_the_reason_has_the_figures_of_the_new_row_the_old_and_the_next_best() -> None:
    cells = [Cell.of("bfloat16", 64, True, s) for s in (512, 1024, 2048)]
    (one,) = length_classes(cells, FORWARD)
    tile_m, tile_n = one.base.tile_m, one.base.tile_n - 16
    assert one.base.group_waves == 8
    fewer_waves, fewer_keys = (
        config_text(dataclasses.replace(one.base, **change)) for change in ({"group_waves": 2}, {"tile_n": tile_n})
    )
    times = {DEFAULT: [0.1, 0.2, 0.4], fewer_keys: [0.081, 0.162, 0.36], fewer_waves: [0.09, 0.18, 0.26]}
    finding = made_up_finding(one, times)
    assert finding.best is not None
    rates = {name: [f"{c.tflops(t):.0f}" for c, t in zip(cells, ms, strict=True)] for name, ms in times.items()}
    first, second, third = rates[fewer_waves]
    row = finding.row("NVIDIA H200")
    assert row is not None
    old, other = rates[DEFAULT], rates[fewer_keys]
    assert row.reason == (
        f"{first}, {second} and {third} TFLOPS at 512, 1k and 2k keys; group_waves=8: {old[0]}, {old[1]} and {old[2]}; "
        f"{tile_m}×{tile_n}, group_waves=8: {other[0]}, {other[1]} and {other[2]}"
    )
    assert isinstance(row, TileRow)
    assert isinstance(one.row, TileRow)
    kept = one.row.config if one.row.exact is None else one.row.exact  # float16's
    assert row._replace(reason="", config=one.row.config) == one.row._replace(reason="", exact=kept)
    assert row.config == dataclasses.replace(one.row.config, group_waves=2)
    assert (finding.row("NVIDIA H20") or row).reason.endswith(f"{other[2]} (NVIDIA H20)")
    assert finding.hints() == [
        f"at {s} keys {fewer_keys} is faster: {new} to {now} TFLOPS"
        for s, new, now in (("512", other[0], first), ("1k", other[1], second))
    ]
    assert finding.to_json("NVIDIA H200")["new_row"] == row_source(row)


def test_a_row_that_nothing_beats_stays() -> None:
    (one,) = length_classes([Cell.of("bfloat16", 128, True, 512)], FORWARD)
    finding = made_up_finding(one, {DEFAULT: [1.0], next(reversed(one.configs)): [0.995]})
    assert finding.standings[0].name != DEFAULT
    assert finding.row("NVIDIA H200") is None
    assert finding.hints() == []


def test_a_row_of_the_backward_can_be_split_by_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """As hints say."""
    cells = [Cell.of("bfloat16", 64, True, s) for s in (512, 1024)]
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
        ("BACKWARD_TABLE d64 causal, queries up to 512", True, (cells[0],)),
        ("BACKWARD_TABLE d64 causal", False, (cells[1],)),
    ]


@settings(deadline=None)
@given(
    st.sampled_from(ROWS),
    st.one_of(forward_configs, backward_configs),
    st.text(max_size=300),
    st.none() | forward_configs,
)
def test_the_source_of_a_row_is_the_row(
    row: AnyRow, config: AnyConfig, reason: str, exact: ForwardConfig | None
) -> None:
    row = row._replace(config=config, reason=reason)  # type: ignore[arg-type]
    row = row._replace(exact=exact) if isinstance(row, TileRow) else row
    assert eval(row_source(row), vars(heuristics)) == row


def test_rows_are_formatted_as_the_formatter_would() -> None:
    pytest.importorskip("ruff")
    long = ForwardConfig(128, 128, num_q_stages=2, softmax="exact", warpgroup_order="ping_pong", group_waves=8)
    rows = [*ROWS, *(row._replace(exact=long) for row in TILE_TABLE)]
    lines = [f"    {row_source(row)},\n" for row in rows]
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
    rest = SOURCE[: SOURCE.index("TILE_TABLE: ")] + SOURCE[SOURCE.index("class BackwardRow") :]
    private = re.findall(r"^(_\w+) = ", rest, re.MULTILINE)
    of_the_table = [name for name in private if len(re.findall(rf"\b{name}\b", rest)) == 1]
    assert {"_D128_TWO_REASON", "_D64_FOUR"} <= set(of_the_table)
    assert "_WITH_MODS" not in of_the_table
    assert unused_names(source) == of_the_table


def test_a_source_of_another_form_is_refused() -> None:
    row = TILE_TABLE[0]
    with pytest.raises(BenchError, match="not the one that is running"):
        replace_rows(SOURCE, "TILE_TABLE", TILE_TABLE[1:], {0: [row]})
    edited = SOURCE.replace("_D128_TWO_REASON, 1024,", "_D128_TWO_REASON, 1025,")
    assert edited != SOURCE
    with pytest.raises(BenchError, match="not the one that is running"):
        replace_rows(edited, "TILE_TABLE", TILE_TABLE, {})
    with pytest.raises(BenchError, match="not a tuple of rows"):
        replace_rows("TILE_TABLE = tuple([])\n", "TILE_TABLE", TILE_TABLE, {})
