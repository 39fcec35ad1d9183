"""Arguments, and the way errors are told, that ``flashhopper bench`` and ``flashhopper tune`` share."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable

from flashhopper.bench import BenchError
from flashhopper.bench.passes import BACKWARD, FORWARD, PASSES, Pass
from flashhopper.cli.warmup import positive

CANNOT_RUN = 2  # exit code: nothing was measured; 1 is a measured failure
Run = Callable[[argparse.Namespace], int]


def reporting_errors(command: str, run: Run) -> Run:
    """Turn what a user can mend into one line and exit code 2."""

    def guarded(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except BenchError as error:
            message = str(error)
        except ModuleNotFoundError as error:
            if error.name != "matplotlib":
                raise
            message = "needs matplotlib: pip install 'flashhopper[bench]'"
        print(f"flashhopper {command}: {message}", file=sys.stderr)
        return CANNOT_RUN

    return guarded


def add_pass_argument(parser: argparse.ArgumentParser) -> None:
    """``--pass``, which sets ``kind``."""
    text = "forward or backward (default: forward)"
    parser.add_argument("--pass", dest="kind", type=_pass, default=FORWARD, metavar="PASS", help=text)


def _pass(text: str) -> Pass:
    """A pass that has a tile table."""
    if text not in (FORWARD.name, BACKWARD.name):
        raise argparse.ArgumentTypeError(f"{text!r} is neither {FORWARD.name} nor {BACKWARD.name}")
    return PASSES[text]


def add_compile_arguments(parser: argparse.ArgumentParser) -> None:
    """``--compile-only`` and ``--jobs``."""
    parser.add_argument("--compile-only", action="store_true", help="fill the kernel cache and stop; needs no GPU")
    text = "processes that compile (default: this machine's cores)"
    parser.add_argument("--jobs", type=positive, metavar="N", help=text)


def chosen_seed(args: argparse.Namespace) -> int:
    """``--seed``, or a fresh one; printed either way."""
    seed: int = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    print(f"seed {seed}")
    return seed


def head_dim(text: str) -> int:
    """What ``flash_attn_func`` takes, so that a wrong one is an error here and not an empty table."""
    if not text.isdigit() or int(text) % 8 or not 8 <= int(text) <= 256:
        raise argparse.ArgumentTypeError(f"{text!r} is not a multiple of 8 from 8 to 256")
    return int(text)


def seqlen(text: str) -> int:
    """``512`` or ``16k``."""
    digits, factor = (text[:-1], 1024) if text.lower().endswith("k") else (text, 1)
    if not digits.isdigit() or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a sequence length such as 512 or 16k")
    return int(digits) * factor
