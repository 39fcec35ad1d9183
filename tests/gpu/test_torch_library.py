"""torch.compile, CUDA graphs, torch.func and the operators' own checks, on the kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import BF16, assert_same_bits

from flashhopper import flash_attn_func, torch_library
from flashhopper.options import AttentionOptions
from flashhopper.problem import SoftmaxTensors

Tensors = list[torch.Tensor]
DETERMINISTIC = {"causal": True, "deterministic": True, "return_lse": True}


def inputs(batch: int = 2, seqlen: int = 200, head_dim: int = 64, heads: int = 4, heads_k: int = 2) -> Tensors:
    shapes = ((batch, seqlen, n, head_dim) for n in (heads, heads_k, heads_k))
    return [torch.randn(shape, device="cuda").to(BF16).requires_grad_() for shape in shapes]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = flash_attn_func(q, k, v, **DETERMINISTIC)
    return out, lse


def results(run: Callable[..., Any], tensors: Tensors, grad_out: torch.Tensor, grad_lse: torch.Tensor) -> Tensors:
    out, lse = run(*tensors)
    gradients = torch.autograd.grad((out, lse), tensors, (grad_out, grad_lse))
    return [x.clone() for x in (out.detach(), lse.detach(), *gradients)]  # the next replay writes where these lie


def compare(run: Callable[..., Any], tensors: Tensors) -> None:
    batch, seqlen, heads, head_dim = tensors[0].shape
    grad_out = torch.randn(batch, seqlen, heads, head_dim, device="cuda").to(BF16)
    grad_lse = torch.randn(batch, heads, seqlen, device="cuda")
    mine, expected = results(run, tensors, grad_out, grad_lse), results(attend, tensors, grad_out, grad_lse)
    assert_same_bits(tuple(mine[:2]), tuple(expected[:2]))
    for x, y in zip(mine[2:], expected[2:], strict=True):
        assert torch.equal(x, y)
        assert x.count_nonzero() > 0.5 * x.numel()


def test_opcheck() -> None:
    tensors, options = inputs(), AttentionOptions(causal=True, deterministic=True)
    call = torch_library.Call(*tensors, SoftmaxTensors(), None, options)
    torch.library.opcheck(torch.ops.flashhopper.attention.default, call.flat())
    out, lse = attend(*tensors)
    arguments = [x.detach() if isinstance(x, torch.Tensor) else x for x in call.flat()]
    for grad_lse in (None, torch.randn_like(lse)):
        results = (torch.randn_like(out), grad_lse, out.detach(), lse.detach())
        torch.library.opcheck(torch.ops.flashhopper.attention_backward.default, (*results, *arguments))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, mode=mode)
    with torch._dynamo.config.patch(error_on_recompile=False):
        for seqlen in (200, 200, 200, 333, 333, 640):  # reduce-overhead captures at the second call of a shape
            torch.compiler.cudagraph_mark_step_begin()
            compare(compiled, inputs(seqlen=seqlen))


@pytest.mark.slow
def test_lengths_do_not_recompile() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    compare(compiled, inputs(3, 200))  # no two sizes alike: torch would take them for one
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch, seqlen in ((2, 333), (3, 64), (5, 1000)):
            compare(compiled, inputs(batch, seqlen))


def test_export() -> None:
    class Attend(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return attend(q, k, v)

    batch, seqlen = torch.export.Dim("batch"), torch.export.Dim("seqlen")
    example = tuple(x.detach() for x in inputs())
    program = torch.export.export(Attend(), example, dynamic_shapes=[{0: batch, 1: seqlen}] * 3)
    tensors = [x.detach() for x in inputs(3, 77)]
    assert_same_bits(program.module()(*tensors), attend(*tensors))


def test_torch_func() -> None:
    q, k, v = (x.detach() for x in inputs())
    queries = torch.stack([q, -q])

    def loss(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        out, lse = attend(q, k, v)
        return out.float().square().sum() + lse.sin().sum()

    mine = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), (0, None))(queries, k)
    for i, query in enumerate(queries):
        leaves = [x.clone().requires_grad_() for x in (query, k)]
        expected = torch.autograd.grad(loss(*leaves), leaves)
        assert all(torch.equal(x[i], y) for x, y in zip(mine, expected, strict=True))
    with pytest.raises(RuntimeError, match="flash_attn_func can be differentiated once"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q, k).float().square().sum())(q)


def test_autocast() -> None:
    projection = torch.nn.Linear(128, 3 * 128, device="cuda")
    x = torch.randn(2, 100, 128, device="cuda")

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=BF16):
            out: torch.Tensor = flash_attn_func(*projection(x).unflatten(-1, (3, 2, 64)).unbind(2))
        return out

    compiled = functools.partial(torch.compile(run, fullgraph=True, backend="aot_eager"), x)
    eager = run(x)
    assert eager.dtype == BF16
    assert torch.equal(compiled(), eager)
    with torch.autocast("cuda", dtype=BF16), pytest.raises(TypeError, match=r"q has dtype torch\.float32"):
        flash_attn_func(*(torch.randn(1, 8, 2, 64, device="cuda") for _ in range(3)))
