"""Compiled kernels on disk: one file each, whose name holds what it is for and a digest of what is in it.

There is no lock and no index: a file appears whole (``os.replace``) or not at all, two processes that compile the same
kernel write the same name, and a file whose content does not match its name is deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger("flashhopper")

CACHE_DIR_VARIABLE = "FLASHHOPPER_CACHE_DIR"
_DIGITS = 16  # hexadecimal digits of key and content digest in a file name: 64 bits each
_FILE = re.compile(rf"(?P<name>\w+)-(?P<key>[0-9a-f]{{{_DIGITS}}})-[0-9a-f]{{{_DIGITS}}}\.(?:so|o|json)")
_LEFTOVER = re.compile(rf"\.{_FILE.pattern}\.\d+\.[0-9a-f]{{8}}")  # of a process that was killed while it wrote

_warned: set[Path] = set()


def cache_dir() -> Path:
    """``$FLASHHOPPER_CACHE_DIR``, or ``flashhopper`` under ``$XDG_CACHE_HOME``, or ``~/.cache/flashhopper``."""
    if chosen := os.environ.get(CACHE_DIR_VARIABLE):
        return Path(os.path.expanduser(chosen)).absolute()
    if (xdg := os.environ.get("XDG_CACHE_HOME")) and os.path.isabs(xdg):  # the XDG specification: ignore relative paths
        return Path(xdg) / "flashhopper"
    try:
        return Path.home() / ".cache" / "flashhopper"
    except RuntimeError:  # a user without a home directory: a place where nothing can be written, so memory only
        return Path(os.devnull) / "flashhopper"


class CacheEntry(NamedTuple):
    """One file of the cache. A kernel may have three: its object, the library linked from it, and a note."""

    path: Path
    name: str
    key: str
    size: int


class DiskCache:
    """The kernels under one directory, which is created when the first one is stored."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def find(self, name: str, key: str, suffix: str) -> Path | None:
        """The file stored for ``name`` and ``key``, its content verified. Damaged files are deleted with a warning."""
        for path in sorted(self.directory.glob(f"{name}-{key[:_DIGITS]}-*{suffix}")):
            try:
                content = path.read_bytes()
            except OSError:  # deleted or made unreadable since it was listed
                continue
            if path.name == self._file_name(name, key, suffix, content):
                return path
            self.discard(path, "its content does not match its name")
        return None

    def store(self, name: str, key: str, suffix: str, content: bytes) -> Path | None:
        """Write a file atomically. None, and one warning for the directory, if it cannot be written."""
        path = self.directory / self._file_name(name, key, suffix, content)
        temporary = self.directory / f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_bytes(content)
                os.replace(temporary, path)
            finally:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
        except OSError as error:
            self.warn_once(error)
            return None
        return path

    def warn_once(self, error: OSError) -> None:
        """Say once per process that this directory cannot be used."""
        if self.directory not in _warned:
            _warned.add(self.directory)
            logger.warning(
                "cannot write to the kernel cache %s (%s): kernels are compiled again in each process; "
                "set %s to a writable directory",
                self.directory,
                error,
                CACHE_DIR_VARIABLE,
            )

    def discard(self, path: Path, reason: str) -> None:
        """Delete a file that cannot be used, with a warning."""
        logger.warning("deleting %s from the kernel cache: %s", path, reason)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    def entries(self) -> list[CacheEntry]:
        """All files of the cache, by name. Files of others in the directory are none of them."""
        found = []
        for path in sorted(self.directory.glob("*-*-*")):
            if match := _FILE.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    found.append(CacheEntry(path, match["name"], match["key"], path.stat().st_size))
        return found

    def clear(self) -> list[CacheEntry]:
        """Delete all kernels, and what interrupted writes left. Returns the kernels deleted."""
        entries = self.entries()
        leftovers = [path for path in self.directory.glob(".*-*-*") if _LEFTOVER.fullmatch(path.name)]
        for path in [entry.path for entry in entries] + leftovers:
            path.unlink(missing_ok=True)
        return entries

    def problem(self) -> str | None:
        """Why nothing can be stored here, or None. Creates the directory if it is missing."""
        probe = self.directory / f".probe.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            return str(error)
        return None

    @staticmethod
    def _file_name(name: str, key: str, suffix: str, content: bytes) -> str:
        return f"{name}-{key[:_DIGITS]}-{hashlib.sha256(content).hexdigest()[:_DIGITS]}{suffix}"
