"""Autograd around the kernels."""

from __future__ import annotations

from collections.abc import Callable
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
    """Out and LSE of a dense problem, recorded by autograd if an input needs a gradient.

    Under ``torch.compile`` the graph breaks around the call, which then runs as it does without.
    """
    run = _attention_outside_graph if torch.compiler.is_compiling() else _attention
    return run(q, k, v, options)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    needs_grad = torch.is_grad_enabled() and isinstance(q, torch.Tensor) and q.is_cuda
    if needs_grad and any(getattr(t, "requires_grad", False) for t in (q, k, v)):
        result: tuple[torch.Tensor, torch.Tensor] = _Attention.apply(q, k, v, options)
        return result
    return launch.forward(q, k, v, options)


_attention_outside_graph: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch.compiler.disable(_attention)
