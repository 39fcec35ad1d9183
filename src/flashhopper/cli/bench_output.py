"""What ``flashhopper bench`` prints: a bar while it runs, tables, and reasons."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console

    from flashhopper.bench.results import GridResults
    from flashhopper.bench.run import Progress
    from flashhopper.bench.variants import VariantResults


class Results(Protocol):
    """Of any run."""

    rows: Any

    def to_json(self) -> dict[str, Any]: ...


@contextmanager
def kept_if_cut_off(results: Results, path: Path) -> Iterator[None]:
    """Write what has been measured beside ``path``, to ``NAME.cut_off.json``, if the run is interrupted or ended by
    ``timeout``. Nothing is written without a row."""
    from flashhopper.bench.results import write_json

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        if results.rows:
            kept = path.with_suffix(".cut_off.json")
            write_json(kept, results.to_json())
            print(f"cut off after {len(results.rows)} rows, which are in {kept}", file=sys.stderr)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def make_console(stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=140)


@contextmanager
def progress_bar() -> Iterator[tuple[Progress, Callable[[int], None]]]:
    """A bar on stderr, and the function that sets how many steps it has."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    from flashhopper.bench.run import Progress

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=make_console(stderr=True)) as bar:
        task = bar.add_task("starting", total=None)
        step = Progress(
            step=lambda text: bar.update(task, advance=1, description=text),
            say=lambda line: bar.console.print(line, markup=False, highlight=False),
        )
        yield step, lambda steps: bar.update(task, total=steps)


def print_grid(results: GridResults) -> None:
    from flashhopper.bench.report import grid_table, memory_table, summary_lines

    console = make_console()
    machine = results.machine
    kind = results.kind
    where = f"{machine['device']}, {machine['date']}"
    console.print(grid_table(results.rows, f"{kind.name} TFLOPS, sustained, {where}", kind))
    if results.burst:
        console.print(grid_table(results.burst, "cold burst: the first 10 launches after a pause", kind))
    memory = memory_table(results.rows, "MiB kept for the backward, and its peak beyond that")
    if memory is not None:
        console.print(memory)
    for line in summary_lines(results):
        console.print(line, markup=False, highlight=False)
    print_skipped(results.skipped)


def print_variants(results: VariantResults) -> None:
    from flashhopper.bench.report import variant_tables

    for table in variant_tables(results):
        make_console().print(table)
    print_skipped(results.skipped)


def print_skipped(skipped: list[dict[str, str]], prefix: str = "") -> None:
    """One line per reason, however many cells it emptied."""
    places: dict[tuple[str, str], list[str]] = {}
    for entry in skipped:
        name = entry.get("implementation") or entry.get("variant", "")
        places.setdefault((name, entry["reason"]), []).append(entry["where"])
    for (name, reason), where in places.items():
        more = f" and {len(where) - 1} more" if len(where) > 1 else ""
        print(f"{prefix}{name}: {where[0]}{more}: {reason}")


def print_errors(errors: list[str]) -> int:
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return int(bool(errors))
