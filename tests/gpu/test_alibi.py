"""ALiBi: out, LSE and gradients, dense and ragged, with each mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backward_checks import plain_attention, random_incoming
from checks import BF16, FP16, Shape, random_inputs
from ragged import Batch, Side
from tolerance import assert_close_to_reference, assert_lse_close

from flashhopper import flash_attn_func, flash_attn_varlen_func
from flashhopper.reference import attention

FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (100, 30)},
    "softcap": {"softcap": 8.0, "causal": True},
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=list(FEATURES))
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_out_and_gradients(head_dim: int, features: dict[str, Any]) -> None:
    """Slopes of each head, and of each batch entry and head; steep enough that a wrong distance shows."""
    for dtype, lengths, batch_slopes in ((BF16, (300, 411), False), (FP16, (411, 300), True)):
        shape = Shape(2, *lengths, 6, 2, head_dim, head_dim)
        tensors, incoming = random_inputs(shape, dtype), random_incoming(shape, dtype, lse=True)
        slopes = torch.rand((2, 6) if batch_slopes else (6,), device="cuda") * 0.2 + 0.01
        inputs = [x.clone().requires_grad_() for x in tensors]
        out, lse = flash_attn_func(*inputs, alibi_slopes=slopes, return_lse=True, **features)
        gradients = torch.autograd.grad((out, lse), inputs, list(incoming))
        results = []
        for function, precision in ((attention, torch.float32), (plain_attention, dtype)):
            leaves = [x.to(precision).requires_grad_() for x in tensors]
            arguments = {"causal": False} | features | {"softmax_scale": head_dim**-0.5, "alibi_slopes": slopes}
            expected = function(*leaves, **arguments)
            grads = [x.to(y.dtype) for x, y in zip(incoming, expected, strict=True) if x is not None]
            results.append((*expected, *torch.autograd.grad(expected, leaves, grads)))
        assert_lse_close(lse, results[0][1])
        factor = 3 if "softcap" in features else 2
        for index, x in ((0, out), *enumerate(gradients, start=2)):
            assert_close_to_reference(x.detach(), results[0][index].detach(), results[1][index].detach(), factor)


def test_a_ragged_batch_is_its_sequences() -> None:
    """Distances begin anew in each sequence, and slopes are its batch entry's."""
    batch = Batch(Side([100, 0, 333]), Side([50, 20, 290]))
    q, k, v = (torch.randn(side.total, 4, 128, device="cuda", dtype=BF16) for side in (batch.q, batch.k, batch.k))
    slopes, given = torch.rand(3, 4, device="cuda"), {"causal": True, "return_lse": True}
    out, lse = flash_attn_varlen_func(q, k, v, **batch.arguments("cuda"), alibi_slopes=slopes, **given)
    for i, (at, keys) in enumerate(zip(batch.q.slices, batch.k.slices, strict=True)):
        if at.stop > at.start:
            tensors = (q[None, at], k[None, keys], v[None, keys])
            wanted, wanted_lse = flash_attn_func(*tensors, alibi_slopes=slopes[i], **given)
            torch.testing.assert_close(out[at], wanted[0], atol=1e-2, rtol=1e-2)
            assert_lse_close(lse[:, at], wanted_lse[0])
