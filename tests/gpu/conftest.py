"""Tests that need a Hopper GPU: marked ``gpu``, skipped without one, and ended if a kernel hangs."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
import torch

HERE = Path(__file__).parent
HANG_SECONDS = {"gpu": 120, "slow": 900}


def missing_gpu() -> str | None:
    """Why these tests cannot run here, or None."""
    if not torch.cuda.is_available():
        return "needs an NVIDIA Hopper GPU; torch sees no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        name = torch.cuda.get_device_name()
        return f"needs an NVIDIA Hopper GPU (compute capability 9.0); {name} has {capability[0]}.{capability[1]}"
    return None


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if HERE in item.path.parents]
    reason = missing_gpu() if here else None
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _full_fp32_reference() -> None:
    torch.set_float32_matmul_precision("highest")  # no TF32


@pytest.fixture(autouse=True)
def _python_random(seed: int) -> None:
    random.seed(seed)  # shapes; tests/conftest.py seeds torch and prints the seed


@pytest.fixture(scope="session")
def real_stderr(request: pytest.FixtureRequest) -> Iterator[TextIO]:
    """Where pytest's own stderr goes, past its capturing: what is written there survives the end of the process."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        descriptor = os.dup(2)
    with os.fdopen(descriptor, "w") as stream:
        yield stream


@pytest.fixture(autouse=True)
def _no_hang_and_no_late_error(request: pytest.FixtureRequest, real_stderr: TextIO) -> Iterator[None]:
    """A kernel that hangs cannot be interrupted: print where, and end the process. An error that a kernel reports late
    belongs to the test that launched it."""
    limit = HANG_SECONDS["slow" if request.node.get_closest_marker("slow") else "gpu"]
    faulthandler.dump_traceback_later(limit, exit=True, file=real_stderr)
    yield
    torch.cuda.synchronize()
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def large_memory() -> Iterator[None]:
    """Cached blocks given back before and after; skips where another process has taken the card's memory."""
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < 60 * 2**30:
        pytest.skip(f"needs 60 GiB of free GPU memory, there are {free / 2**30:.0f}")
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    """Torch raises on each of its own operations that makes the host wait."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")
