"""Fresh random inputs in every run, from a seed that is printed: ``FLASHHOPPER_TEST_SEED=… pytest`` repeats a run."""

from __future__ import annotations

import os
import random
import zlib

import pytest
import torch

torch.set_num_threads(1)  # unit tests are many small operations: two threads on a busy machine took 4 times as long

RUN_SEED = int(os.environ.get("FLASHHOPPER_TEST_SEED") or random.SystemRandom().randrange(2**32))


def pytest_report_header() -> str:
    return f"FLASHHOPPER_TEST_SEED={RUN_SEED}"


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed torch from the run's seed and the test's name, so that a test alone repeats what it did in the whole run."""
    value = zlib.crc32(f"{RUN_SEED} {request.node.name}".encode())
    torch.manual_seed(value)
    print(f"FLASHHOPPER_TEST_SEED={RUN_SEED} (this test: torch.manual_seed({value}))")
    return value
