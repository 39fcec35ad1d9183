"""examples/context_parallel.py over NCCL: one sequence on two GPUs equals the same on one."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from context_parallel import Problem, on_mesh, on_one_device, ours
from tolerance import assert_close_to_reference
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "context_parallel.py"
PROCESSES = 2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < PROCESSES, reason="needs two Hopper GPUs"),
]


def compare(rank: int, seed: int) -> None:
    """One process: every way that keys travel, with and without a causal mask, by the tolerance rule."""
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"})
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=PROCESSES)
    mesh = init_device_mesh("cuda", (PROCESSES,))
    options = argparse.Namespace(seqlen=2048, heads=4, head_dim=64, full=False, seed=seed)
    causal = Problem.random(options, device, torch.bfloat16)
    for problem in (causal, causal._replace(is_causal=False)):
        wide = Problem(*(x.float() for x in problem[:4]), problem.is_causal)
        with sdpa_kernel(SDPBackend.MATH):
            expected, low = on_one_device(wide), on_one_device(problem)
        for rotate in ("allgather", "alltoall"):
            with ours(on_gpu=True):
                mine = on_mesh(mesh, problem, rotate)
            for x, ref, same_math in zip(mine, expected, low, strict=True):
                assert_close_to_reference(x, ref, same_math)
    dist.destroy_process_group()


def test_two_gpus_equal_one(seed: int) -> None:
    torch.multiprocessing.spawn(compare, (seed,), nprocs=PROCESSES)


@pytest.mark.parametrize("seqlen", [4096, 262144])
def test_the_example_runs_under_torchrun(seqlen: int) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(
        [*launcher, str(EXAMPLE), "--seqlen", str(seqlen)], capture_output=True, text=True, env=environment, timeout=600
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
