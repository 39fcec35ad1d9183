"""``flashhopper cache``: look at the kernels on disk, or delete them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any

from flashhopper.disk_cache import CacheEntry, DiskCache, cache_dir


def add_parser(subparsers: Any) -> None:
    """Add ``cache`` with ``info`` and ``clear``."""
    parser = subparsers.add_parser("cache", help="show or clear the kernels compiled so far")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("info", help="list the compiled kernels on disk").set_defaults(run=run_info)
    actions.add_parser("clear", help="delete them; they are compiled again when needed").set_defaults(run=run_clear)


def count_kernels(entries: Iterable[CacheEntry]) -> tuple[int, int]:
    """How many kernels they are of, and their bytes."""
    entries = list(entries)
    return len({(entry.name, entry.key) for entry in entries}), sum(entry.size for entry in entries)


def summary(kernels: int, size: int) -> str:
    """``3 kernels, 0.2 MB``."""
    return f"{kernels} kernel{'' if kernels == 1 else 's'}, {size / 1e6:.1f} MB"


def run_info(_args: argparse.Namespace) -> int:
    cache = DiskCache(cache_dir())
    entries = cache.entries()
    width = max((len(entry.name) for entry in entries), default=0)
    for entry in entries:
        print(f"{entry.name:{width}}  {entry.key}  {entry.path.suffix:3}  {entry.size / 1e3:7.1f} kB")
    print(f"{cache.directory}: {summary(*count_kernels(entries))}")
    return 0


def run_clear(_args: argparse.Namespace) -> int:
    cache = DiskCache(cache_dir())
    try:
        deleted = cache.clear()
    except OSError as error:
        print(f"flashhopper cache clear: {error}", file=sys.stderr)
        return 1
    print(f"deleted {summary(*count_kernels(deleted))} from {cache.directory}")
    return 0
