"""Autograd around the kernels, and the same results inside torch.compile."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flashhopper import flash_attn_func, launch_backward, ops
from flashhopper.options import AttentionOptions
from flashhopper.plan import Plan
from flashhopper.problem import SoftmaxTensors
from flashhopper.reference import attention


def model(x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = flash_attn_func(x * 2, x, x, causal=True)
    return out + 1


def test_a_compiled_model_gives_the_same_bits_and_the_gradients() -> None:
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for seqlen in (20, 33):
        x, y = (torch.randn(2, seqlen, 2, 16).requires_grad_() for _ in range(2))
        y.data.copy_(x.data)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*lru_cache.*")  # dynamo would trace through the plans' cache
            out = compiled(x)
        assert torch.equal(out, model(y))
        out.sum().backward()
        model(y).sum().backward()
        assert x.grad is not None
        assert y.grad is not None
        torch.testing.assert_close(x.grad, y.grad, atol=1e-4, rtol=1e-5)  # a formula's, and autograd's
        assert x.grad.abs().sum() > 0


def test_a_compiled_model_raises_the_same_errors() -> None:
    with pytest.raises(TypeError, match="causal must be a bool, got int"):
        torch.compile(lambda x: flash_attn_func(x, x, x, causal=1), backend="eager")(torch.randn(1, 4, 2, 16))


@pytest.fixture
def kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The autograd function of CUDA tensors, with the reference in place of the kernels."""

    def backward(
        dout: torch.Tensor, *tensors: Any, ragged: None, softmax_tensors: SoftmaxTensors, mods: None
    ) -> tuple[torch.Tensor | None, ...]:
        q, k, v, _, _, _, grad_lse = tensors
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            out, lse = attention(*leaves, softmax_scale=0.25, causal=True)
            loss = (out * dout).sum() + (0 if grad_lse is None else (lse * grad_lse).sum())
        return *torch.autograd.grad(loss, leaves, materialize_grads=True, allow_unused=True), None

    monkeypatch.setattr(launch_backward, "backward", backward)


class ReferencePlan(Plan):
    def __init__(self) -> None:
        self.options = AttentionOptions(causal=True)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> Any:
        return attention(q, k, v, softmax_scale=0.25, causal=True)


def on_card(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = tensors
    return ops._attention(ReferencePlan(), q, k, v, SoftmaxTensors(), None)


@pytest.mark.parametrize("used", ["out", "lse", "both"])
@pytest.mark.usefixtures("kernels_on_cpu")
def test_checkpointed_gradients_of_out_and_lse(used: str) -> None:
    """What was saved is unpacked once: a second time is an error under checkpointing."""
    tensors = [torch.randn(2, 9, 2, 16, dtype=torch.float64).requires_grad_() for _ in range(3)]

    def loss(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        return (out.square().sum() if used != "lse" else 0) + (lse.square().sum() if used != "out" else 0)

    inputs = tensors if used != "lse" else tensors[:2]  # LSE does not depend on v
    expected = torch.autograd.grad(loss(*attention(*tensors, softmax_scale=0.25, causal=True)), inputs)
    for run in (on_card, lambda *x: checkpoint(on_card, *x, use_reentrant=False)):
        torch.testing.assert_close(torch.autograd.grad(loss(*run(*tensors)), inputs), expected)


@pytest.mark.usefixtures("kernels_on_cpu")
def test_only_the_gradients_that_are_asked_for() -> None:
    q, k, v = (torch.randn(2, 9, 2, 16, dtype=torch.float64) for _ in range(3))
    k.requires_grad_()
    out, _ = on_card(q, k, v)
    out.sum().backward()
    assert k.grad is not None
    assert (q.grad, v.grad) == (None, None)


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.usefixtures("kernels_on_cpu")
def test_a_second_derivative_is_an_error(linear: bool) -> None:
    """Also of a loss that is linear in out, whose gradient autograd would take for a constant."""
    q, k, v = (torch.randn(2, 9, 2, 16, dtype=torch.float64).requires_grad_() for _ in range(3))
    out, _ = on_card(q, k, v)
    (dq,) = torch.autograd.grad(out.sum() if linear else out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="flash_attn_func can be differentiated once"):
        (out.sum() + dq.square().sum()).backward()
