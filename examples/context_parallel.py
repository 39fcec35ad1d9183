"""One sequence over several GPUs: PyTorch's ring attention on FlashHopper's kernels, forward and backward.

    torchrun --nproc-per-node 2 examples/context_parallel.py --seqlen 262144

Each process holds its share of q, k and v; keys and values travel round. The result is compared with that of one
device, and timed against it and against PyTorch's own kernels. Without GPUs the same runs through the reference, over
gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import _attention as ring
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashhopper.integrations import torch_sdpa

SEQ_DIM = 2  # of (batch, heads, seqlen, head_dim)
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of the largest value: rounding of the dtype, twice over
ROUNDS = 5


class Problem(NamedTuple):
    """Whole tensors ``(batch, heads, seqlen, head_dim)``, the same in every process."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor
    is_causal: bool

    @classmethod
    def random(cls, options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Problem:
        generator = torch.Generator(device).manual_seed(options.seed)
        shape = (1, options.seqlen, options.heads, options.head_dim)
        q, k, v, grad_out = (
            torch.randn(shape, generator=generator, device=device).to(dtype).transpose(1, SEQ_DIM) for _ in range(4)
        )
        return cls(q, k, v, grad_out, not options.full)


def main() -> int:
    options = parse_arguments()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        problem = Problem.random(options, device, torch.bfloat16 if on_gpu else torch.float32)
        with ours(on_gpu):
            worst = largest_difference(on_mesh(mesh, problem, options.rotate), on_one_device(problem))
            times = {
                f"{mesh.size()} processes, FlashHopper": timed(lambda: on_mesh(mesh, problem, options.rotate, False))
            }
            times["one device, FlashHopper"] = timed(lambda: on_one_device(problem))
        if on_gpu:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                name = f"{mesh.size()} processes, PyTorch's own"
                times[name] = timed(lambda: on_mesh(mesh, problem, options.rotate, False))
        allowed = TOLERANCES[problem.q.dtype]
        if dist.get_rank() == 0:
            print(f"{options.seqlen} tokens, {options.heads} heads of {options.head_dim}, causal: {problem.is_causal}")
            print(f"largest difference to one device: {worst:.1e} of the largest value (allowed: {allowed:.0e})")
            for what, seconds in times.items():
                print(f"  {what:<32} {1e3 * seconds:10.2f} ms, forward and backward")
        return 0 if worst <= allowed else 1
    finally:
        dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seqlen", type=int, default=1024, help="tokens, over all processes (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--rotate", choices=["allgather", "alltoall"], default="allgather", help="how keys travel")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


@contextlib.contextmanager
def ours(on_gpu: bool) -> Iterator[None]:
    """PyTorch's attention is FlashHopper's inside."""
    if not on_gpu:
        with torch_sdpa.on_cpu():
            yield
        return
    torch_sdpa.activate()
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        torch_sdpa.restore()


def on_one_device(problem: Problem) -> list[torch.Tensor]:
    """out, dq, dk, dv."""
    q, k, v = (x.detach().requires_grad_() for x in problem[:3])
    out = F.scaled_dot_product_attention(q, k, v, is_causal=problem.is_causal)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), problem.grad_out)]


def on_mesh(mesh: DeviceMesh, problem: Problem, rotate: str, gather: bool = True) -> list[torch.Tensor]:
    """The same, each process with its share of the sequence; whole again at the end if ``gather``."""
    ring.set_rotate_method(rotate)
    # A causal mask leaves the first process little to do and the last one much: PyTorch gives each two pieces, one of
    # the beginning and one of the end. Without a mask it refuses to.
    ring._cp_options.enable_load_balance = problem.is_causal
    shares = [x.clone() for x in problem[:4]]  # context_parallel cuts them down in place
    # What needs gradients must not be restored: that would write over what autograd has saved.
    with context_parallel(mesh, buffers=shares, buffer_seq_dims=[SEQ_DIM] * 4, no_restore_buffers=set(shares)):
        q, k, v, grad_out = shares
        for x in (q, k, v):
            x.requires_grad_()
        out = F.scaled_dot_product_attention(q, k, v, is_causal=problem.is_causal)
        results = [out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out)]
    if not gather:
        return results
    whole: list[torch.Tensor] = ring.context_parallel_unshard(mesh, results, [SEQ_DIM] * 4)
    return whole


def largest_difference(mine: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Of out, dq, dk and dv, each relative to its largest value; the largest of all processes."""
    pairs = zip(mine, expected, strict=True)
    worst = torch.stack([(x - y).abs().max().float() / y.abs().max().float() for x, y in pairs]).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def timed(run: Callable[[], Any]) -> float:
    """Seconds, the median of a few rounds after one that does not count."""
    seconds = []
    for _ in range(ROUNDS + 1):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    sys.exit(main())
