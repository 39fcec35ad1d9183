"""Autograd around the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashhopper import launch, launch_backward
from flashhopper.launch_backward import Gradients
from flashhopper.problem import AttentionOptions, RaggedTensors, SoftmaxTensors


class _Attention(torch.autograd.Function):
    """Forward and backward through the kernels. Saved for backward: q, k, v, out, LSE, and the lengths if ragged."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: AttentionOptions,
        ragged: RaggedTensors | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = launch.forward(q, k, v, options, ragged=ragged)
        ctx.max_seqlens, lengths = ((), ()) if ragged is None else (ragged[:2], ragged[2:])
        ctx.save_for_backward(q, k, v, out, lse, *lengths)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
        if grad_out is None and grad_lse is None:
            return None, None, None, None, None
        # Once: checkpointing and offloading unpack what they saved a single time.
        q, k, v, out, lse, *lengths = ctx.saved_tensors
        ragged = RaggedTensors(*ctx.max_seqlens, *lengths) if lengths else None
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        gradients = _AttentionBackward.apply(grad_out, q, k, v, out, lse, ctx.options, grad_lse, ragged)
        needed = zip(gradients, ctx.needs_input_grad, strict=False)
        return *(gradient if is_needed else None for gradient, is_needed in needed), None, None


class _AttentionBackward(torch.autograd.Function):
    """The backward kernels as an operation of their own, so that a graph through it is an error.

    With ``once_differentiable`` the gradient of a loss that is linear in out would count as a constant: a penalty on it
    would be dropped without a word.
    """

    @staticmethod
    def forward(
        ctx: Any,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        options: AttentionOptions,
        grad_lse: torch.Tensor | None,
        ragged: RaggedTensors | None,
    ) -> Gradients:
        return launch_backward.backward(grad_out, q, k, v, out, lse, options, grad_lse, ragged=ragged)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, ...]:
        raise RuntimeError(
            "flash_attn_func can be differentiated once; second derivatives (create_graph=True) need another attention"
        )


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    softmax_tensors: SoftmaxTensors,
    ragged: RaggedTensors | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and LSE of a dense problem or, with ``ragged``, of a ragged one, recorded by autograd if an input needs a
    gradient.

    Under ``torch.compile`` the graph breaks around the call, which then runs as it does without.
    """
    run = _attention_outside_graph if torch.compiler.is_compiling() else _attention
    return run(q, k, v, options, softmax_tensors, ragged)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    softmax_tensors: SoftmaxTensors,
    ragged: RaggedTensors | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if softmax_tensors.learnable_sink is not None or softmax_tensors.alibi_slopes is not None:
        return launch.forward_with_softmax_tensors(q, k, v, options, softmax_tensors, ragged)
    needs_grad = torch.is_grad_enabled() and isinstance(q, torch.Tensor) and q.is_cuda
    if needs_grad and any(getattr(t, "requires_grad", False) for t in (q, k, v)):
        result: tuple[torch.Tensor, torch.Tensor] = _Attention.apply(q, k, v, options, ragged)
        return result
    return launch.forward(q, k, v, options, ragged=ragged)


_attention_outside_graph: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch.compiler.disable(_attention)
