"""ALiBi through the launchers, which take it already; the public functions do once these tests have run on a card."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backward_checks import plain_attention, random_incoming
from checks import BF16, FP16, Shape, random_inputs
from ragged import Batch, Side
from tolerance import assert_close_to_reference, assert_lse_close

from flashhopper import flash_attn_func, launch, launch_backward
from flashhopper.problem import AttentionOptions, RaggedTensors, SoftmaxTensors
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
        options, given = AttentionOptions(**features), SoftmaxTensors(alibi_slopes=slopes)
        out, lse = launch.forward(*tensors, options, softmax_tensors=given)
        assert incoming.grad_out is not None
        gradients = launch_backward.backward(
            incoming.grad_out, *tensors, out, lse, options, incoming.grad_lse, softmax_tensors=given
        )
        results = []
        for function, precision in ((attention, torch.float32), (plain_attention, dtype)):
            leaves = [x.to(precision).requires_grad_() for x in tensors]
            arguments = {"causal": False} | features | {"softmax_scale": head_dim**-0.5, "alibi_slopes": slopes}
            expected = function(*leaves, **arguments)
            grads = [x.to(y.dtype) for x, y in zip(incoming, expected, strict=True) if x is not None]
            results.append((*expected, *torch.autograd.grad(expected, leaves, grads)))
        assert_lse_close(lse, results[0][1])
        factor = 3 if "softcap" in features else 2
        for index, x in ((0, out), *enumerate(gradients[:3], start=2)):
            assert_close_to_reference(x, results[0][index].detach(), results[1][index].detach(), factor)


def test_a_ragged_batch_is_its_sequences() -> None:
    """Distances begin anew in each sequence, and slopes are its batch entry's."""
    batch = Batch(Side([100, 0, 333]), Side([50, 20, 290]))
    q, k, v = (torch.randn(side.total, 4, 128, device="cuda", dtype=BF16) for side in (batch.q, batch.k, batch.k))
    slopes, options = torch.rand(3, 4, device="cuda"), AttentionOptions(causal=True)
    arguments = batch.arguments("cuda")
    ragged = RaggedTensors(**{name: arguments[name] for name in RaggedTensors._fields})
    out, lse = launch.forward(q, k, v, options, ragged=ragged, softmax_tensors=SoftmaxTensors(alibi_slopes=slopes))
    for i, (at, keys) in enumerate(zip(batch.q.slices, batch.k.slices, strict=True)):
        if at.stop > at.start:
            alone = SoftmaxTensors(alibi_slopes=slopes[i])
            tensors = (q[None, at], k[None, keys], v[None, keys])
            wanted, wanted_lse = launch.forward(*tensors, options, softmax_tensors=alone)
            torch.testing.assert_close(out[at], wanted[0], atol=1e-2, rtol=1e-2)
            assert_lse_close(lse[:, at], wanted_lse[0])


def test_the_public_function_refuses_it() -> None:
    q = torch.randn(1, 8, 2, 64, device="cuda", dtype=BF16)
    with pytest.raises(NotImplementedError, match="alibi_slopes is not there yet on CUDA tensors"):
        flash_attn_func(q, q, q, alibi_slopes=torch.rand(2, device="cuda"))
