"""``flashhopper accuracy fp8``: what quantised attention gets wrong, on a Hopper GPU or by the emulator."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

from flashhopper.cli.warmup import positive

OUTPUT = Path("benchmarks/results/fp8_accuracy.json")


def add_parser(subparsers: Any) -> None:
    """Add ``accuracy``."""
    text = "root mean square errors of FP8 attention against fp64"
    parser = subparsers.add_parser("accuracy", help=text, description=text)
    commands = parser.add_subparsers(dest="accuracy_command", required=True, metavar="COMMAND")
    fp8 = commands.add_parser("fp8", help=text, description=text)
    fp8.add_argument("--seeds", type=positive, default=8, help="to average over (default: 8)")
    fp8.add_argument("--head-dim", type=positive, default=128, help="default: 128")
    fp8.add_argument("--heads", type=positive, default=4, help="default: 4")
    fp8.add_argument("--keys", type=positive, default=4096, help="default: 4096")
    fp8.add_argument("--long-keys", type=positive, default=131072, help="of the long context (default: 131072)")
    fp8.add_argument("--seed", type=int, help="of the first inputs; a fresh one by default, printed either way")
    fp8.add_argument("--device", choices=("cuda", "cpu"), help="cpu: the emulator (default: cuda if there is one)")
    fp8.add_argument("--output", type=Path, default=OUTPUT, help=f"the JSON file (default: {OUTPUT})")
    fp8.add_argument("--plot", type=Path, help="a PNG of the errors")
    fp8.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    from flashhopper.bench.environment import hopper_problem
    from flashhopper.bench.fp8_accuracy import AccuracyOptions, run_accuracy
    from flashhopper.bench.results import write_json

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and (problem := hopper_problem()) is not None:
        print(f"flashhopper accuracy fp8: needs a Hopper GPU, or --device cpu: {problem}", file=sys.stderr)
        return 2
    if args.head_dim % 16 or args.head_dim > 256:
        print(f"flashhopper accuracy fp8: --head-dim {args.head_dim} is no multiple of 16 up to 256", file=sys.stderr)
        return 2
    seed: int = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    print(f"seed {seed}, {device}")
    options = AccuracyOptions(device, seed, args.seeds, args.head_dim, args.heads, args.keys, args.long_keys)
    results = run_accuracy(options, print)
    for skipped in results.skipped:
        print(f"skipped: {skipped['variant']} on {skipped['distribution']}: {skipped['reason']}")
    write_json(args.output, results.to_json())
    print(f"wrote {args.output}")
    if args.plot:
        from flashhopper.bench.plot_accuracy import plot_accuracy

        plot_accuracy(results.rows, args.plot)
        print(f"wrote {args.plot}")
    return int(any(not skipped["variant"].startswith("FA3") for skipped in results.skipped))
