"""Tables: on the terminal, and in markdown between the README's markers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from flashhopper.bench import BenchError
from flashhopper.bench.grid import PEAK_TFLOPS, Cell, short_seqlen
from flashhopper.bench.peers import LABELS, NAMES, OURS, PEERS
from flashhopper.bench.results import ForwardResults, Row
from flashhopper.bench.variants import VariantResults, VariantRow

START_MARKER = "<!-- forward-table:start -->"
END_MARKER = "<!-- forward-table:end -->"
ABSENT = "–"


def forward_table(rows: Sequence[Row], title: str) -> Table:
    """A line per cell: every implementation's TFLOPS, and ours against the best peer."""
    table = Table(title=title)
    for heading in ("d", "mask", "s", *(LABELS[name] for name in NAMES), "to best peer"):
        table.add_column(heading, justify="left" if heading == "mask" else "right")
    previous: Cell | None = None
    for row in rows:
        if previous is not None and (previous.d, previous.causal) != (row.cell.d, row.cell.causal):
            table.add_section()
        previous = row.cell
        rates = [_rate(row.tflops.get(name)) for name in NAMES]
        table.add_row(str(row.cell.d), row.cell.mask, short_seqlen(row.cell.s), *rates, _verdict(row))
    return table


def summary_lines(results: ForwardResults) -> list[str]:
    """Geometric mean, worst cell, headline shapes, and the card's matmul rate, as sentences."""
    summary = results.summary()
    lines = []
    if summary["cells"]:
        lines.append(
            f"ours to the best peer: geometric mean {summary['geomean_vs_best_peer']:.3f} over {summary['cells']} "
            f"cells, ahead in {summary['wins']}; worst {summary['min_ratio']:.3f} at {summary['min_ratio_cell']}"
        )
        versus = [f"{LABELS[name]} {ratio:.3f}" for name, ratio in summary["geomean_vs"].items() if ratio is not None]
        lines.append(f"geometric mean to each peer: {', '.join(versus)}")
    for kind, figures in summary["headline"].items():
        parts = []
        if figures["peak_fraction"]:
            low, high = figures["peak_fraction"]
            parts.append(f"{low:.0%} to {high:.0%} of {PEAK_TFLOPS:.0f} TFLOPS")
        if figures["speedup_over_fa2"]:
            low, high = figures["speedup_over_fa2"]
            parts.append(f"{low:.2f} to {high:.2f} times {LABELS['fa2']}")
        if parts:
            lines.append(f"d128, s = 8k to 32k, {kind}: {', '.join(parts)}")
    before, after = (_rate(results.matmul_tflops.get(when)) for when in ("before", "after"))
    lines.append(f"cuBLAS bf16 8192³ under load: {before} TFLOPS before, {after} after")
    return lines


def launch_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="host time per call, µs")
    for heading in ("implementation", "mode", "best", "median"):
        table.add_column(heading, justify="left" if heading in ("implementation", "mode") else "right")
    for row in rows:
        label = LABELS.get(row["name"], row["name"])
        table.add_row(label, row["mode"], f"{row['best_us']:.2f}", f"{row['median_us']:.2f}")
    return table


def variant_tables(results: VariantResults) -> list[Table]:
    """One table per head_dim: a line per variant, a column per mask and sequence length, TFLOPS and ratio."""
    tables = []
    for d in dict.fromkeys(row.cell.d for row in results.rows):
        rows = [row for row in results.rows if row.cell.d == d]
        cells = list(dict.fromkeys(row.cell for row in rows))
        found = {(row.variant, row.cell): row for row in rows}
        table = Table(title=f"{cells[0].dtype} d{d}: TFLOPS, and speed relative to the default")
        table.add_column("configuration")
        for cell in cells:
            table.add_column(f"{short_seqlen(cell.s)} {cell.mask}", justify="right")
        for variant in dict.fromkeys(row.variant for row in rows):
            table.add_row(variant, *(_variant_cell(found.get((variant, cell))) for cell in cells))
        tables.append(table)
    return tables


def markdown_table(results: ForwardResults, every_cell: bool = False) -> str:
    """The README's table: ours in TFLOPS with its ratio to the best peer, or every implementation in every cell."""
    if every_cell:
        return f"{_full_markdown(results.rows)}\n\n{caption(results)}"
    present = [LABELS[name] for name in PEERS if any(row.tflops.get(name) is not None for row in results.rows)]
    meaning = f"In parentheses: times the fastest of {', '.join(present)} in that cell. " if present else ""
    return f"{_compact_markdown(results.rows)}\n\n{meaning}{caption(results)}"


def caption(results: ForwardResults) -> str:
    """Where the figures come from: card, date, versions, the matmul rate beside them."""
    versions = [f"{LABELS[name]} {version}" for name, version in results.versions.items() if version and name in LABELS]
    head = f"TFLOPS on {results.machine['device']}, {results.machine['date']}, torch {results.machine['torch']}"
    rates = [rate for rate in results.matmul_tflops.values() if rate is not None]
    yardstick = f"; cuBLAS bf16 8192³ under load in the same run: {min(rates):.0f}–{max(rates):.0f}" if rates else ""
    return f"{head} ({', '.join(versions)}){yardstick}."


def update_markers(path: Path, text: str) -> bool:
    """Put ``text`` between the markers of ``path``. True if the file changed."""
    if not path.is_file():
        raise BenchError(f"no file {path}")
    old = path.read_text(encoding="utf-8")
    start, end = old.find(START_MARKER), old.find(END_MARKER)
    if start < 0 or end < start:
        raise BenchError(f"{path} needs the lines {START_MARKER} and {END_MARKER}, in this order")
    new = f"{old[: start + len(START_MARKER)]}\n{text}\n{old[end:]}"
    if new != old:
        path.write_text(new, encoding="utf-8")
    return new != old


def _rate(rate: float | None) -> str:
    return ABSENT if rate is None else f"{rate:.0f}"


def _verdict(row: Row) -> str:
    ratio, best = row.ratio(), row.best_peer()
    if ratio is None or best is None:
        return ABSENT
    colour = "green" if ratio >= 1.0 else "red"
    return f"[{colour}]{ratio:.3f}[/] {LABELS[best[0]]}"


def _variant_cell(row: VariantRow | None) -> str:
    if row is None:
        return ABSENT
    return f"{row.tflops:.0f}" + ("" if row.ratio is None else f" {row.ratio:.3f}")


def _compact_markdown(rows: Sequence[Row]) -> str:
    lengths = sorted({row.cell.s for row in rows})
    found = {(row.cell.d, row.cell.causal, row.cell.s): row for row in rows}
    headings = ["head_dim", "mask", *(short_seqlen(s) for s in lengths)]
    lines = [_markdown_line(headings), _markdown_line(["---:", "---", *("---:" for _ in lengths)])]
    for d, causal in dict.fromkeys((row.cell.d, row.cell.causal) for row in rows):
        cells = [_compact_cell(found.get((d, causal, s))) for s in lengths]
        lines.append(_markdown_line([str(d), "causal" if causal else "full", *cells]))
    return "\n".join(lines)


def _compact_cell(row: Row | None) -> str:
    if row is None or row.tflops.get(OURS) is None:
        return ABSENT
    ratio = row.ratio()
    return _rate(row.tflops[OURS]) + ("" if ratio is None else f" ({ratio:.2f}×)")


def _full_markdown(rows: Sequence[Row]) -> str:
    headings = ["head_dim", "mask", "seqlen", *(LABELS[name] for name in NAMES), "to best peer"]
    lines = [_markdown_line(headings), _markdown_line(["---:", "---", *("---:" for _ in headings[2:])])]
    for row in rows:
        best = max((rate for name in NAMES if (rate := row.tflops.get(name)) is not None), default=None)
        rates = []
        for name in NAMES:
            rate = row.tflops.get(name)
            rates.append(f"**{_rate(rate)}**" if rate is not None and rate == best else _rate(rate))
        ratio = row.ratio(PEERS)
        shape = [str(row.cell.d), row.cell.mask, short_seqlen(row.cell.s)]
        lines.append(_markdown_line([*shape, *rates, ABSENT if ratio is None else f"{ratio:.2f}×"]))
    return "\n".join(lines)


def _markdown_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
