"""``flashhopper bench``: the benchmarks' command line. Heavy imports wait until a command runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashhopper.bench import BenchError
from flashhopper.bench.passes import BACKWARD, FORWARD, OURS, PASSES, TRAIN, Pass
from flashhopper.cli.arguments import (
    Run,
    add_compile_arguments,
    add_pass_argument,
    chosen_seed,
    head_dim,
    reporting_errors,
    seqlen,
)
from flashhopper.cli.bench_output import (
    kept_if_cut_off,
    make_console,
    print_errors,
    print_grid,
    print_skipped,
    print_variants,
    progress_bar,
)

if TYPE_CHECKING:
    from flashhopper.bench.configs import Variants
    from flashhopper.bench.grid import Cell
    from flashhopper.bench.peers import Peer
    from flashhopper.bench.results import GridResults

RESULTS = Path("benchmarks/results")
IMAGES = Path("docs/images")

Subparsers = Any  # argparse's own type for it is private


def add_parser(subparsers: Subparsers) -> None:
    """Add ``bench`` and its commands; each sets ``run``, which takes the parsed arguments and returns the exit code."""
    parser = subparsers.add_parser("bench", help="measure this package and its peers on a Hopper GPU")
    commands = parser.add_subparsers(dest="bench_command", required=True, metavar="COMMAND")
    _add_grid(commands, FORWARD, "forward TFLOPS of every installed implementation")
    _add_grid(commands, BACKWARD, "backward TFLOPS of every installed implementation, and its memory")
    _add_grid(commands, TRAIN, "TFLOPS of forward and backward in one step, and the backward's memory")
    _add_cases(commands, "varlen", "ragged batches: TFLOPS on visible pairs, and ours to our own dense speed")
    _add_cases(commands, "masks", "windows, softcap and sinks at 16k tokens: TFLOPS on visible pairs")
    _add_fp8(commands)
    _add_launch(commands)
    _add_ablation(commands)
    _add_tiles(commands)
    _add_plot(commands)
    _add_table(commands)


def _command(commands: Subparsers, name: str, run: Run, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(run=reporting_errors(f"bench {name}", run))
    return parser


def _add_grid_arguments(parser: argparse.ArgumentParser, head_dims: str, seqlens: str) -> None:
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--head-dim", type=head_dim, nargs="+", metavar="D", help=f"default: {head_dims}")
    parser.add_argument("--seqlen", type=seqlen, nargs="+", metavar="S", help=f"512, 16k, ... (default: {seqlens})")
    mask = parser.add_mutually_exclusive_group()
    for name, text in (("full", "no mask"), ("causal", "the causal mask"), ("both", "both (the default)")):
        mask.add_argument(f"--{name}", dest="mask", action="store_const", const=name, help=text)
    parser.set_defaults(mask="both")


def _add_run_arguments(parser: argparse.ArgumentParser, output: Path | None, peers: str, kind: Pass = FORWARD) -> None:
    names = ", ".join(name for name in kind.names if name != OURS)
    parser.add_argument("--peers", nargs="*", metavar="NAME", help=f"of {names} (default: {peers})")
    parser.add_argument("--seed", type=int, help="of the inputs; a fresh one by default, printed either way")
    parser.add_argument("--output", type=Path, default=output, help=f"the JSON file (default: {output or 'none'})")


def _add_budget_arguments(parser: argparse.ArgumentParser, seconds: str, default: float | None) -> None:
    parser.add_argument("--budget-seconds", type=float, default=default, help=f"for the run (default: {seconds})")
    parser.add_argument("--seconds-per-cell", type=float, default=6.0, help="at most (default: 6)")


def _add_grid(commands: Subparsers, kind: Pass, text: str) -> None:
    parser = _command(commands, kind.name, _run_grid, text)
    parser.set_defaults(kind=kind)
    _add_grid_arguments(parser, "64 128 256", "512 to 32k in powers of two")
    _add_run_arguments(parser, _result_file(kind), "all that are installed", kind)
    _add_budget_arguments(parser, "300, with --quick 60", None)
    parser.add_argument("--quick", action="store_true", help="s = 2k and 16k only, no cold burst, one minute")
    parser.add_argument("--no-burst", action="store_true", help="leave out the cold-burst figures (75 s)")
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="fail if a ratio to the best peer dropped over 4 %%"
    )


def _add_cases(commands: Subparsers, name: str, text: str) -> None:
    parser = _command(commands, name, _run_cases, text)
    parser.set_defaults(command=name)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--head-dim", type=head_dim, nargs="+", metavar="D", help="default: 64 128")
    parser.add_argument("--peers", nargs="*", metavar="NAME", help="of fa4, fa3, flex, cudnn (default: all installed)")
    parser.add_argument("--seed", type=int, help="of the inputs; a fresh one by default, printed either way")
    parser.add_argument("--output", type=Path, default=RESULTS / f"{name}.json", help="the JSON file")
    _add_budget_arguments(parser, "600", 600.0)


def _add_fp8(commands: Subparsers) -> None:
    text = "FP8 forward TFLOPS: ours, fast and end to end from bf16, beside FA3's FP8 and our bf16"
    parser = _command(commands, "fp8", _run_fp8, text)
    _add_grid_arguments(parser, "64 128 256", "512 to 32k in powers of two")
    parser.add_argument("--seed", type=int, help="of the inputs; a fresh one by default, printed either way")
    parser.add_argument("--output", type=Path, default=RESULTS / "fp8.json", help="the JSON file")
    parser.add_argument("--budget-seconds", type=float, default=300.0, help="for the run (default: 300)")


def _add_launch(commands: Subparsers) -> None:
    parser = _command(commands, "launch", _run_launch, "host time per call, kernels compiled")
    _add_run_arguments(parser, RESULTS / "launch.json", "all that are installed")


def _add_ablation(commands: Subparsers) -> None:
    text = "the default kernel against itself with one technique switched off"
    parser = _command(commands, "ablation", _run_ablation, text)
    parser.set_defaults(kind=FORWARD)
    _add_grid_arguments(parser, "128 64 256", "16k 2k")
    _add_run_arguments(parser, RESULTS / "ablation.json", "none")
    _add_budget_arguments(parser, "600", 600.0)
    add_compile_arguments(parser)


def _add_tiles(commands: Subparsers) -> None:
    text = "explicit configurations against the default, for picking rows of the tile tables"
    parser = _command(commands, "tiles", _run_tiles, text)
    add_pass_argument(parser)
    _add_grid_arguments(parser, "128", "16k 2k")
    _add_run_arguments(parser, None, "none")
    _add_budget_arguments(parser, "300", 300.0)
    add_compile_arguments(parser)
    text = "such as '128x128:stages=2,softmax=lazy;128x176'; fields are those of ForwardConfig or BackwardConfig"
    parser.add_argument("--configs", required=True, help=text)


def _add_plot(commands: Subparsers) -> None:
    parser = _command(commands, "plot", _run_plot, "a PNG from each result file of bench forward, backward and train")
    _add_input_argument(parser)
    parser.add_argument("--output", type=Path, help=f"with --input only (default: {IMAGES}/PASS.png)")


def _add_table(commands: Subparsers) -> None:
    text = "a table from each result file of bench forward, backward and train"
    parser = _command(commands, "table", _run_table, text)
    _add_input_argument(parser)
    parser.add_argument("--markdown", action="store_true", help="print markdown instead of a terminal table")
    parser.add_argument("--every-cell", action="store_true", help="markdown with a line per cell, peers included")
    text = "put the markdown between FILE's markers <!-- PASS-table:start --> and <!-- PASS-table:end -->"
    parser.add_argument("--update", type=Path, metavar="FILE", help=text)


def _add_input_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", type=Path, metavar="FILE", help=f"default: those that exist in {RESULTS}")


def _run_grid(args: argparse.Namespace) -> int:
    from flashhopper.bench.environment import require_hopper
    from flashhopper.bench.grid import HEAD_DIMS, QUICK_SEQLENS, SEQLENS
    from flashhopper.bench.results import read_results, write_json
    from flashhopper.bench.run import GridOptions, GridRun
    from flashhopper.bench.timing import CudaClock

    require_hopper()
    earlier = read_results(args.against) if args.against else None
    if earlier is not None and earlier.kind != args.kind:
        raise BenchError(f"--against {args.against}: a result of bench {earlier.kind.name}, not {args.kind.name}")
    options = GridOptions(
        cells=_cells(args, HEAD_DIMS, QUICK_SEQLENS if args.quick else SEQLENS),
        peers=_peers(args.peers, args.kind),
        seed=chosen_seed(args),
        budget_seconds=args.budget_seconds or (60.0 if args.quick else 300.0),
        seconds_per_cell=args.seconds_per_cell,
        burst=not (args.quick or args.no_burst),
        kind=args.kind,
    )
    with progress_bar() as (progress, total):
        run = GridRun(options, CudaClock(), progress)
        total(run.steps())
        with kept_if_cut_off(run.results, args.output):
            results = run.run()
    write_json(args.output, results.to_json())
    print_grid(results)
    print(f"wrote {args.output}")
    code = print_errors(results.errors)
    return code if earlier is None else _gate(results, earlier, args.against) or code


def _run_cases(args: argparse.Namespace) -> int:
    from flashhopper.bench.case_peers import case_peers
    from flashhopper.bench.case_run import CaseOptions, CaseRun
    from flashhopper.bench.cases import CASE_HEAD_DIMS, CASES
    from flashhopper.bench.environment import require_hopper
    from flashhopper.bench.report import case_table
    from flashhopper.bench.results import write_json
    from flashhopper.bench.timing import CudaClock

    every = case_peers()
    unknown = sorted(set(args.peers or ()) - set(every))
    if unknown:
        raise BenchError(
            f"--peers names {', '.join(unknown)}; there are {', '.join(name for name in every if name != OURS)}"
        )
    require_hopper()
    options = CaseOptions(
        command=args.command,
        cases=CASES[args.command](args.dtype, args.head_dim or CASE_HEAD_DIMS),
        peers=[peer for name, peer in every.items() if args.peers is None or name in (OURS, *args.peers)],
        seed=chosen_seed(args),
        budget_seconds=args.budget_seconds,
        seconds_per_cell=args.seconds_per_cell,
    )
    with progress_bar() as (progress, total):
        run = CaseRun(options, CudaClock(), progress)
        total(run.steps())
        with kept_if_cut_off(run.results, args.output):
            results = run.run()
    write_json(args.output, results.to_json())
    make_console().print(case_table(results))
    print_skipped(results.skipped)
    print(f"wrote {args.output}")
    return print_errors(results.errors)


def _gate(results: GridResults, earlier: GridResults, path: Path) -> int:
    from flashhopper.bench.results import compare

    verdict = compare(results.rows, earlier.rows)
    for line in (*verdict.drops, *verdict.problems):
        print(f"against {path}: {line}", file=sys.stderr)
    outcome = "passed" if verdict.passed else "failed"
    print(f"against {path}: {verdict.compared} cells compared, {outcome}")
    return int(not verdict.passed)


def _run_fp8(args: argparse.Namespace) -> int:
    from flashhopper.bench.environment import require_hopper
    from flashhopper.bench.fp8 import Fp8Run, geometric_means
    from flashhopper.bench.grid import HEAD_DIMS, SEQLENS
    from flashhopper.bench.results import write_json
    from flashhopper.bench.timing import CudaClock

    require_hopper()
    run = Fp8Run(chosen_seed(args), CudaClock(), print)
    with kept_if_cut_off(run.results, args.output):
        results = run.run(_cells(args, HEAD_DIMS, SEQLENS), args.budget_seconds)
    write_json(args.output, results.to_json())
    for name, value in geometric_means(results.rows).items():
        print(f"{name}: {value:.3f}")
    print(f"wrote {args.output}")
    return print_errors(results.errors)


def _run_launch(args: argparse.Namespace) -> int:
    from flashhopper.bench.environment import require_hopper
    from flashhopper.bench.launch import run_launch
    from flashhopper.bench.report import launch_table
    from flashhopper.bench.results import write_json
    from flashhopper.bench.timing import CudaClock

    require_hopper()
    results = run_launch(_peers(args.peers), chosen_seed(args), CudaClock())
    write_json(args.output, results.to_json())
    make_console().print(launch_table(results.rows))
    print_skipped(results.skipped)
    print(f"wrote {args.output}")
    return print_errors(results.errors)


def _run_ablation(args: argparse.Namespace) -> int:
    from flashhopper.bench.configs import ablations

    return _run_variants(args, ablations, (128, 64, 256))


def _run_tiles(args: argparse.Namespace) -> int:
    from flashhopper.bench.configs import explicit_variants, parse_configs

    return _run_variants(args, explicit_variants(parse_configs(args.configs, args.kind)), (128,))


def _run_variants(args: argparse.Namespace, variants: Variants, head_dims: tuple[int, ...]) -> int:
    """Plan, compile what the disk cache lacks in parallel, then run; ``--compile-only`` stops there, without a GPU."""
    from flashhopper.bench.configs import VariantPlan, companion_specs
    from flashhopper.bench.environment import require_hopper
    from flashhopper.bench.results import write_json
    from flashhopper.cli.warmup import warm_specs

    peers = _peers(args.peers or [], args.kind, ours=False)
    if not args.compile_only:
        require_hopper()
    cells = _cells(args, head_dims, (16384, 2048))
    plan = VariantPlan.of(cells, variants, args.kind)
    print_skipped(plan.infeasible, "infeasible: ")
    code = warm_specs([*plan.specs, *companion_specs(args.kind, cells)], args.jobs)
    if args.compile_only:
        return code

    from flashhopper.bench.ablation import VariantOptions, VariantRun
    from flashhopper.bench.timing import CudaClock

    options = VariantOptions(plan, peers, chosen_seed(args), args.budget_seconds, args.seconds_per_cell)
    with progress_bar() as (progress, total):
        run = VariantRun(options, CudaClock(), progress)
        total(run.steps())
        results = run.run()
    print_variants(results)
    if args.output:
        write_json(args.output, results.to_json())
        print(f"wrote {args.output}")
    return print_errors(results.errors)


def _run_plot(args: argparse.Namespace) -> int:
    from flashhopper.bench.plot import plot_grid

    if args.output and not args.input:
        raise BenchError("--output needs --input: without it there is a picture per result file")
    for results in _results(args.input):
        picture = args.output or IMAGES / f"{results.kind.name}.png"
        plot_grid(results, picture)
        print(f"wrote {picture}")
    return 0


def _run_table(args: argparse.Namespace) -> int:
    from flashhopper.bench.report import markdown_table

    every = _results(args.input)
    if args.update:
        return _update_tables(args, every)
    for results in every:
        if args.markdown or args.every_cell:
            print(markdown_table(results, args.every_cell), end="\n\n" if results is not every[-1] else "\n")
        else:
            print_grid(results)
    return 0


def _update_tables(args: argparse.Namespace, every: list[GridResults]) -> int:
    """Fill the markers that there are, from the result files that there are; at least one pair."""
    from flashhopper.bench.report import has_markers, markdown_table, update_markers

    marked = [results for results in every if has_markers(args.update, results.kind)]
    if not marked:
        kinds = [results.kind for results in every]
        lines = " or ".join(f"{kind.start_marker} and {kind.end_marker}" for kind in kinds)
        raise BenchError(f"{args.update} needs the lines {lines}, in this order")
    for results in marked:
        changed = update_markers(args.update, results.kind, markdown_table(results, args.every_cell))
        print(f"{args.update}: {results.kind.name} table {'updated' if changed else 'is up to date'}")
    return 0


def _results(path: Path | None) -> list[GridResults]:
    """The file named, or those in the usual place."""
    from flashhopper.bench.results import read_results

    paths = [path] if path else [file for kind in PASSES.values() if (file := _result_file(kind)).is_file()]
    if not paths:
        raise BenchError(f"no result file in {RESULTS}: `flashhopper bench forward`, `backward` and `train` write them")
    return [read_results(path) for path in paths]


def _result_file(kind: Pass) -> Path:
    return RESULTS / f"{kind.name}.json"


def _cells(args: argparse.Namespace, head_dims: tuple[int, ...], seqlens: tuple[int, ...]) -> list[Cell]:
    from flashhopper.bench.grid import MASKS, grid

    return grid(args.dtype, args.head_dim or head_dims, MASKS[args.mask], args.seqlen or seqlens)


def _peers(names: list[str] | None, kind: Pass = FORWARD, ours: bool = True) -> list[Peer]:
    """The implementations to run: ours first, then those named, or all that have the pass."""
    from flashhopper.bench.peers import all_peers

    unknown = sorted(set(names or ()) - set(kind.names))
    if unknown:
        known = ", ".join(name for name in kind.names if name != OURS)
        raise BenchError(f"--peers names {', '.join(unknown)}; there are {known}")
    chosen = set(kind.names if names is None else names) | ({OURS} if ours else set())
    return [peer for name, peer in all_peers(kind).items() if name in chosen]
