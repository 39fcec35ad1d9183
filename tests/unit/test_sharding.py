"""DTensors and FSDP2 over gloo, two processes on the CPU: equal to one process."""

from __future__ import annotations

import copy
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torch.distributed.tensor", reason="this torch has no distributed package")

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from flashhopper import flash_attn_func, flash_attn_varlen_func, sharding

PROCESSES = 2
FP64 = {"atol": 1e-11, "rtol": 1e-11}


def in_two_processes(function: Callable[[], None], seed: int) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    torch.multiprocessing.spawn(run, (port, seed, function), nprocs=PROCESSES)


def run(rank: int, port: int, seed: int, function: Callable[[], None]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)  # the same tensors in both processes
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=PROCESSES)
    function()
    dist.destroy_process_group()
    os._exit(0)  # as in test_context_parallel_example.py: torch may abort a process that ends by itself


def outputs_and_gradients(
    attend: Callable[..., Any], tensors: list[torch.Tensor], grads: tuple[torch.Tensor, torch.Tensor]
) -> list[torch.Tensor]:
    out, lse = attend(*tensors)
    needed = [x for x in tensors if x.requires_grad]
    return [out, lse, *torch.autograd.grad((out, lse), needed, grads)]


def compare(
    attend: Callable[..., Any], tensors: list[torch.Tensor], cuts: list[list[Any]], mesh: Any = None
) -> list[Any]:
    """Checks a call on DTensors, cut by ``cuts``, against the plain one; returns the placements of the results."""
    mesh = init_device_mesh("cpu", (PROCESSES,)) if mesh is None else mesh
    out, lse = attend(*tensors)
    grads = torch.randn_like(out), torch.randn_like(lse)
    expected = outputs_and_gradients(attend, tensors, grads)
    cut = []
    for x, placements in zip(tensors, cuts, strict=True):
        cut.append(distribute_tensor(x.detach(), mesh, placements).requires_grad_(x.requires_grad))
    whole = [Replicate()] * mesh.ndim
    mine: Any = outputs_and_gradients(attend, cut, tuple(distribute_tensor(x, mesh, whole) for x in grads))
    assert all(isinstance(x, DTensor) for x in mine)
    torch.testing.assert_close([x.full_tensor() for x in mine], expected, **FP64)
    return [x.placements for x in mine]


def random(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def dense(heads: int = 4, heads_k: int = 2) -> list[torch.Tensor]:
    return random((2, 5, heads, 16), (2, 7, heads_k, 16), (2, 7, heads_k, 8))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None = None) -> Any:
    return flash_attn_func(q, k, v, causal=True, window_size=(4, -1), learnable_sink=sink, return_lse=True)


def sloped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor) -> Any:
    return flash_attn_func(q, k, v, alibi_slopes=slopes, return_lse=True)


def ragged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths_q: torch.Tensor, lengths_k: torch.Tensor) -> Any:
    return flash_attn_varlen_func(q, k, v, lengths_q, lengths_k, 5, 6, causal=True, return_lse=True)


def dense_calls() -> None:
    batch, heads, seqlen, whole = [Shard(0)], [Shard(2)], [Shard(1)], [Replicate()]
    placements = compare(attend, dense(), [batch] * 3)
    assert placements == [(Shard(0),)] * 5
    placements = compare(attend, dense(), [heads] * 3)
    assert placements == [(Shard(2),), (Shard(1),), *[(Shard(2),)] * 3]
    compare(attend, dense(), [seqlen] * 3)
    compare(attend, dense(), [batch, heads, whole])
    for heads_k in (1, 3):  # not to be cut: each query head would meet another's keys
        compare(attend, dense(12, heads_k), [heads, whole if heads_k == 1 else heads, whole])
    compare(attend, dense(), [[Replicate(), Shard(2)]] * 3, init_device_mesh("cpu", (1, PROCESSES)))


def calls_with_more_tensors() -> None:
    batch, heads, rows, whole = [Shard(0)], [Shard(2)], [Shard(0)], [Replicate()]
    for cut, of_sink in ((batch, whole), (heads, rows), (heads, whole)):
        compare(attend, dense() + random((4,)), [cut] * 3 + [of_sink])
    slopes = torch.rand(4)
    for cut in (batch, heads):
        compare(sloped, [*dense(), slopes], [cut] * 3 + [whole])
        compare(sloped, [*dense(), slopes.expand(2, 4) * 2], [cut] * 3 + [whole])
    lengths = [torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 5, 9], [0, 6, 9, 12])]
    tensors = [*random((9, 4, 16), (12, 2, 16), (12, 2, 8)), *lengths]
    placements = compare(ragged, tensors, [[Shard(1)]] * 3 + [whole] * 2)
    assert placements[:2] == [(Shard(1),), (Shard(0),)]
    compare(ragged, tensors, [[Shard(0)]] * 3 + [whole] * 2)


def calls_on_dtensors() -> None:
    dense_calls()
    calls_with_more_tensors()
    calls_on_some_dtensors()
    compiled_calls()


def calls_on_some_dtensors() -> None:
    """A kernel would be given a DTensor's address, which is none."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    q, k, v = (x.detach() for x in dense())
    sink, lengths = torch.zeros(q.shape[2]), torch.tensor([0, 3], dtype=torch.int32)
    of_mesh = [distribute_tensor(x, mesh, [Replicate()]) for x in (k, v, sink, lengths)]
    for name, call in {
        "k": lambda: flash_attn_func(q, *of_mesh[:2]),
        "v": lambda: flash_attn_func(q, k, of_mesh[1]),
        "learnable_sink": lambda: flash_attn_func(q, k, v, learnable_sink=of_mesh[2]),
        "cu_seqlens_k": lambda: flash_attn_varlen_func(q[0], k[0], v[0], lengths, of_mesh[3], 3, 3),
    }.items():
        with pytest.raises(TypeError, match=f"{name} is a DTensor, q is a Tensor"):
            call()
    with pytest.raises(NotImplementedError, match="score_mod and mask_mod"):
        flash_attn_func(q, *of_mesh[:2], mask_mod=lambda b, h, i, j, _: i >= j)


def compiled_calls() -> None:
    """A whole graph is an error; else the call runs outside of the graphs."""
    compare(torch.compile(attend, backend="aot_eager"), dense(), [[Shard(2)]] * 3)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    cut = [distribute_tensor(x.detach(), mesh, [Shard(2)]) for x in dense()]
    with pytest.raises(Exception, match="DTensors is not there in compiled graphs"):
        torch.compile(attend, fullgraph=True, backend="aot_eager")(*cut)


class Model(torch.nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = torch.nn.Linear(8, width)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(width, 3 * width) for _ in range(2))
        self.sinks = torch.nn.Parameter(torch.randn(heads))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            q, k, v = block(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
            x = x + flash_attn_func(q, k, v, causal=True, learnable_sink=self.sinks).flatten(2)
        return x


def optimiser_step() -> None:
    """FSDP2: each process has its rows and its part of each weight; the step is that of one process with all rows."""
    whole = Model()
    model = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x, target = (torch.randn(4, 9, width, dtype=torch.float64) for width in (8, 32))
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    start = copy.deepcopy(whole.state_dict())
    for trained, rows in ((whole, slice(None)), (model, mine)):
        optimiser = torch.optim.SGD(trained.parameters(), lr=0.5)
        (trained(x[rows]) - target[rows]).square().mean().backward()
        optimiser.step()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        expected = whole.get_parameter(name)
        torch.testing.assert_close(parameter.full_tensor(), expected, **FP64)
        assert (expected - start[name]).abs().max() > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("function", [calls_on_dtensors, optimiser_step])
def test_two_processes_equal_one(function: Callable[[], None], seed: int) -> None:
    in_two_processes(function, seed)


@pytest.mark.parametrize(
    "heads_k, mesh, expected",
    [
        (4, (2,), True),
        (4, (2, 2), True),
        (4, (2, 4), True),  # into 8 parts it is not cut
        (1, (2,), True),
        (3, (2,), False),
        (6, (2, 2), False),
        (12, (4, 2), False),
        (12, (1, 3), True),
    ],
)
def test_heads_that_can_be_cut(heads_k: int, mesh: tuple[int, ...], expected: bool) -> None:
    assert sharding.heads_can_be_cut(heads_k, mesh) is expected


def test_without_the_means_to_register_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "_registered", [])
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor.experimental", None)
    with pytest.raises(NotImplementedError, match="call it on the local shards"):
        sharding.register()
