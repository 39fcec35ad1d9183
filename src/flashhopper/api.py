"""The public functions: docstrings, names and defaults, nothing else."""

from __future__ import annotations

from typing import Any

import torch

from flashhopper import ops
from flashhopper.problem import AttentionOptions, RaggedTensors, SoftmaxTensors, refuse_tensors, split_qkv


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    return_lse: bool = False,
) -> Any:
    """Exact attention: ``softmax(softmax_scale · q kᵀ + mask) v``, as in FlashAttention-3 (Shah et al. 2024, sec. 3).

    CUDA tensors run through the Hopper kernels, on torch's current stream and without host synchronisation; CPU tensors
    through the reference, with the same semantics and errors. Differentiable once, through out and LSE, with respect to
    q, k and v (FlashAttention-2, Dao 2023, sec. 3.1.2); saved for that are q, k, v, out and LSE.

    Args:
        q: ``(batch, seqlen_q, heads, head_dim)``, bfloat16 or float16 (on the CPU also float32 and float64). Any
            strides with a contiguous last dimension. A base address or stride that is no multiple of 16 bytes, which
            TMA cannot load, costs one copy of that tensor.
        k: ``(batch, seqlen_k, heads_k, head_dim)``; ``heads`` must be a multiple of ``heads_k`` (GQA, MQA).
        v: ``(batch, seqlen_k, heads_k, head_dim_v)``. Both head dims are multiples of 8 from 8 to 256.
        softmax_scale: factor on q·k, from 0 to 2**20; None is ``head_dim ** -0.5``.
        causal: query i sees keys 0 … i + seqlen_k - seqlen_q (aligned to the bottom right).
        qv, q_descale, k_descale, v_descale: only None is accepted today.
        learnable_sink: ``(heads,)``, floating point: adds exp(sink) to the denominator of each row of its head, and to
            what LSE is the logarithm of; differentiable.
        alibi_slopes: ``(heads,)`` or ``(batch, heads)``, float32, constants: query i and key j score lower by
            slope · abs(i + seqlen_k - seqlen_q - j), after softcap (ALiBi, Press et al. 2022).
        window_size: (left, right): query i sees keys i + seqlen_k - seqlen_q - left … + right, inclusive; -1 is without
            bound. Blocks of keys that no row sees are not loaded.
        attention_chunk: query i sees the keys of the chunk of this many in which key i + seqlen_k - seqlen_q lies; 0 is
            no chunks. Masks combine: a key is seen if each of them shows it.
        softcap: scores s become softcap · tanh(s / softcap); 0 is none.
        num_splits, pack_gqa: FA3's names; only the defaults are accepted today (``pack_gqa=False`` too).
        deterministic: the backward adds the parts of dq in a fixed order, so that the same inputs give the same bits.
            Without it dq may differ in the last bits from run to run; dk, dv and the forward never do.
        sm_margin: multiprocessors to leave to other work, at least 0. The backward's short kernels before and after its
            main one use all.
        return_attn_probs: FA3's name for ``return_lse``.
        return_lse: return ``(out, lse)``.

    Returns:
        out ``(batch, seqlen_q, heads, head_dim_v)`` in q's dtype; on request also lse ``(batch, heads, seqlen_q)``,
        float32 (float64 for float64 inputs), the natural logarithm of the softmax's denominator. A query row that sees
        no key gives out 0 and LSE -inf (with a sink: the sink).

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: shapes, ranges, devices that do not fit.
        NotImplementedError: an option that is not there yet.
        RuntimeError: a GPU that is not Hopper; a second derivative on CUDA tensors or inside ``torch.compile``.
        ImportError: a kernel is needed and the CuTe DSL is not installed.
    """
    refuse_tensors(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    options = AttentionOptions(
        softmax_scale, causal, window_size, attention_chunk, softcap, num_splits, pack_gqa, deterministic, sm_margin
    )
    out, lse = ops.attention(q, k, v, options, SoftmaxTensors(learnable_sink, alibi_slopes))
    return (out, lse) if return_lse or return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    num_heads_q: int | None = None,
    **options: Any,
) -> Any:
    """:func:`flash_attn_func` of q, k and v in one tensor, which are read where they are.

    Args:
        qkv: ``(batch, seqlen, 3, heads, head_dim)``, or ``(batch, seqlen, heads + 2 · heads_k, head_dim)`` with the
            heads of q first, then those of k, then those of v.
        softmax_scale, causal: as in :func:`flash_attn_func`.
        num_heads_q: heads of q in the second layout; None in the first.
        options: the other keyword arguments of :func:`flash_attn_func`.

    Returns:
        What :func:`flash_attn_func` returns.

    Raises:
        TypeError: qkv is not a tensor, num_heads_q not an int.
        ValueError: a shape that is neither layout, or a number of heads that does not divide it.
        Otherwise as :func:`flash_attn_func`.
    """
    return flash_attn_func(*split_qkv(qkv, num_heads_q), softmax_scale, causal, **options)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    return_lse: bool = False,
) -> Any:
    """:func:`flash_attn_func` of a ragged batch: sequences of any lengths, one after another in one tensor.

    Each sequence attends to its own keys only. Differentiable as :func:`flash_attn_func` is.

    Args:
        q: ``(total_q, heads, head_dim)``; dtypes and strides as in :func:`flash_attn_func`.
        k: ``(total_k, heads_k, head_dim)``.
        v: ``(total_k, heads_k, head_dim_v)``.
        cu_seqlens_q: ``(batch + 1,)`` int32, contiguous, on q's device: sequence i owns the rows cu_seqlens_q[i] …
            cu_seqlens_q[i + 1] - 1 of q. Begins with 0, never falls, ends with at most total_q. Lengths of 0 are fine.
        cu_seqlens_k: the same for the rows of k and v.
        max_seqlen_q, max_seqlen_k: bounds: no used length is larger.
        seqused_q: ``(batch,)`` int32: how many of its rows each sequence uses, the first ones; None is all.
        seqused_k: the same for k and v. Rows that are not used are never read into a result, whatever they hold.
        softmax_scale, causal, window_size, attention_chunk, softcap, learnable_sink, alibi_slopes: as in
            :func:`flash_attn_func`, the used lengths of each sequence being its ``seqlen_q`` and ``seqlen_k``.
        qv, q_descale, k_descale, v_descale, num_splits, pack_gqa, deterministic, sm_margin, return_attn_probs,
            return_lse: as in :func:`flash_attn_func`.

    The contents of ``cu_seqlens`` and ``seqused`` are checked on the CPU. On CUDA tensors, where that would wait for
    the GPU, only their types and shapes are: the caller answers for what is in them.

    Returns:
        out ``(total_q, heads, head_dim_v)`` in q's dtype; on request also lse ``(heads, total_q)``, float32 (float64
        for float64 inputs). Rows that are not used or belong to no sequence have out 0, LSE -inf and gradients of 0.

    Raises:
        As :func:`flash_attn_func`.
    """
    refuse_tensors(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    options = AttentionOptions(
        softmax_scale, causal, window_size, attention_chunk, softcap, num_splits, pack_gqa, deterministic, sm_margin
    )
    ragged = RaggedTensors(max_seqlen_q, max_seqlen_k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    out, lse = ops.attention(q, k, v, options, SoftmaxTensors(learnable_sink, alibi_slopes), ragged)
    return (out, lse) if return_lse or return_attn_probs else out


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    seqused: torch.Tensor | None = None,
    num_heads_q: int | None = None,
    **options: Any,
) -> Any:
    """:func:`flash_attn_varlen_func` of q, k and v in one tensor, which are read where they are.

    Args:
        qkv: ``(total, 3, heads, head_dim)``, or ``(total, heads + 2 · heads_k, head_dim)`` with the heads of q first,
            then those of k, then those of v.
        cu_seqlens, max_seqlen, seqused: as in :func:`flash_attn_varlen_func`, for q, k and v alike.
        softmax_scale, causal: as in :func:`flash_attn_func`.
        num_heads_q: heads of q in the second layout; None in the first.
        options: the other keyword arguments of :func:`flash_attn_varlen_func`.

    Returns:
        What :func:`flash_attn_varlen_func` returns.

    Raises:
        TypeError: qkv is not a tensor, num_heads_q not an int.
        ValueError: a shape that is neither layout, or a number of heads that does not divide it.
        Otherwise as :func:`flash_attn_varlen_func`.
    """
    q, k, v = split_qkv(qkv, num_heads_q, rows="total")
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, seqused, seqused)
    return flash_attn_varlen_func(q, k, v, *lengths, softmax_scale, causal, **options)
