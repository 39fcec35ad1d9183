"""``flashhopper tune``: search tiles and stages around rows of the tile tables, and write the rows that are faster."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashhopper.bench import BenchError
from flashhopper.cli.arguments import (
    add_compile_arguments,
    add_pass_argument,
    chosen_seed,
    head_dim,
    reporting_errors,
    seqlen,
)
from flashhopper.cli.bench_output import make_console, print_errors, print_skipped, progress_bar
from flashhopper.cli.warmup import warm_specs
from flashhopper.disk_cache import DiskCache, cache_dir

if TYPE_CHECKING:
    from flashhopper.bench.findings import LengthClass
    from flashhopper.bench.table_rows import AnyRow
    from flashhopper.bench.tune import TuneResults

RESULTS = Path("benchmarks/results")


def add_parser(subparsers: Any) -> None:
    """Add ``tune``."""
    text = "search tiles and stages around the rows of the tile tables that serve a head dimension"
    parser = subparsers.add_parser("tune", help=text, description=text)
    parser.set_defaults(run=reporting_errors("tune", run))
    add_pass_argument(parser)
    parser.add_argument(
        "--head-dim", type=head_dim, nargs="+", default=[128], metavar="D", help="of q and k, then of v (default: 128)"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--mask", choices=("full", "causal", "both"), default="both", help="default: both")
    parser.add_argument(
        "--seqlen", type=seqlen, nargs="+", metavar="S", help="512, 16k, ... (default: 512 1k 2k 4k 16k)"
    )
    parser.add_argument(
        "--budget-seconds",
        type=_seconds,
        default=300.0,
        help="for checks and timing on the card, after compiling (default: 300)",
    )
    text = "configurations to leave out, by the names that --dry-run lists"
    parser.add_argument("--skip", nargs="+", default=[], metavar="NAME", help=text)
    parser.add_argument("--seed", type=int, help="of the inputs; a fresh one by default, printed either way")
    add_compile_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="list the configurations and stop; needs no GPU")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"the JSON file (default: {RESULTS}/tune_*.json)")
    parser.add_argument("--write", action="store_true", help="put faster rows into heuristics.py, not only on paper")


def run(args: argparse.Namespace) -> int:
    from flashhopper.bench.configs import companion_specs
    from flashhopper.bench.findings import length_classes
    from flashhopper.bench.tune import without_unfit
    from flashhopper.inspect_kernel import cached_report, warm_with_report

    if args.write and args.dtype != "bfloat16":
        raise BenchError("--write: the rows and their figures are of bfloat16; leave --dtype out")
    cells = _cells(args)
    classes = length_classes(cells, args.kind, args.skip)
    if args.dry_run:
        return _print_plan(classes)
    if not args.compile_only:
        _require_hopper()
    main_specs = [spec for one in classes for spec in one.specs.values()]
    specs = list(dict.fromkeys([*main_specs, *companion_specs(args.kind, cells)]))
    try:
        if problem := DiskCache(cache_dir()).problem():
            raise OSError(f"cannot write to the kernel cache, where kernels wait to be timed: {problem}")
        code = warm_specs(specs, args.jobs, warm_with_report, lambda spec: cached_report(spec) is not None)
    except (OSError, ImportError) as error:
        raise BenchError(str(error)) from error
    classes, dropped = without_unfit(classes, cached_report)
    print_skipped(dropped, "left out: ")
    return code if args.compile_only else _measure(args, classes, dropped) or code


def _measure(args: argparse.Namespace, classes: Sequence[LengthClass], dropped: Sequence[dict[str, str]]) -> int:
    from flashhopper.bench.results import write_json
    from flashhopper.bench.timing import CudaClock
    from flashhopper.bench.tune import TuneOptions, TuneRun

    options = TuneOptions(classes, chosen_seed(args), args.budget_seconds, dropped)
    with progress_bar() as (progress, total):
        tuning = TuneRun(options, CudaClock(), progress)
        total(tuning.steps())
        results = tuning.run()
    output = args.output or _default_output(args)
    write_json(output, results.to_json())
    _print_findings(results)
    print(f"wrote {output}")
    if args.write:
        _write_rows(args, results.new_rows())
    return print_errors(results.errors)


def _cells(args: argparse.Namespace) -> list[Any]:
    from flashhopper.bench.grid import MASKS, Cell
    from flashhopper.bench.tune import SEQLENS

    if len(args.head_dim) > 2:
        raise BenchError(
            f"--head-dim takes that of q and k, and of v if it is another; got {len(args.head_dim)} numbers"
        )
    d, dv = args.head_dim[0], args.head_dim[-1]
    lengths = sorted(set(args.seqlen or SEQLENS))
    return [Cell.of(args.dtype, d, causal, s, dv) for causal in MASKS[args.mask] for s in lengths]


def _require_hopper() -> None:
    from flashhopper.bench.environment import require_hopper

    try:
        require_hopper()
    except BenchError as error:
        raise BenchError(f"{error}; --compile-only fills the kernel cache without one, --dry-run lists it") from None


def _default_output(args: argparse.Namespace) -> Path:
    dims = "x".join(map(str, dict.fromkeys(args.head_dim)))
    return RESULTS / f"tune_{args.kind.name}_d{dims}.json"


def _print_plan(classes: Sequence[LengthClass]) -> int:
    for one in classes:
        print(f"{one}: {len(one.configs)} configurations at {', '.join(str(cell.s) for cell in one.cells)}")
        for name, config in one.configs.items():
            smem = config.smem_bytes(one.cells[0].d, one.cells[0].head_dim_v)
            print(f"  {name}  {smem / 1024:.0f} KiB")
    print(f"{len({spec for one in classes for spec in one.specs.values()})} kernels")
    return 0


def _print_findings(results: TuneResults) -> None:
    from flashhopper.bench.report import finding_table
    from flashhopper.bench.table_rows import row_source

    device = results.machine["device"]
    print_skipped(results.skipped)
    for finding in results.findings:
        make_console().print(finding_table(finding))
        for hint in finding.hints():
            print(hint)
        row = finding.row(device)
        print(f"{finding.of}:" if row is not None else f"{finding.of}: the present row stays")
        if row is not None:
            print(f"    {row_source(row)},")


def _write_rows(args: argparse.Namespace, new: dict[int, list[AnyRow]]) -> None:
    """Into the source that is running, checked before it is written."""
    from flashhopper import heuristics
    from flashhopper.bench.findings import table_name, table_of
    from flashhopper.bench.table_rows import replace_rows, unused_names

    path = Path(heuristics.__file__)
    if not new:
        print(f"{path.name} is unchanged")
        return
    source = replace_rows(path.read_text(encoding="utf-8"), table_name(args.kind), table_of(args.kind), new)
    try:
        path.write_text(source, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--write: {error}; paste the rows above by hand") from error
    print(f"{path.name}: {len(new)} row{'s' * (len(new) > 1)} of {table_name(args.kind)} replaced; look at the diff")
    if unused := unused_names(source):
        print(f"no longer used there: {', '.join(unused)}")


def _seconds(text: str) -> float:
    """argparse's type of a budget."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0")
    return value
