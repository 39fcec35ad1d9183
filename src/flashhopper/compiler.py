"""From a spec to a callable: from memory, from disk, or compiled for sm_90a, with or without a GPU."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from flashhopper.config import (
    AnySpec,
    BackwardSpec,
    PostprocessSpec,
    PreprocessSpec,
    QuantizeRowsSpec,
    QuantizeSpec,
    ScheduleSpec,
    ValueScalesSpec,
    ValueStatisticsSpec,
)
from flashhopper.disk_cache import DiskCache, cache_dir
from flashhopper.kernel_binary import Kernel, export_object, link_shared, load_kernel
from flashhopper.toolchain import COMPILE_OPTIONS, Toolchain, current_toolchain

logger = logging.getLogger("flashhopper")

PACKAGE = Path(__file__).parent

# The DSL keeps the state of a compilation in globals: a second thread in it fails. One lock, and it also sees to it
# that a spec is compiled once.
compile_lock = threading.RLock()


def kernel_sources(package: Path = PACKAGE) -> list[Path]:
    """Every source that decides what a spec compiles to: two folders, the files beside them that they import, and how a
    kernel is written to a file."""
    folders = [path for name in ("config", "kernels") for path in sorted((package / name).rglob("*.py"))]
    return folders + [package / f"{name}.py" for name in ("kernel_binary", "programs", "slopes")]


def source_digest(package: Path = PACKAGE) -> str:
    """A digest of the names and contents of :func:`kernel_sources`."""
    digest = hashlib.sha256()
    for path in kernel_sources(package):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()}:{len(content)}\n".encode() + content)
    return digest.hexdigest()


_sources = functools.cache(source_digest)  # as they were when this process first looked: what it has imported


def kernel_key(spec: AnySpec, toolchain: Toolchain, sources: str) -> str:
    """The key of a kernel on disk: the spec, the sources and the toolchain, nothing else."""
    return hashlib.sha256(repr((spec, toolchain, sources)).encode()).hexdigest()


def compile_spec(spec: AnySpec, options: str = COMPILE_OPTIONS) -> Any:
    """Compile for sm_90a and return what ``cute.compile`` returns. Imports cutlass."""
    if isinstance(spec, BackwardSpec):
        from flashhopper.kernels.backward import compile_backward

        return compile_backward(spec, options=options)
    if isinstance(spec, PreprocessSpec):
        from flashhopper.kernels.backward_pre import compile_preprocess

        return compile_preprocess(spec, options=options)
    if isinstance(spec, ScheduleSpec):
        from flashhopper.kernels.schedule import compile_schedule

        return compile_schedule(spec, options=options)
    if isinstance(spec, PostprocessSpec):
        from flashhopper.kernels.backward_post import compile_postprocess

        return compile_postprocess(spec, options=options)
    if isinstance(spec, QuantizeSpec):
        return _compile_quantize(spec, options)
    if spec.is_fp8:
        from flashhopper.kernels.fp8_forward import compile_fp8_forward

        return compile_fp8_forward(spec, options=options)
    from flashhopper.kernels.forward import compile_forward

    return compile_forward(spec, options=options)


def _compile_quantize(spec: QuantizeSpec, options: str) -> Any:
    if isinstance(spec, QuantizeRowsSpec):
        from flashhopper.kernels.quantize import compile_quantize_rows

        return compile_quantize_rows(spec, options=options)
    from flashhopper.kernels import quantize_values

    if isinstance(spec, ValueStatisticsSpec):
        return quantize_values.compile_value_statistics(spec, options=options)
    if isinstance(spec, ValueScalesSpec):
        return quantize_values.compile_value_scales(spec, options=options)
    return quantize_values.compile_quantize_values(spec, options=options)


def _announce(message: str) -> None:
    """Log at INFO. Where no logging is set up, and our logger has no level, the line goes to stderr: a user whose first
    call takes seconds should see why."""
    if logger.level == logging.NOTSET and not logger.hasHandlers():
        print(f"flashhopper: {message}", file=sys.stderr)
    else:
        logger.info(message)


class _Request(NamedTuple):
    """One kernel to be had, and where it is or would be on disk."""

    spec: AnySpec
    key: str
    toolchain: Toolchain
    disk: DiskCache

    @classmethod
    def of(cls, spec: AnySpec) -> _Request:
        toolchain = current_toolchain()
        return cls(spec, kernel_key(spec, toolchain, _sources()), toolchain, DiskCache(cache_dir()))


class KernelCache:
    """Kernels of this process by spec, backed by the disk cache."""

    def __init__(
        self,
        compile_function: Callable[[AnySpec], Any] = compile_spec,
        export_function: Callable[[Any, str, str], bytes] = export_object,
        load_function: Callable[[Path, str], Kernel] = load_kernel,
    ) -> None:
        self._compile_function = compile_function
        self._export_function = export_function
        self._load_function = load_function
        self._kernels: dict[AnySpec, Kernel] = {}

    def get(self, spec: AnySpec) -> Kernel:
        """The kernel of ``spec``, ready to be called. Compiles it at most once, however many threads ask."""
        kernel = self._kernels.get(spec)
        if kernel is None:
            with compile_lock:
                kernel = self._kernels.get(spec)
                if kernel is None:
                    request = _Request.of(spec)
                    kernel = self._load(request)
                    if kernel is None:
                        kernel = self._compile(request)
                    self._kernels[spec] = kernel
        return kernel

    def warm(self, spec: AnySpec) -> bool:
        """Put the kernel of ``spec`` into the disk cache. False if it was there; OSError if it cannot be stored."""
        with compile_lock:
            request = _Request.of(spec)
            if request.disk.find(spec.name, request.key, ".o") is not None:
                return False
            if self._store(request, self._compile_function(spec)) is None:
                raise OSError(f"{spec.name} was compiled but not stored in {request.disk.directory}")
            self._link(request)
            return True

    def _compile(self, request: _Request) -> Kernel:
        started = time.perf_counter()
        compiled: Kernel = self._compile_function(request.spec)
        stored = self._store(request, compiled)
        seconds = time.perf_counter() - started
        where = f"cached in {request.disk.directory}" if stored else "not cached"
        _announce(f"compiled {request.spec.name} in {seconds:.1f} s ({where})")
        # What the next process will run is what this one runs, and the loaded form is called a little faster.
        return (self._load(request) if stored else None) or compiled

    def _store(self, request: _Request, compiled: Any) -> Path | None:
        if source_digest() != _sources():
            logger.warning("the kernels' sources changed while this process ran: %s is not cached", request.spec.name)
            return None
        try:
            content = self._export_function(compiled, request.spec.name, request.toolchain.host)
        except OSError as error:  # no room for the temporary file
            request.disk.warn_once(error)
            return None
        return request.disk.store(request.spec.name, request.key, ".o", content)

    def _link(self, request: _Request) -> Path | None:
        """Make the shared library out of the object file; None where that is not possible, which only costs time."""
        name, key, disk = request.spec.name, request.key, request.disk
        object_file = disk.find(name, key, ".o")
        if object_file is None or not os.access(disk.directory, os.W_OK):
            return None
        content = link_shared(object_file)
        return disk.store(name, key, ".so", content) if content is not None else None

    def _load(self, request: _Request) -> Kernel | None:
        name, key, disk = request.spec.name, request.key, request.disk
        shared = disk.find(name, key, ".so") or self._link(request)
        if shared is not None:
            try:
                return self._load_function(shared, name)
            except Exception as error:  # a file system without execution, a library gone: the object file may still do
                logger.info("cannot load %s: %s", shared, error)
        object_file = disk.find(name, key, ".o")
        if object_file is not None:
            try:
                return self._load_function(object_file, name)
            except ImportError:  # the installation is at fault, not the file
                raise
            except Exception as error:
                disk.discard(object_file, f"it cannot be loaded: {error}")
        return None


_default_cache = KernelCache()


def get_kernel(spec: AnySpec) -> Kernel:
    """The kernel of ``spec``: a callable that takes positional torch tensors and numbers, on torch's current stream.

    From memory, else from disk, else compiled. Raises ImportError, with what to install, without nvidia-cutlass-dsl.
    """
    return _default_cache.get(spec)


def warm_kernel(spec: AnySpec) -> bool:
    """Put the kernel of ``spec`` into the disk cache. False if it was there; OSError if it cannot be stored."""
    return _default_cache.warm(spec)


def keep_note(spec: AnySpec, note: str) -> None:
    """Keep a text, JSON by its name, beside the kernel of ``spec``. OSError if it cannot be stored."""
    request = _Request.of(spec)
    if request.disk.store(spec.name, request.key, ".json", note.encode()) is None:
        raise OSError(f"the note on {spec.name} was not stored in {request.disk.directory}")


def find_note(spec: AnySpec) -> str | None:
    """What :func:`keep_note` has kept for ``spec``, these sources and this toolchain; None if nothing."""
    request = _Request.of(spec)
    path = request.disk.find(spec.name, request.key, ".json")
    return None if path is None else path.read_text()


def is_cached(spec: AnySpec) -> bool:
    """Whether the kernel of ``spec`` is in the disk cache, undamaged."""
    request = _Request.of(spec)
    return request.disk.find(spec.name, request.key, ".o") is not None
