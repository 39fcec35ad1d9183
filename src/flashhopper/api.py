"""The public functions: docstrings, names and defaults, nothing else."""

from __future__ import annotations

from typing import Any

import torch

from flashhopper import fp8, ops, ops_fp8
from flashhopper.config import ScaleKind
from flashhopper.fp8 import NO_DESCALES, Accumulate, Descales
from flashhopper.fp8_tensor import Fp8QKV, Fp8Recipe, Fp8Tensor, Lengths
from flashhopper.mods import MaskMod, ScoreMod
from flashhopper.options import NO_WINDOW, AttentionOptions, options_of, refuse_mods, refuse_tensors
from flashhopper.problem import NO_SOFTMAX_TENSORS, RaggedTensors, SoftmaxTensors, split_qkv
from flashhopper.torch_library_fp8 import FromSixteenBits


def flash_attn_func(
    q: torch.Tensor | Fp8Tensor,
    k: torch.Tensor | Fp8Tensor,
    v: torch.Tensor | Fp8Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    mod_tensors: tuple[torch.Tensor | None, ...] = (),
    window_size: tuple[int, int] = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    fp8_accumulate: Accumulate = "two_level",
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
            TMA cannot load, costs one copy of that tensor. Or FP8: q, k and v all from :func:`quantize_fp8` with one
            dtype, or all ``torch.float8_e4m3fn``, or all ``torch.float8_e5m2``; head dims are then multiples of 16, out
            is not differentiable.
        k: ``(batch, seqlen_k, heads_k, head_dim)``; ``heads`` must be a multiple of ``heads_k`` (GQA, MQA).
        v: ``(batch, seqlen_k, heads_k, head_dim_v)``. Both head dims are multiples of 8 from 8 to 256.
        softmax_scale: factor on q·k, from 0 to 2**20; None is ``head_dim ** -0.5``.
        causal: query i sees keys 0 … i + seqlen_k - seqlen_q (aligned to the bottom right).
        qv: only None is accepted today.
        q_descale, k_descale, v_descale: what ``torch.float8_e4m3fn`` or ``torch.float8_e5m2`` tensors are multiplied
            by, over 0: float32 with one element, or ``(batch, heads_k)`` (q's too); None is 1.
        learnable_sink: ``(heads,)``, floating point: adds exp(sink) to the denominator of each row of its head, and to
            what LSE is the logarithm of; differentiable.
        alibi_slopes: ``(heads,)`` or ``(batch, heads)``, float32, constants: query i and key j score lower by
            slope · abs(i + seqlen_k - seqlen_q - j), after softcap (ALiBi, Press et al. 2022).
        score_mod: ``(score, batch, head, q_idx, kv_idx, tensors) -> score``, a function that is traced into the
            kernels. It takes softmax_scale · q·k, after softcap and ALiBi, and gives what goes into the softmax; its
            derivative by the score is found by the package. ``-inf`` hides a key. More: docs/score-mods.md.
        mask_mod: ``(batch, head, q_idx, kv_idx, tensors) -> bool``: hides the keys for which it is false, beside the
            other masks. Blocks that it hides whole are computed all the same.
        mod_tensors: what both functions get as ``tensors``, constants to autograd: float32, bfloat16, float16, int32 or
            bool, any shapes and strides; entries may be None.
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
        fp8_accumulate: with FP8, ``"two_level"`` adds the products of each key block, or of each 1024 keys, to out in
            fp32, or of each 2048 keys if v is centred. ``"fast"`` leaves out in the tensor cores' accumulator of 14
            bits: for a few thousand keys, or values that are centred.
        return_attn_probs: FA3's name for ``return_lse``.
        return_lse: return ``(out, lse)``.

    Returns:
        out ``(batch, seqlen_q, heads, head_dim_v)`` in q's dtype (FP8: in the dtype that was quantised, bfloat16 for
        8-bit tensors); on request also lse ``(batch, heads, seqlen_q)``,
        float32 (float64 for float64 inputs), the natural logarithm of the softmax's denominator. A query row that sees
        no key gives out 0 and LSE -inf (with a sink: the sink).

    Raises:
        TypeError: a wrong type or dtype; a score_mod or mask_mod that computes what cannot be compiled.
        ValueError: shapes, ranges, devices that do not fit.
        IndexError: on the CPU, an index of ``tensors`` out of range; anywhere, a wrong number of them.
        NotImplementedError: an option that is not there yet.
        RuntimeError: a GPU that is not Hopper; a second derivative on CUDA tensors or inside ``torch.compile``.
        ImportError: a kernel is needed and the CuTe DSL is not installed.
    """
    if qv is not None:
        refuse_tensors(qv=qv)
    options = options_of(
        softmax_scale, causal, window_size, attention_chunk, softcap, num_splits, pack_gqa, deterministic, sm_margin
    )
    tensors: tuple[Any, Any, Any] = q, k, v
    softmax_tensors, descales, functions = NO_SOFTMAX_TENSORS, NO_DESCALES, None
    if learnable_sink is not None or alibi_slopes is not None:
        softmax_tensors = SoftmaxTensors(learnable_sink, alibi_slopes)
    if q_descale is not None or k_descale is not None or v_descale is not None:
        descales = Descales(q_descale, k_descale, v_descale)
    if score_mod is not None or mask_mod is not None or mod_tensors != ():
        functions = score_mod, mask_mod, mod_tensors
    elif softmax_tensors is NO_SOFTMAX_TENSORS and descales is NO_DESCALES and fp8_accumulate == "two_level":
        repeated = ops.repeated_attention(tensors[0], tensors[1], tensors[2], options)
        if repeated is not None:
            return repeated if return_lse or return_attn_probs else repeated[0]
    if fp8.is_fp8(q, k, v):
        refuse_mods(score_mod=score_mod, mask_mod=mask_mod, mod_tensors=mod_tensors or None)
        out, lse = ops_fp8.attention(q, k, v, options, descales, fp8_accumulate, softmax_tensors)
    else:
        fp8.refuse(descales, fp8_accumulate)
        if functions is None:
            out, lse = ops.attention(tensors[0], tensors[1], tensors[2], options, softmax_tensors)
        else:
            out, lse = ops.attention_with_mods(*tensors, options, softmax_tensors, functions)
    return (out, lse) if return_lse or return_attn_probs else out


def quantize_fp8(
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    scales: ScaleKind = "power_of_two",
    hadamard: bool = True,
    center_v: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> Fp8QKV:
    """Quantise q, k and v to FP8 for :func:`flash_attn_func`: ``flash_attn_func(*quantize_fp8(q, k, v))``.

    q and k get a scale for each block of rows of a head (64 of q, 128 of k), after random signs and a Hadamard
    transform over head_dim, which spreads outliers over all channels and leaves q·k what it was (FlashAttention-3, Shah
    et al. 2024, sec. 3.3). v gets a scale and a mean for each channel of a head. What is not finite becomes NaN, in
    e5m2 too, and takes no part in scales and means; what is 0 throughout has scale 1. CPU and GPU give the same bits.

    Args:
        q, k, v: ``(batch, seqlen, heads, head_dim)``, bfloat16 or float16, head dims multiples of 16 from 16 to 256;
            each may be None.
        cu_seqlens_q, seqused_q: of a ragged q ``(total, heads, head_dim)``, for :func:`flash_attn_varlen_func`, which
            must get these very tensors: each sequence has scales and a mean of its own, from its used rows.
        cu_seqlens_k, seqused_k: the same for k and v.
        scales: ``"power_of_two"``: the smallest power of two s with amax / s ≤ m, the dtype's largest number: 448, in
            e5m2 57344; ``"amax"``: amax / m.
        hadamard: transform q and k. Both must have been transformed with the same seed, or neither.
        center_v: subtract from v the mean of each channel over all keys, which attention adds to its result.
        seed: of the signs.
        dtype: ``torch.float8_e4m3fn``, or ``torch.float8_e5m2``, which has range in place of a bit of the mantissa, and
            so twice the rounding error. q, k and v of one call of attention must have the same.

    Returns:
        A named tuple (q, k, v) of :class:`Fp8Tensor`, None where the argument was None.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: shapes, strides, devices or names that do not fit.
        RuntimeError: a GPU that is not Hopper.
        ImportError: a kernel is needed and the CuTe DSL is not installed.
    """
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    return ops_fp8.quantize(q, k, v, Fp8Recipe(scales, hadamard, center_v, seed, dtype), lengths)


def flash_attn_fp8_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    window_size: tuple[int, int] = NO_WINDOW,
    attention_chunk: int = 0,
    scales: ScaleKind = "power_of_two",
    hadamard: bool = True,
    center_v: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float8_e4m3fn,
    fp8_accumulate: Accumulate = "two_level",
    deterministic: bool = False,
    sm_margin: int = 0,
    return_lse: bool = False,
) -> Any:
    """Attention of 16-bit tensors in FP8: :func:`quantize_fp8`, then :func:`flash_attn_func` on what it gives.

    Differentiable once: the backward is that of 16-bit attention at the tensors given, with out and LSE of the FP8
    forward. Saved for it are q, k, v, out and LSE.

    Args:
        q, k, v: as in :func:`flash_attn_func`, bfloat16 or float16, head dims multiples of 16.
        softmax_scale, causal, window_size, attention_chunk, deterministic, sm_margin, fp8_accumulate, return_lse: as in
            :func:`flash_attn_func`.
        scales, hadamard, center_v, seed, dtype: as in :func:`quantize_fp8`.

    Returns:
        out ``(batch, seqlen_q, heads, head_dim_v)`` in q's dtype; on request also lse ``(batch, heads, seqlen_q)``,
        float32.

    Raises:
        As :func:`flash_attn_func` and :func:`quantize_fp8`.
    """
    options = options_of(
        softmax_scale, causal, window_size, attention_chunk, deterministic=deterministic, sm_margin=sm_margin
    )
    recipe = Fp8Recipe(scales, hadamard, center_v, seed, dtype)
    out, lse = ops_fp8.attention_from_16_bit(FromSixteenBits(q, k, v, recipe, options, fp8_accumulate))
    return (out, lse) if return_lse else out


def flash_attn_varlen_fp8_func(
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
    window_size: tuple[int, int] = NO_WINDOW,
    attention_chunk: int = 0,
    scales: ScaleKind = "power_of_two",
    hadamard: bool = True,
    center_v: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float8_e4m3fn,
    fp8_accumulate: Accumulate = "two_level",
    deterministic: bool = False,
    sm_margin: int = 0,
    return_lse: bool = False,
) -> Any:
    """:func:`flash_attn_fp8_func` of a ragged batch: each sequence has scales and means of its own.

    Args:
        q, k, v: as in :func:`flash_attn_varlen_func`, bfloat16 or float16, head dims multiples of 16.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k: as in
            :func:`flash_attn_varlen_func`.
        softmax_scale, causal, window_size, attention_chunk, deterministic, sm_margin, fp8_accumulate, return_lse: as in
            :func:`flash_attn_func`.
        scales, hadamard, center_v, seed, dtype: as in :func:`quantize_fp8`.

    Returns:
        out ``(total_q, heads, head_dim_v)`` in q's dtype; on request also lse ``(heads, total_q)``, float32. Rows that
        are not used or belong to no sequence have out 0, LSE -inf and gradients of 0.

    Raises:
        As :func:`flash_attn_varlen_func` and :func:`quantize_fp8`.
    """
    options = AttentionOptions(
        softmax_scale, causal, window_size, attention_chunk, deterministic=deterministic, sm_margin=sm_margin
    )
    recipe = Fp8Recipe(scales, hadamard, center_v, seed, dtype)
    ragged = RaggedTensors(max_seqlen_q, max_seqlen_k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    call = FromSixteenBits(q, k, v, recipe, options, fp8_accumulate, ragged)
    out, lse = ops_fp8.attention_from_16_bit(call)
    return (out, lse) if return_lse else out


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
    q: torch.Tensor | Fp8Tensor,
    k: torch.Tensor | Fp8Tensor,
    v: torch.Tensor | Fp8Tensor,
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
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    mod_tensors: tuple[torch.Tensor | None, ...] = (),
    window_size: tuple[int, int] = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    fp8_accumulate: Accumulate = "two_level",
    return_attn_probs: bool = False,
    return_lse: bool = False,
) -> Any:
    """:func:`flash_attn_func` of a ragged batch: sequences of any lengths, one after another in one tensor.

    Each sequence attends to its own keys only. Differentiable as :func:`flash_attn_func` is.

    Args:
        q: ``(total_q, heads, head_dim)``; dtypes and strides as in :func:`flash_attn_func`. With FP8, quantised tensors
            are those of :func:`quantize_fp8` with the same cu_seqlens and seqused, the very tensors.
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
        score_mod, mask_mod, mod_tensors: as in :func:`flash_attn_func`; ``batch`` is the number of the sequence,
            ``q_idx`` and ``kv_idx`` count from its first row and key.
        qv, q_descale, k_descale, v_descale, num_splits, pack_gqa, deterministic, sm_margin, fp8_accumulate,
            return_attn_probs, return_lse: as in :func:`flash_attn_func`.

    The contents of ``cu_seqlens`` and ``seqused`` are checked on the CPU. On CUDA tensors, where that would wait for
    the GPU, only their types and shapes are: the caller answers for what is in them.

    Returns:
        out ``(total_q, heads, head_dim_v)`` in q's dtype (FP8: as in :func:`flash_attn_func`); on request also lse
        ``(heads, total_q)``, float32 (float64 for float64 inputs). Rows that are not used or belong to no sequence have
        out 0, LSE -inf and gradients of 0.

    Raises:
        As :func:`flash_attn_func`.
    """
    if qv is not None:
        refuse_tensors(qv=qv)
    options = AttentionOptions(
        softmax_scale, causal, window_size, attention_chunk, softcap, num_splits, pack_gqa, deterministic, sm_margin
    )
    ragged = RaggedTensors(max_seqlen_q, max_seqlen_k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    softmax_tensors, descales = NO_SOFTMAX_TENSORS, NO_DESCALES
    if learnable_sink is not None or alibi_slopes is not None:
        softmax_tensors = SoftmaxTensors(learnable_sink, alibi_slopes)
    if q_descale is not None or k_descale is not None or v_descale is not None:
        descales = Descales(q_descale, k_descale, v_descale)
    if fp8.is_fp8(q, k, v):
        refuse_mods(score_mod=score_mod, mask_mod=mask_mod, mod_tensors=mod_tensors or None)
        out, lse = ops_fp8.attention(q, k, v, options, descales, fp8_accumulate, softmax_tensors, ragged)
    else:
        fp8.refuse(descales, fp8_accumulate)
        tensors: tuple[Any, Any, Any] = q, k, v
        if score_mod is None and mask_mod is None and mod_tensors == ():
            out, lse = ops.attention(tensors[0], tensors[1], tensors[2], options, softmax_tensors, ragged)
        else:
            functions = score_mod, mask_mod, mod_tensors
            out, lse = ops.attention_with_mods(*tensors, options, softmax_tensors, functions, ragged)
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
