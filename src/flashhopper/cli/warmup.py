"""``flashhopper warmup``: compile every kernel of the tile table into the disk cache, for sm_90a, on any machine."""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flashhopper.compiler import is_cached, warm_kernel
from flashhopper.config import (
    E4M3,
    E5M2,
    ELEMENT_BYTES,
    FP8_MAX_EXPONENT,
    PLAIN,
    SWITCHES,
    AnySpec,
    ConfigError,
    ScheduleSpec,
)
from flashhopper.disk_cache import DiskCache, cache_dir

if TYPE_CHECKING:
    from rich.progress import Progress

Worker = Callable[[AnySpec], object]


def add_parser(subparsers: Any) -> None:
    """Add ``warmup``."""
    text = "compile every kernel of the tile table into the disk cache; needs no GPU"
    parser = subparsers.add_parser("warmup", help=text, description=text)
    parser.add_argument("--jobs", type=positive, metavar="N", help="processes (default: the cores of this machine)")
    parser.add_argument("--dtype", choices=tuple(ELEMENT_BYTES), nargs="+", help="only these; e5m2 if it is named")
    parser.add_argument(
        "--head-dim", type=int, nargs="+", metavar="D", help="only the kernels that serve these head dimensions of q, k"
    )
    parser.add_argument(
        "--features",
        choices=SWITCHES,
        nargs="+",
        default=[],
        help="kernels of calls with exactly these, instead of none",
    )
    parser.set_defaults(run=run)


def positive(text: str) -> int:
    """argparse's type of a count."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def select_specs(
    specs: Sequence[AnySpec], dtypes: Sequence[str] | None, head_dims: Sequence[int] | None
) -> list[AnySpec]:
    """The specs asked for. A head dimension that no kernel has is served by the next larger one; kernels without any
    are always asked for."""
    sizes = sorted({spec.head_dim for spec in specs if not isinstance(spec, ScheduleSpec)})
    padded = {min((size for size in sizes if size >= head_dim), default=None) for head_dim in head_dims or ()}
    return [
        spec
        for spec in specs
        if isinstance(spec, ScheduleSpec)
        or ((dtypes is None or spec.dtype in dtypes) and (head_dims is None or spec.head_dim in padded))
    ]


def compile_all(
    specs: Sequence[AnySpec], jobs: int, worker: Worker, on_done: Callable[[AnySpec, Exception | None], None]
) -> None:
    """Run ``worker`` on every spec, in ``jobs`` processes or, for 1, in this one."""
    if jobs == 1:
        for spec in specs:
            try:
                worker(spec)
            except Exception as error:
                on_done(spec, error)
            else:
                on_done(spec, None)
        return
    context = multiprocessing.get_context("spawn")  # a fork would inherit torch's locks and threads
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures: dict[Future[object], AnySpec] = {pool.submit(worker, spec): spec for spec in specs}
        for future in as_completed(futures):
            failure = future.exception()
            if failure is not None and not isinstance(failure, Exception):
                raise failure
            on_done(futures[future], failure)


@contextmanager
def _progress(total: int) -> Iterator[tuple[Progress, Callable[[], None]]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("compiling", total=total)
        yield progress, functools.partial(progress.advance, task)


def warm_specs(
    specs: Sequence[AnySpec],
    jobs: int | None,
    worker: Worker = warm_kernel,
    is_there: Callable[[AnySpec], bool] = is_cached,
) -> int:
    """Run ``worker`` on what is not there yet, and return the exit code: 1 if a kernel failed."""
    started = time.perf_counter()
    missing = [spec for spec in specs if not is_there(spec)]
    jobs = min(jobs or len(os.sched_getaffinity(0)), len(missing))
    failures: list[tuple[AnySpec, Exception]] = []
    if missing:
        with _progress(len(missing)) as (progress, advance):

            def on_done(spec: AnySpec, error: Exception | None) -> None:
                if error is not None:
                    failures.append((spec, error))
                    message = f"failed: {spec.name}: {type(error).__name__}: {error}"
                    progress.console.print(message, markup=False, highlight=False, soft_wrap=True)
                advance()

            compile_all(missing, jobs, worker, on_done)
    seconds = time.perf_counter() - started
    counts = f"{len(missing) - len(failures)} compiled, {len(specs) - len(missing)} already there"
    if failures:
        counts += f", {len(failures)} failed"
    print(f"{counts} in {seconds:.1f} s: {cache_dir()}")
    return 1 if failures else 0


def run(args: argparse.Namespace) -> int:
    from flashhopper.kernel_list import all_specs

    try:
        switches: dict[str, Any] = dict.fromkeys(args.features, True)
        features = replace(PLAIN, **switches)
    except ConfigError as error:
        print(f"flashhopper warmup: {error}", file=sys.stderr)
        return 1
    fp8_dtypes = tuple(FP8_MAX_EXPONENT) if E5M2 in (args.dtype or ()) else (E4M3,)
    specs = select_specs(all_specs(features, fp8_dtypes), args.dtype, args.head_dim)
    if not specs:
        print("flashhopper warmup: no kernel of the tile table matches", file=sys.stderr)
        return 1
    try:
        if problem := DiskCache(cache_dir()).problem():
            raise OSError(f"cannot write to the kernel cache: {problem}")
        return warm_specs(specs, args.jobs)
    except (OSError, ImportError) as error:
        print(f"flashhopper warmup: {error}", file=sys.stderr)
        return 1
