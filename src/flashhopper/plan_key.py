"""What a call's plan depends on, gathered as fast as Python allows: calls with equal keys are validated and launched
alike.

A key has every fact that validation, the choice of kernel and the plan look at, and the types beside the values: 1 ==
True, but only one of them is a valid ``causal``. It has no lengths of a ragged batch, which change in every step of a
training loop: only the classes of lengths between which something differs. What changes under equal facts is no part of
it and looked at in every call: addresses, gradients asked for, the current device and stream.
"""

from __future__ import annotations

from bisect import bisect_left
from threading import Lock
from typing import Any, TypeVar

import torch

from flashhopper.heuristics import BACKWARD_TABLE, TILE_TABLE
from flashhopper.options import NO_WINDOW, AttentionOptions, mask_of
from flashhopper.problem import MAX_EXTENT, MAX_WINDOW_ROWS, NO_SOFTMAX_TENSORS, RaggedTensors, SoftmaxTensors

PLAIN_TENSORS = {torch.Tensor, torch.nn.Parameter}
MAX_PLANS = 4096

# Lengths up to each of these, but over the one before, are alike.
TOTALS = (0, 1, MAX_WINDOW_ROWS, MAX_EXTENT)  # one row has strides that do not matter
MAX_SEQLENS_Q = (-1, *sorted({row.max_seqlen_q for row in BACKWARD_TABLE if row.max_seqlen_q}), MAX_EXTENT)
MAX_SEQLENS_K = (-1, *sorted({row.max_seqlen_k for row in TILE_TABLE if row.max_seqlen_k}), MAX_EXTENT)

Key = tuple[Any, ...]
P = TypeVar("P")


def call_key(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    softmax_tensors: SoftmaxTensors = NO_SOFTMAX_TENSORS,
    ragged: RaggedTensors | None = None,
) -> Key:
    """The key of a call. Arguments that have no key, and are wrong for that reason, raise whatever they raise; others
    give a key that may not be hashable."""
    scale, causal, window, chunk, softcap, num_splits, pack_gqa, deterministic, sm_margin = options
    left, right = window
    sink, slopes = softmax_tensors
    return (  # written out: as a star expression map(type, options) takes half a microsecond more
        q.shape if ragged is None else _ragged_shapes(q, k, v, options, ragged),
        None if ragged is not None else k.shape,
        None if ragged is not None else v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        k.device,
        v.device,
        type(q),
        type(k),
        type(v),
        options,
        type(scale),
        type(causal),
        type(window),
        type(left),
        type(right),
        type(chunk),
        type(softcap),
        type(num_splits),
        type(pack_gqa),
        type(deterministic),
        type(sm_margin),
        None if sink is None else (type(sink), sink.shape, sink.dtype, sink.device),
        None if slopes is None else _slopes_key(slopes, ragged),
    )


def _ragged_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions, ragged: RaggedTensors
) -> Key:
    """Of shapes and lengths, what is not a number of rows or sequences, and the classes of those that are."""
    (total_q, *heads_q), (total_k, *heads_k), (total_v, *heads_v) = q.shape, k.shape, v.shape
    max_seqlen_q, max_seqlen_k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = ragged
    (ends,) = shape = cu_seqlens_q.shape
    return (
        *heads_q,
        None,
        *heads_k,
        None,
        *heads_v,
        None,
        bisect_left(TOTALS, total_q),
        bisect_left(TOTALS, total_k),
        total_v == total_k,
        bisect_left(MAX_SEQLENS_Q, max_seqlen_q),
        bisect_left(MAX_SEQLENS_K, max_seqlen_k),
        type(max_seqlen_q),
        type(max_seqlen_k),
        None if options.window_size == NO_WINDOW else mask_of(options, max_seqlen_q, max_seqlen_k),
        min(ends, 3),  # no cu_seqlens at all, no sequence, one, more: of one, the stride of seqused does not matter
        type(cu_seqlens_q),
        cu_seqlens_q.stride(),
        cu_seqlens_q.dtype,
        cu_seqlens_q.device,
        type(cu_seqlens_k),
        cu_seqlens_k.shape == shape,
        cu_seqlens_k.stride(),
        cu_seqlens_k.dtype,
        cu_seqlens_k.device,
        None if seqused_q is None else _used_key(seqused_q, ends),
        None if seqused_k is None else _used_key(seqused_k, ends),
    )


def _used_key(seqused: torch.Tensor, ends: int) -> Key:
    return type(seqused), seqused.shape == (ends - 1,), seqused.stride(), seqused.dtype, seqused.device


def _slopes_key(slopes: torch.Tensor, ragged: RaggedTensors | None) -> Key:
    batch = None if ragged is None else ragged.cu_seqlens_q.shape  # which slopes may have as a dimension
    is_recorded = slopes.requires_grad and torch.is_grad_enabled()  # no such call is valid
    return type(slopes), slopes.shape, slopes.dtype, slopes.device, batch, is_recorded


_lock = Lock()


def remember(plans: dict[Key, P], key: Key, plan: P) -> None:
    """Put a plan where the next call looks for it; the oldest goes when there are too many."""
    with _lock:
        while len(plans) >= MAX_PLANS:
            del plans[next(iter(plans))]
        plans[key] = plan
