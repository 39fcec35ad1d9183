"""The reference's gradients by formula, for what may not record a graph: operators that ``torch.compile`` calls."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from flashhopper.problem import RaggedTensors, SoftmaxTensors
from flashhopper.reference import CHUNK_SCORES, Visible, visible_keys
from flashhopper.reference_varlen import Lengths


class Gradients(NamedTuple):
    """In the dtypes and shapes of the inputs; ``learnable_sink`` is None if there is no sink."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    learnable_sink: torch.Tensor | None


class Results(NamedTuple):
    """The outputs of :func:`flashhopper.reference.attention`, and the gradients of them."""

    out: torch.Tensor
    lse: torch.Tensor
    grad_out: torch.Tensor
    grad_lse: torch.Tensor


class _Rows(NamedTuple):
    """Some query rows of all heads, grouped by the key head that they share."""

    q: torch.Tensor
    """``(b, hk, group, rows, d)``"""
    grad_out: torch.Tensor
    """``(b, hk, group, rows, dv)``"""
    lse: torch.Tensor
    """``(b, hk, group, rows, 1)``"""
    delta: torch.Tensor
    """``(b, hk, group, rows, 1)``"""
    visible: Visible


class _Scoring(NamedTuple):
    softmax_scale: float
    softcap: float
    slopes: torch.Tensor | None
    """Of ALiBi, ``(b or 1, hk, group, 1, 1)``."""


def backward(
    results: Results,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_tensors: SoftmaxTensors,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
) -> Gradients:
    """Gradients of :func:`flashhopper.reference.attention`, computed in fp32 (fp64 for fp64 inputs).

    P is computed again from LSE: dV = Pᵀ dO, dS = P ∘ (dO Vᵀ - delta), where delta = rowsum(dO ∘ O) - dLSE
    (FlashAttention-2, Dao 2023, sec. 3.1.2). Other keys enter a row by out and LSE only: with those of a longer row
    these are the gradients of its part that attends to k and v, as ring attention asks for them.
    """
    compute_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, heads_k = k.shape[1:3]
    visible = visible_keys(
        seqlen_q, seqlen_k, causal=causal, window_size=window_size, attention_chunk=attention_chunk, device=q.device
    )
    q_heads, dout_heads, out_heads = (
        x.to(compute_dtype).transpose(1, 2).unflatten(1, (heads_k, -1)) for x in (q, results.grad_out, results.out)
    )
    k_heads, v_heads = (x.to(compute_dtype).transpose(1, 2) for x in (k, v))
    lse, grad_lse = (
        x.to(compute_dtype).unflatten(1, (heads_k, -1)).unsqueeze(-1) for x in (results.lse, results.grad_lse)
    )
    weightless = lse == -math.inf
    sees_none = (visible.ends.clamp_max(seqlen_k) <= visible.starts.clamp_min(0))[:, None] | weightless
    dout_heads = _without(dout_heads, sees_none)
    delta = (dout_heads * out_heads).sum(dim=-1, keepdim=True) - _without(grad_lse, weightless)
    slopes = softmax_tensors.alibi_slopes
    if slopes is not None:
        slopes = slopes.to(compute_dtype).reshape(slopes.shape[:-1].numel(), heads_k, -1, 1, 1)
    scoring = _Scoring(softmax_scale, softcap, slopes)
    dq, dk, dv = (torch.zeros_like(x) for x in (q_heads, k_heads, v_heads))

    chunk = max(CHUNK_SCORES // max(batch * heads * seqlen_k, 1), 1)
    with torch.autocast(q.device.type, enabled=False):
        for start in range(0, seqlen_q, chunk):
            at = slice(start, start + chunk)
            q_rows, dout_rows, lse_rows, delta_rows = (x[..., at, :] for x in (q_heads, dout_heads, lse, delta))
            rows = _Rows(q_rows, dout_rows, lse_rows, delta_rows, visible.of_rows(start, start + chunk))
            probabilities, dscores = _scores(rows, k_heads, v_heads, scoring)
            dq[..., at, :] = (dscores @ k_heads.unsqueeze(2)) * softmax_scale
            stacked = dscores.flatten(2, 3).transpose(2, 3)
            dk += (stacked @ rows.q.flatten(2, 3)) * softmax_scale
            dv += probabilities.flatten(2, 3).transpose(2, 3) @ rows.grad_out.flatten(2, 3)
    dsink, learnable_sink = None, softmax_tensors.learnable_sink
    if learnable_sink is not None:
        sink = learnable_sink.to(compute_dtype).view(heads_k, -1, 1, 1)
        dsink = -_without(torch.exp(sink - lse) * delta, weightless).sum(dim=(0, 3)).flatten().to(learnable_sink.dtype)
    return Gradients(
        dq.flatten(1, 2).transpose(1, 2).to(q.dtype).contiguous(),
        dk.transpose(1, 2).to(k.dtype).contiguous(),
        dv.transpose(1, 2).to(v.dtype).contiguous(),
        dsink,
    )


def ragged_backward(
    results: Results,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_tensors: SoftmaxTensors,
    ragged: RaggedTensors,
    **options: Any,
) -> Gradients:
    """:func:`backward` of :func:`flashhopper.reference_varlen.attention`, sequence by sequence; 0 for unused rows.

    ``options`` are the keyword arguments of :func:`backward`.
    """
    q_lengths = Lengths.read("q", q.shape[0], ragged.max_seqlen_q, ragged.cu_seqlens_q, ragged.seqused_q)
    k_lengths = Lengths.read("k", k.shape[0], ragged.max_seqlen_k, ragged.cu_seqlens_k, ragged.seqused_k)
    zeros = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    gradients = Gradients(zeros[0], zeros[1], zeros[2], None)
    of_rows = [q_lengths.split(x)[:-1] for x in (results.out, results.grad_out, q, gradients.q)]
    of_rows += [
        [x.transpose(0, 1) for x in q_lengths.split(y.transpose(0, 1))[:-1]] for y in (results.lse, results.grad_lse)
    ]
    of_keys = [k_lengths.split(x)[:-1] for x in (k, v, gradients.k, gradients.v)]
    slopes, sink = softmax_tensors.alibi_slopes, softmax_tensors.learnable_sink
    dsink = None if sink is None else torch.zeros_like(sink, dtype=torch.promote_types(sink.dtype, torch.float32))
    for i, parts in enumerate(zip(*of_rows, *of_keys, strict=True)):
        out, grad_out, q_part, dq, lse, grad_lse, k_part, v_part, dk, dv = (x[None] for x in parts)
        tensors = softmax_tensors
        if slopes is not None and slopes.dim() == 2:
            tensors = tensors._replace(alibi_slopes=slopes[i])
        part = backward(Results(out, lse, grad_out, grad_lse), q_part, k_part, v_part, tensors, **options)
        for whole, mine in zip((dq, dk, dv), part[:3], strict=True):
            whole.copy_(mine)
        if dsink is not None and part.learnable_sink is not None:
            dsink += part.learnable_sink
    return gradients._replace(learnable_sink=None if sink is None or dsink is None else dsink.to(sink.dtype))


def _scores(rows: _Rows, k: torch.Tensor, v: torch.Tensor, scoring: _Scoring) -> tuple[torch.Tensor, torch.Tensor]:
    """P and the gradient of softmax_scale · q·k, ``(b, hk, group, rows, sk)``."""
    columns = torch.arange(k.shape[2], device=k.device)
    hidden = (columns < rows.visible.starts[:, None]) | (columns >= rows.visible.ends[:, None])
    hidden = hidden | (rows.lse == -math.inf)
    scores = (rows.q @ k.transpose(2, 3).unsqueeze(2)) * scoring.softmax_scale
    slope = None
    if scoring.softcap > 0:
        capped = torch.tanh(scores / scoring.softcap)
        scores, slope = scoring.softcap * capped, 1 - capped.square()
    if scoring.slopes is not None:
        scores = scores - scoring.slopes * (rows.visible.positions[:, None] - columns).abs()
    probabilities = _without(torch.exp(scores - rows.lse), hidden)
    dscores = probabilities * (rows.grad_out @ v.transpose(2, 3).unsqueeze(2) - rows.delta)
    if slope is not None:
        dscores = dscores * slope
    return probabilities, _without(dscores, hidden)


def _without(x: torch.Tensor, gone: torch.Tensor) -> torch.Tensor:
    """x with zeros where ``gone``, whatever stood there."""
    return x.masked_fill(gone, 0.0)
