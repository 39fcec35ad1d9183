"""flash_attn_qkvpacked_func reads q, k and v where they are: the same bits as from three tensors."""

from __future__ import annotations

import pytest
import torch
from checks import BF16, assert_same_bits

from flashhopper import flash_attn_func, flash_attn_qkvpacked_func


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("num_heads_q", [None, 6])
def test_packed(num_heads_q: int | None, head_dim: int, causal: bool) -> None:
    shape = (2, 300, 3, 4, head_dim) if num_heads_q is None else (2, 300, num_heads_q + 2 * 2, head_dim)
    packed = torch.randn(shape, device="cuda").to(BF16).requires_grad_()
    parts = packed.unbind(2) if num_heads_q is None else packed.split([num_heads_q, 2, 2], dim=2)
    options = {"causal": causal, "deterministic": True, "return_lse": True}
    out, lse = flash_attn_qkvpacked_func(packed, num_heads_q=num_heads_q, **options)
    expected, expected_lse = flash_attn_func(*(x.contiguous() for x in parts), **options)
    assert_same_bits((out, lse), (expected, expected_lse))
    grad_out = torch.randn(out.shape, device="cuda").to(BF16)
    (mine,) = torch.autograd.grad(out, packed, grad_out)
    (other,) = torch.autograd.grad(expected, packed, grad_out)
    assert torch.equal(mine, other)
    assert mine.count_nonzero() > 0.9 * mine.numel()
