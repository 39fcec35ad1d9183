"""Tables: on the terminal, and in markdown between the README's markers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from flashhopper.bench import BenchError
from flashhopper.bench.case_peers import CASE_LABELS, CASE_NAMES
from flashhopper.bench.case_run import CaseResults
from flashhopper.bench.configs import DEFAULT, config_text
from flashhopper.bench.findings import Finding
from flashhopper.bench.grid import PEAK_TFLOPS, Cell, short_seqlen
from flashhopper.bench.passes import LABELS, OURS, OURS_DETERMINISTIC, Pass
from flashhopper.bench.results import GridResults, Row
from flashhopper.bench.variants import VariantResults, VariantRow

ABSENT = "–"


def grid_table(rows: Sequence[Row], title: str, kind: Pass) -> Table:
    """A line per cell: every implementation's TFLOPS, and ours against the best peer."""
    lines = [[*(_rate(row.tflops.get(name)) for name in kind.names), _verdict(row)] for row in rows]
    return _cell_table(rows, title, [*(LABELS[name] for name in kind.names), "to best peer"], lines)


def memory_table(rows: Sequence[Row], title: str) -> Table | None:
    """A line per cell: what is kept for the backward, and the backward's peak beyond that. None if nobody measured."""
    rows = [row for row in rows if row.memory]
    names = list(dict.fromkeys(name for row in rows for name in row.memory))
    if not names:
        return None
    columns = [(name, key) for key in ("saved_mib", "backward_peak_mib") for name in names]
    texts = {"saved_mib": "kept", "backward_peak_mib": "peak"}
    headings = [f"{texts[key]}, {LABELS[name]}" for name, key in columns]
    lines = [[_rate(row.memory.get(name, {}).get(key)) for name, key in columns] for row in rows]
    return _cell_table(rows, title, headings, lines)


def case_table(results: CaseResults) -> Table:
    """A line per case and pass: TFLOPS on visible pairs, ours against the best peer and against our dense speed."""
    names = [name for name in CASE_NAMES if any(name in row.tflops for row in results.rows)]
    device, date = results.machine["device"], results.machine["date"]
    table = Table(title=f"{results.command}: TFLOPS on visible pairs, {device}, {date}")
    for heading in ("case", "d", "pass", *(CASE_LABELS[name] for name in names), "to best peer", "to dense"):
        table.add_column(heading, justify="left" if heading in ("case", "pass") else "right")
    for row in results.rows:
        ratios = (ABSENT if ratio is None else f"{ratio:.3f}" for ratio in (row.ratio, row.to_dense))
        rates = (_rate(row.tflops.get(name)) for name in names)
        table.add_row(row.case.name, str(row.case.d), row.kind.name, *rates, *ratios)
    return table


def _cell_table(rows: Sequence[Row], title: str, headings: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title)
    for heading in ("d", "mask", "s", *headings):
        table.add_column(heading, justify="left" if heading == "mask" else "right")
    previous: Cell | None = None
    for row, line in zip(rows, lines, strict=True):
        if previous is not None and (previous.d, previous.causal) != (row.cell.d, row.cell.causal):
            table.add_section()
        previous = row.cell
        table.add_row(str(row.cell.d), row.cell.mask, short_seqlen(row.cell.s), *line)
    return table


def summary_lines(results: GridResults) -> list[str]:
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
    lines += _deterministic(results)
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


def _deterministic(results: GridResults) -> list[str]:
    """A sentence on what ``deterministic=True`` costs; none if it was not measured."""
    rate = results.summary().get("geomean_deterministic")
    return [] if rate is None else [f"ours with deterministic=True: {rate:.3f} of the default, geometric mean"]


def launch_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="host time per call, µs")
    for heading in ("implementation", "mode", "best", "median"):
        table.add_column(heading, justify="left" if heading in ("implementation", "mode") else "right")
    for row in rows:
        label = LABELS.get(row["name"], row["name"])
        table.add_row(label, row["mode"], f"{row['best_us']:.2f}", f"{row['median_us']:.2f}")
    return table


def variant_tables(results: VariantResults) -> list[Table]:
    """One table per head_dim: a line per variant, a column per mask and sequence length, TFLOPS, ratio and noise."""
    tables = []
    for d in dict.fromkeys(row.cell.d for row in results.rows):
        rows = [row for row in results.rows if row.cell.d == d]
        cells = list(dict.fromkeys(row.cell for row in rows))
        found = {(row.variant, row.cell): row for row in rows}
        table = Table(title=f"{cells[0].dtype} d{d}: TFLOPS, speed relative to the default, and its noise")
        table.add_column("configuration")
        for cell in cells:
            table.add_column(f"{short_seqlen(cell.s)} {cell.mask}", justify="right")
        for variant in dict.fromkeys(row.variant for row in rows):
            table.add_row(variant, *(_variant_cell(found.get((variant, cell))) for cell in cells))
        tables.append(table)
    return tables


def finding_table(finding: Finding) -> Table:
    """A line per finalist, fastest first: TFLOPS and ratio in each shape, then over all of them."""
    table = Table(title=f"{finding.of}: TFLOPS, speed relative to the row's, and its noise")
    table.add_column("configuration")
    for cell in finding.of.cells:
        table.add_column(short_seqlen(cell.s), justify="right")
    table.add_column("all", justify="right")
    for standing in finding.standings:
        gain = f"{standing.gain.value:.3f} ±{standing.gain.noise:.3f}"
        name = f"{DEFAULT}, {config_text(standing.config)}" if standing.name == DEFAULT else standing.name
        table.add_row(name, *map(_variant_cell, standing.rows), gain)
    return table


def markdown_table(results: GridResults, every_cell: bool = False) -> str:
    """The README's table: ours in TFLOPS with its ratio to the best peer, or every implementation in every cell."""
    if every_cell:
        return f"{_full_markdown(results.rows, results.kind)}\n\n{caption(results)}"
    kind = results.kind
    present = [LABELS[name] for name in kind.peers if any(row.tflops.get(name) is not None for row in results.rows)]
    meaning = f"In parentheses: times the fastest of {', '.join(present)} in that cell. " if present else ""
    notes = "".join(f" {line[0].upper()}{line[1:]}." for line in _deterministic(results))
    return f"{_compact_markdown(results.rows)}\n\n{meaning}{caption(results)}{notes}"


def caption(results: GridResults) -> str:
    """Where the figures come from: card, date, versions, the matmul rate beside them."""
    found = {name: version for name, version in results.versions.items() if name in LABELS}
    found.pop(OURS_DETERMINISTIC, None)  # the same package
    versions = [f"{LABELS[name]} {version}" for name, version in found.items() if version]
    head = f"TFLOPS on {results.machine['device']}, {results.machine['date']}, torch {results.machine['torch']}"
    rates = [rate for rate in results.matmul_tflops.values() if rate is not None]
    yardstick = f"; cuBLAS bf16 8192³ under load in the same run: {min(rates):.0f}–{max(rates):.0f}" if rates else ""
    return f"{head} ({', '.join(versions)}){yardstick}."


def has_markers(path: Path, kind: Pass) -> bool:
    if not path.is_file():
        raise BenchError(f"no file {path}")
    text = path.read_text(encoding="utf-8")
    return 0 <= text.find(kind.start_marker) < text.find(kind.end_marker)


def update_markers(path: Path, kind: Pass, text: str) -> bool:
    """Put ``text`` between the pass's markers in ``path``. True if the file changed."""
    if not has_markers(path, kind):
        raise BenchError(f"{path} needs the lines {kind.start_marker} and {kind.end_marker}, in this order")
    old = path.read_text(encoding="utf-8")
    head, _, rest = old.partition(kind.start_marker)
    tail = rest[rest.find(kind.end_marker) :]
    new = f"{head}{kind.start_marker}\n{text}\n{tail}"
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
    ratio = "" if row.ratio is None else f" {row.ratio:.3f}"
    return f"{row.tflops:.0f}{ratio}" + ("" if row.noise is None else f" ±{row.noise:.3f}")


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


def _full_markdown(rows: Sequence[Row], kind: Pass) -> str:
    headings = ["head_dim", "mask", "seqlen", *(LABELS[name] for name in kind.names), "to best peer"]
    lines = [_markdown_line(headings), _markdown_line(["---:", "---", *("---:" for _ in headings[2:])])]
    for row in rows:
        best = max((rate for name in kind.names if (rate := row.tflops.get(name)) is not None), default=None)
        rates = []
        for name in kind.names:
            rate = row.tflops.get(name)
            rates.append(f"**{_rate(rate)}**" if rate is not None and rate == best else _rate(rate))
        ratio = row.ratio()
        shape = [str(row.cell.d), row.cell.mask, short_seqlen(row.cell.s)]
        lines.append(_markdown_line([*shape, *rates, ABSENT if ratio is None else f"{ratio:.2f}×"]))
    return "\n".join(lines)


def _markdown_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
