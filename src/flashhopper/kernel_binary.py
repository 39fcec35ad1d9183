"""Compiled kernels as files: linking an object file, and loading either form as a callable.

A shared library loads in a few milliseconds through TVM-FFI. An object file needs the DSL's own loader, hence an import
of cutlass (about a second): the way for machines without a linker.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from flashhopper.toolchain import HOST_CPU, runtime_library

Kernel = Callable[..., Any]

_LINKERS = ("ld", "ld.lld")
_HOST_FEATURES = '["+cx16", "+popcnt", "+sse4.2"]'  # of x86-64-v2; the list replaces the compiling machine's own


def export_object(compiled: Any, name: str, host: str) -> bytes:
    """The object file of what ``cute.compile`` returned, with the kernel under ``name``.

    The DSL compiles the launch code for the processor it runs on. On x86-64 it is told to use the common baseline, or
    a cache filled on a machine with AVX-512 would end in an illegal instruction on one without.
    """
    if host == HOST_CPU:
        from cutlass._mlir import ir

        with compiled.ir_module.context:
            features = ir.Attribute.parse(f"#llvm.target_features<{_HOST_FEATURES}>")
            for operation in compiled.ir_module.body.operations:
                if operation.operation.name == "llvm.func":
                    operation.attributes["target_cpu"] = ir.StringAttr.get(HOST_CPU)
                    operation.attributes["target_features"] = features
    with tempfile.TemporaryDirectory(prefix="flashhopper-") as directory:
        path = Path(directory) / "kernel.o"
        compiled.export_to_c(str(path), function_name=name)
        return path.read_bytes()


def find_linker() -> str | None:
    """The system's linker, or None."""
    return next(filter(None, map(shutil.which, _LINKERS)), None)


def link_shared(object_file: Path) -> bytes | None:
    """The object file as a shared library, or None where there is no linker or no runtime library to link with."""
    linker, runtime = find_linker(), runtime_library()
    if linker is None or runtime is None:
        return None
    import tvm_ffi

    with tempfile.TemporaryDirectory(prefix="flashhopper-") as directory:
        path = Path(directory) / "kernel.so"
        command = [linker, "-shared", "-Bsymbolic", "-z", "noexecstack", "-z", "defs", "-o", os.fspath(path)]
        command += [os.fspath(object_file), os.fspath(runtime), tvm_ffi.libinfo.find_libtvm_ffi()]
        finished = subprocess.run(command, capture_output=True, check=False)
        return path.read_bytes() if finished.returncode == 0 else None


def load_kernel(path: Path, name: str) -> Kernel:
    """The kernel ``name`` of a ``.so`` or ``.o`` file, called with positional arguments."""
    if path.suffix == ".o":
        from cutlass.cute.runtime import load_module

        return cast(Kernel, load_module(os.fspath(path), enable_tvm_ffi=True)[name])
    import tvm_ffi

    runtime = runtime_library()
    if runtime is None:
        raise OSError("the runtime library of nvidia-cutlass-dsl was not found")
    ctypes.CDLL(os.fspath(runtime))  # the kernel's library names it without a path: it must be there already
    return cast(Kernel, tvm_ffi.load_module(os.fspath(path))[name])
