"""flash_attn_func inside torch.compile: a graph break, and the same results."""

from __future__ import annotations

import warnings

import pytest
import torch

from flashhopper import flash_attn_func


def model(x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = flash_attn_func(x * 2, x, x, causal=True)
    return out + 1


def test_a_compiled_model_gives_the_same_bits_and_gradients() -> None:
    compiled = torch.compile(model, backend="eager")
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
        assert torch.equal(x.grad, y.grad)
        assert x.grad.abs().sum() > 0


def test_a_compiled_model_raises_the_same_errors() -> None:
    with pytest.raises(TypeError, match="causal must be a bool, got int"):
        torch.compile(lambda x: flash_attn_func(x, x, x, causal=1), backend="eager")(torch.randn(1, 4, 2, 16))
