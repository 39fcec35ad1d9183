"""compute-sanitizer finds no bad memory access and no shared-memory race in the kernels."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from racecheck import unexplained_hazards

# The program, a part of its kernels' names, and what it prints if every result is right.
WORKLOADS = {
    "forward": ("sanitizer_workload.py", "ForwardKernel", "right: 21 of 21, redone tiles: True"),
    "backward": ("sanitizer_backward_workload.py", "flashhopper", "right: 18 of 18"),
}
TIMEOUT_SECONDS = 400
MEMCHECK_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) errors?")
OPTIONS = {
    # Errors of API calls are torch's to raise; a compiler that probes for what the driver has makes harmless ones.
    "memcheck": ["--report-api-errors", "no"],
    "racecheck": ["--racecheck-report", "hazard", "--print-limit", "1000000"],
}


def find_sanitizer() -> str | None:
    for directory in (None, "/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"):
        if found := shutil.which("compute-sanitizer", path=directory):
            return found
    return None


def kernel_filter(sanitizer: str, name: str) -> list[str]:
    """Only our kernels are instrumented; the option has had two names."""
    text = subprocess.run([sanitizer, "--help"], capture_output=True, text=True, check=False, timeout=60).stdout
    return ["--kernel-name" if "--kernel-name" in text else "--kernel-regex", f"kns={name}"]


# The backward is not for racecheck: all lanes read a query row's LSE and delta, lane 0 hands the stage back after
# __syncwarp, and the copy engine fills it again; and P goes from warpgroup to warpgroup by barrier.arrive and
# barrier.sync. The tool follows neither chain and reports both, and nothing else.
@pytest.mark.slow
@pytest.mark.parametrize(
    "workload, tool", [("forward", "memcheck"), ("forward", "racecheck"), ("backward", "memcheck")]
)
def test_no_errors(workload: str, tool: str) -> None:
    program, kernels, all_right = WORKLOADS[workload]
    sanitizer = find_sanitizer()
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed: it comes with the CUDA toolkit")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # an allocation per tensor: nothing to run over into
    }
    command = [sanitizer, "--tool", tool, *OPTIONS[tool], *kernel_filter(sanitizer, kernels)]
    command += [sys.executable, str(Path(__file__).with_name(program))]
    finished = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS
    )
    output = finished.stdout + finished.stderr
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer does not support this driver or virtual machine: 'Device not supported'")
    tail = output[-6000:]
    assert all_right in output.splitlines(), tail
    if tool == "racecheck":
        assert unexplained_hazards(output) == [], tail
        return
    found = MEMCHECK_SUMMARY.search(output)
    assert found is not None, tail
    assert int(found[1]) == 0, tail
