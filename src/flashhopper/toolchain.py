"""What kernels are compiled and loaded with, found without importing cutlass: that takes a second, a lookup may not."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ARCH = "sm_90a"
COMPILE_OPTIONS = f"--enable-tvm-ffi --gpu-arch {ARCH}"  # the option wins over CUTE_DSL_ARCH and over the card at hand
HOST_CPU = "x86-64-v2"  # what the launch code of a kernel may use, so that one cache serves machines of any make
RUNTIME_LIBRARY = "libcute_dsl_runtime.so"

# Read by the DSL, of no effect on what it compiles to: the options above name the architecture, the rest are places.
_NEUTRAL_SETTINGS = {"CUTE_DSL_ARCH", "CUTE_DSL_LIBS", "CUTE_DSL_CACHE_DIR", "CUTE_DSL_DUMP_DIR"}


def package_version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def dsl_version() -> str | None:
    """The installed version of nvidia-cutlass-dsl, or None: without it no kernel can be compiled or loaded."""
    return package_version("nvidia-cutlass-dsl")


def tvm_ffi_version() -> str | None:
    """The installed version of apache-tvm-ffi, or None: kernels are called through it."""
    return package_version("apache-tvm-ffi")


def driver_cuda_version() -> tuple[int, int] | None:
    """The newest CUDA that the GPU driver supports, as (major, minor); None without a driver."""
    version = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return (version.value // 1000, version.value % 1000 // 10) if version.value else None


def runtime_library() -> Path | None:
    """The DSL's runtime library, of the CUDA flavour that the DSL picks: the newest that the driver supports."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = [] if spec is None else list(spec.submodule_search_locations or ())
    found: dict[int, Path] = {}
    for root in roots:
        for library in Path(root).glob(f"cu*/lib/{RUNTIME_LIBRARY}"):
            if flavour := re.fullmatch(r"cu(\d+)", library.parent.parent.name):
                found[int(flavour[1])] = library
    driver = driver_cuda_version()
    usable = [major for major in found if driver is None or major <= driver[0]]
    return found[max(usable)] if usable else None


def _host() -> str:
    """The processor that the launch code is for. Elsewhere than on x86-64 the DSL uses all that the machine has."""
    machine = platform.machine()
    if machine in ("x86_64", "AMD64"):
        return HOST_CPU
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = sorted({line for line in lines if line.startswith("Features")})
    return f"{machine}-{hashlib.sha256(repr(features).encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Toolchain:
    """All that a compiled kernel depends on besides its spec and our sources. The Python version is not part of it."""

    dsl: str
    tvm_ffi: str
    cuda: str
    """The DSL's CUDA flavour, ``cu12`` or ``cu13``: each brings its own ptxas and runtime library."""
    host: str
    settings: tuple[str, ...] = ()
    """The ``CUTE_DSL_*`` variables that are set, as ``NAME=value``: line information, assertions and the like."""
    options: str = COMPILE_OPTIONS


def current_toolchain() -> Toolchain:
    """The toolchain of this process. Raises ImportError, with what to install, if a part is missing."""
    dsl, tvm_ffi = dsl_version(), tvm_ffi_version()
    versions = {"nvidia-cutlass-dsl": dsl, "apache-tvm-ffi": tvm_ffi}
    if dsl is None or tvm_ffi is None:
        missing = " and ".join(name for name, version in versions.items() if version is None)
        raise ImportError(
            f"FlashHopper's kernels need {missing}, which is not installed: run `pip install flashhopper`, "
            f"or `pip install {' '.join(versions)}`"
        )
    library = runtime_library()
    names = sorted(name for name in os.environ if name.startswith("CUTE_DSL_") and name not in _NEUTRAL_SETTINGS)
    return Toolchain(
        dsl=dsl,
        tvm_ffi=tvm_ffi,
        cuda=library.parent.parent.name if library else "unknown",
        host=_host(),
        settings=tuple(f"{name}={os.environ[name]}" for name in names),
    )
