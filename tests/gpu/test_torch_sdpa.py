"""PyTorch's attention functions on the kernels, against what PyTorch's own implementations give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import BF16
from tolerance import assert_close_to_reference
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashhopper import flash_attn_func
from flashhopper.integrations import torch_sdpa

Tensors = list[torch.Tensor]


@pytest.fixture
def active() -> Iterator[None]:
    torch_sdpa.activate()
    yield
    torch_sdpa.restore()


def inputs(heads_k: int = 8, head_dim: int = 64, contiguous: bool = False) -> Tensors:
    """``(b, h, s, d)``, views of ``(b, s, h, d)`` or contiguous."""
    shapes = ((2, 300, n, head_dim) for n in (8, heads_k, heads_k))
    tensors = [torch.randn(shape, device="cuda").to(BF16).transpose(1, 2) for shape in shapes]
    return [(x.contiguous() if contiguous else x).detach().requires_grad_() for x in tensors]


def results(attend: Callable[..., torch.Tensor], tensors: Tensors, grad_out: torch.Tensor) -> Tensors:
    out = attend(*tensors)
    return [out, *torch.autograd.grad(out, tensors, grad_out.to(out.dtype))]


def math_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, **options)


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"is_causal": True, "enable_gqa": True}])
def test_sdpa(options: dict[str, Any], head_dim: int, contiguous: bool) -> None:
    tensors = inputs(2 if "enable_gqa" in options else 8, head_dim, contiguous)
    grad_out = torch.randn(tensors[0].shape, device="cuda").to(BF16)

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(*tensors, **options)

    mine = results(attend, tensors, grad_out)
    wide = [x.detach().float().requires_grad_() for x in tensors]
    expected = results(lambda *x: math_attention(*x, **options), wide, grad_out)
    low = results(lambda *x: math_attention(*x, **options), tensors, grad_out)
    for x, ref, same_math in zip(mine, expected, low, strict=True):
        assert_close_to_reference(x.detach(), ref.detach(), same_math.detach())
    assert mine[0].stride() == torch.empty_like(tensors[0]).stride()
    direct = flash_attn_func(*(x.transpose(1, 2) for x in tensors), causal="is_causal" in options)
    assert torch.equal(mine[0], direct.transpose(1, 2))  # ours, and not PyTorch's own


@pytest.mark.usefixtures("active")
def test_multihead_attention() -> None:
    module = torch.nn.MultiheadAttention(512, 8, batch_first=True, device="cuda", dtype=BF16)
    x = torch.randn(2, 300, 512, device="cuda").to(BF16)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        mine, _ = module(x, x, x, need_weights=False)
    with sdpa_kernel(SDPBackend.MATH):
        low, _ = module(x, x, x, need_weights=False)
    with sdpa_kernel(SDPBackend.MATH):
        expected, _ = module.float()(x.float(), x.float(), x.float(), need_weights=False)
    assert_close_to_reference(mine.detach(), expected.detach(), low.detach())


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)])
def test_varlen_attn(window: tuple[int, int]) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="torch 2.10 and later")
    lengths = [200, 1, 333]
    cu_seqlens = torch.tensor([0, 200, 201, 534], dtype=torch.int32, device="cuda")
    tensors = [torch.randn(534, 8, 64, device="cuda").to(BF16).requires_grad_() for _ in range(3)]
    grad_out = torch.randn(534, 8, 64, device="cuda").to(BF16)

    def split(*tensors: torch.Tensor) -> torch.Tensor:
        parts = zip(*(x.split(lengths) for x in tensors), strict=True)
        heads_first = ([x.transpose(0, 1)[None] for x in part] for part in parts)
        return torch.cat([math_attention(*x, is_causal=window == (-1, 0))[0].transpose(0, 1) for x in heads_first])

    mine = results(
        lambda *x: varlen.varlen_attn(*x, cu_seqlens, cu_seqlens, 333, 333, window_size=window), tensors, grad_out
    )
    expected = results(split, [x.detach().float().requires_grad_() for x in tensors], grad_out)
    low = results(split, tensors, grad_out)
    for x, ref, same_math in zip(mine, expected, low, strict=True):
        assert_close_to_reference(x.detach(), ref.detach(), same_math.detach())


@pytest.mark.slow
@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("contiguous", [False, True])
def test_compiled(contiguous: bool) -> None:
    torch._dynamo.reset()

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(*tensors, is_causal=True) * 2

    tensors = inputs(contiguous=contiguous)
    grad_out = torch.randn(tensors[0].shape, device="cuda").to(BF16)
    torch.use_deterministic_algorithms(True)
    try:
        mine = results(torch.compile(attend, fullgraph=True), tensors, grad_out)
        expected = results(attend, tensors, grad_out)
    finally:
        torch.use_deterministic_algorithms(False)
    for x, y in zip(mine, expected, strict=True):
        assert torch.equal(x, y)


def test_restore_brings_pytorchs_own_back() -> None:
    tensors = inputs()
    grad_out = torch.randn(tensors[0].shape, device="cuda").to(BF16)

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(*tensors, is_causal=True)

    before = results(attend, tensors, grad_out)
    torch_sdpa.activate()
    torch_sdpa.restore()
    after = results(attend, tensors, grad_out)
    assert torch.equal(before[0], after[0])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        F.scaled_dot_product_attention(*tensors, dropout_p=0.1)  # which ours refuses


@pytest.mark.usefixtures("active")
def test_dropout_is_an_error() -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="dropout_p must be 0"):
        F.scaled_dot_product_attention(*inputs(), dropout_p=0.1)
