"""Autograd around FP8 attention, and the operators in place of it for what records graphs."""

from __future__ import annotations

from typing import Any

import torch

from flashhopper import fp8, ops, torch_library_fp8
from flashhopper.fp8 import NO_DESCALES, Accumulate, Descales
from flashhopper.fp8_tensor import Fp8QKV, Fp8Recipe, Fp8Tensor, Lengths
from flashhopper.launch_backward import Saved
from flashhopper.options import AttentionOptions
from flashhopper.problem import NO_SOFTMAX_TENSORS, RaggedTensors, SoftmaxTensors
from flashhopper.torch_library_fp8 import FromSixteenBits


def _is_recorded(*tensors: Any) -> bool:
    return any(ops.is_recorded(x.data if isinstance(x, Fp8Tensor) else x) for x in tensors)


def quantize(
    q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, recipe: Fp8Recipe, lengths: Lengths
) -> Fp8QKV:
    """See :func:`flashhopper.quantize_fp8`."""
    return fp8.quantize(q, k, v, recipe, lengths, torch_library_fp8 if _is_recorded(q, k, v) else None)


def attention(
    q: Any,
    k: Any,
    v: Any,
    options: AttentionOptions,
    descales: Descales,
    accumulate: Accumulate,
    softmax_tensors: SoftmaxTensors,
    ragged: RaggedTensors | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out, in the dtype that was quantised (bfloat16 for raw FP8), and LSE; neither is differentiable."""
    attend = torch_library_fp8.attention if _is_recorded(q, k, v) else fp8.attention
    return attend(q, k, v, options, descales, accumulate, softmax_tensors, ragged)


class _Fp8Attention(torch.autograd.Function):
    """FP8 forward, 16-bit backward: the gradient of attention at the 16-bit inputs, with the FP8 forward's out and LSE.

    Saved for backward: q, k, v, out and LSE, as in the 16-bit attention.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: AttentionOptions,
        recipe: Fp8Recipe,
        accumulate: Accumulate,
        ragged: RaggedTensors | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        quantised = fp8.quantize(q, k, v, recipe, Lengths.of(ragged))
        out, lse = fp8.attention(*quantised, options, NO_DESCALES, accumulate, NO_SOFTMAX_TENSORS, ragged)
        ctx.max_seqlens, lengths = ((), ()) if ragged is None else (ragged[:2], ragged[2:])
        ctx.save_for_backward(q, k, v, out, lse, *lengths)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
        if grad_out is None and grad_lse is None:
            return (None,) * 7
        q, k, v, out, lse, *lengths = ctx.saved_tensors
        ragged = RaggedTensors(*ctx.max_seqlens, *lengths) if lengths else None
        saved, grads = Saved(q, k, v, out, lse), (grad_out, grad_lse)
        gradients: tuple[torch.Tensor | None, ...]
        if q.is_cuda:
            gradients = ops.kernel_gradients(saved, NO_SOFTMAX_TENSORS, ctx.options, grads, ragged)[:3]
        else:
            gradients = torch_library_fp8.gradients_in_16_bits(saved, ctx.options, grads, ragged)
        needed = zip(gradients, ctx.needs_input_grad, strict=False)
        return *(gradient if is_needed else None for gradient, is_needed in needed), None, None, None, None


def attention_from_16_bit(call: FromSixteenBits) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise and attend; differentiable once with respect to q, k and v."""
    if _is_recorded(call.q, call.k, call.v):
        return torch_library_fp8.attention_from_16_bit(call)
    call.problem()
    q, k, v, recipe, options, accumulate, ragged = call
    if ops.is_in_transform():
        raise NotImplementedError("torch.func does not transform FP8 attention yet; flash_attn_func it does")
    result: tuple[torch.Tensor, torch.Tensor] = _Fp8Attention.apply(q, k, v, options, recipe, accumulate, ragged)
    return result
