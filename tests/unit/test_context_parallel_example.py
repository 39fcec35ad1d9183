"""examples/context_parallel.py over gloo, two processes on the CPU: equal to PyTorch's own attention in one."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

pytest.importorskip("torch.distributed.tensor.experimental", reason="this torch has no distributed package")

from context_parallel import Problem, on_mesh, ours
from torch.distributed.device_mesh import init_device_mesh

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "context_parallel.py"
PROCESSES = 2


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def compare(rank: int, port: int, seed: int) -> None:
    """One process: every way that keys travel, with and without a causal mask, against PyTorch's own attention."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=PROCESSES)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    options = argparse.Namespace(seqlen=32, heads=4, head_dim=16, full=False, seed=seed)
    causal = Problem.random(options, torch.device("cpu"), torch.float32)
    for problem in (causal, causal._replace(is_causal=False)):
        leaves = [x.clone().requires_grad_() for x in problem[:3]]
        out = F.scaled_dot_product_attention(*leaves, is_causal=problem.is_causal)
        expected = [out.detach(), *torch.autograd.grad(out, leaves, problem.grad_out)]
        for rotate in ("allgather", "alltoall"):
            with ours(on_gpu=False):
                mine = on_mesh(mesh, problem, rotate)
                share = on_mesh(mesh, problem, rotate, gather=False)
            torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)
            assert [x.shape[2] for x in share] == [32 // PROCESSES] * 4
    dist.destroy_process_group()
    # A process that ends by itself is aborted now and then by a thread of torch's ("terminate called without an active
    # exception"), when all is done: 5 of 12 times here.
    os._exit(0)


@pytest.mark.slow
def test_two_processes_equal_one(seed: int) -> None:
    torch.multiprocessing.spawn(compare, (free_port(), seed), nprocs=PROCESSES)


@pytest.mark.slow
def test_the_example_runs_under_torchrun() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
    arguments = ["--seqlen", "64", "--heads", "2", "--head-dim", "16", "--rotate", "alltoall"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    run = subprocess.run(
        [*launcher, str(EXAMPLE), *arguments], capture_output=True, text=True, env=environment, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "largest difference to one device" in run.stdout
    assert "2 processes, FlashHopper" in run.stdout
