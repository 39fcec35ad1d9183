"""Autograd around the kernels."""

from __future__ import annotations

from typing import Any

import torch

from flashhopper import launch
from flashhopper.problem import AttentionOptions


class _Attention(torch.autograd.Function):
    """Forward through the kernels; the backward kernels are not there yet and say so when asked."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return launch.forward(q, k, v, options)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, ...]:
        raise NotImplementedError(
            "the backward pass of flash_attn_func is not there yet on CUDA tensors; it works on CPU tensors"
        )


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and LSE of a dense problem, recorded by autograd if an input needs a gradient."""
    needs_grad = torch.is_grad_enabled() and isinstance(q, torch.Tensor) and q.is_cuda
    if needs_grad and any(getattr(t, "requires_grad", False) for t in (q, k, v)):
        result: tuple[torch.Tensor, torch.Tensor] = _Attention.apply(q, k, v, options)
        return result
    return launch.forward(q, k, v, options)
