"""The command ``flashhopper``: each sub-command is a module whose ``add_parser`` sets ``run``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from flashhopper._version import __version__

COMMANDS = ("doctor", "warmup", "cache", "bench", "tune", "accuracy")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(prog="flashhopper", description="Exact attention for NVIDIA Hopper GPUs.")
    parser.add_argument("--version", action="version", version=f"flashhopper {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"flashhopper.cli.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command and return its exit code."""
    args = build_parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except KeyboardInterrupt:
        print("flashhopper: interrupted", file=sys.stderr)
        return 130
    return code
