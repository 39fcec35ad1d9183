"""The card and the software a result was measured with."""

from __future__ import annotations

import datetime
import random
import shutil
import subprocess
from typing import Any

import torch

from flashhopper.bench import BenchError
from flashhopper.bench.timing import Candidate, Clock, Plan, measure, medians

MATMUL_SIZE = 8192


def hopper_problem() -> str | None:
    """None on a Hopper GPU, else what was found instead."""
    if not torch.cuda.is_available():
        return "no CUDA device found"
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        return f"found {torch.cuda.get_device_name()} of compute capability {major}.{minor}"
    return None


def require_hopper() -> None:
    problem = hopper_problem()
    if problem is not None:
        raise BenchError(f"needs a Hopper GPU (H100, H200, H800 or H20, compute capability 9.0): {problem}")


def driver_version() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = answer.stdout.split()
    return lines[0] if lines else None


def describe_machine() -> dict[str, Any]:
    """The head of every result file: device, date, torch, driver."""
    today = datetime.datetime.now(datetime.UTC).date()
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "date": today.isoformat(),
        "torch": torch.__version__,
        "driver": driver_version(),
    }


def matmul_tflops(clock: Clock) -> float:
    """The card's own bf16 rate by cuBLAS at 8192³ under load: the yardstick beside every figure."""
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    candidate = Candidate("matmul", lambda: torch.mm(a, b, out=out))
    plan = Plan(warm_up_seconds=1.0, seconds=0.3, min_rounds=9, max_rounds=15)
    milliseconds = medians(measure([candidate], plan, clock, random.Random(0)))["matmul"]
    return round(2.0 * MATMUL_SIZE**3 / (milliseconds * 1e9), 1)
