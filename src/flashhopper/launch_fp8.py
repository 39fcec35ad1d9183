"""FP8 on CUDA tensors: quantising, and the forward on what that gives."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from flashhopper import reference_fp8
from flashhopper.compiler import get_kernel
from flashhopper.config import (
    FP8,
    ForwardConfig,
    QuantizeRowsSpec,
    QuantizeValuesSpec,
    ScaleKind,
    ValueScalesSpec,
    ValueStatisticsSpec,
)
from flashhopper.device import hopper_multiprocessors
from flashhopper.heuristics import select_fp8_spec
from flashhopper.launch import LOG2_E, MAX_TILES, SMALLEST_SCALE, ForwardResult, kernel_window, scheduler_workspace
from flashhopper.problem import DTYPES, AttentionProblem, TensorFacts
from flashhopper.reference_fp8 import E4M3, STATISTICS_KEYS, VALUE_KEYS, Operands
from flashhopper.tma_view import TmaView, aligned

SIGN_WORDS = 8


def _loadable(x: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy, with a base address and strides that are multiples of 16 bytes."""
    view = TmaView(TensorFacts.of(x))
    return aligned(view(x) if view.changes else x)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


@lru_cache(maxsize=256)
def _sign_words(seed: int | None, head_dim: int) -> tuple[int, ...]:
    """The sign bits as 8 signed 32-bit words."""
    bits = 0 if seed is None else reference_fp8.sign_bits(seed, head_dim)
    words = [bits >> 32 * i & 0xFFFFFFFF for i in range(SIGN_WORDS)]
    return tuple(word - 2**32 if word >= 2**31 else word for word in words)


def quantize_rows(
    x: torch.Tensor, rows: int, kind: ScaleKind, hadamard_seed: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`reference_fp8.quantize_rows`, bit by bit, on torch's current stream."""
    hopper_multiprocessors(x.device)
    batch, seqlen, heads, head_dim = x.shape
    data = _empty((batch, seqlen, heads, head_dim), E4M3, x)
    scale = _empty((batch, heads, -(-seqlen // rows)), torch.float32, x)
    if scale.numel():
        spec = QuantizeRowsSpec(DTYPES[x.dtype], head_dim, rows, kind, hadamard_seed is not None)
        with torch.cuda.device(x.device):
            get_kernel(spec)(_loadable(x), data, scale, _sign_words(hadamard_seed, head_dim))
    return data, scale


def quantize_values(v: torch.Tensor, kind: ScaleKind, center: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`reference_fp8.quantize_values`, bit by bit, on torch's current stream."""
    hopper_multiprocessors(v.device)
    batch, seqlen, heads, head_dim = v.shape
    data = _empty((batch, heads, head_dim, -(-seqlen // VALUE_KEYS) * VALUE_KEYS), E4M3, v)
    scale, inverse, mean = (_empty((batch, heads, head_dim), torch.float32, v) for _ in range(3))
    if data.numel():
        partial = _empty((batch, heads, -(-seqlen // STATISTICS_KEYS), 3, head_dim), torch.float32, v)
        dtype = DTYPES[v.dtype]
        with torch.cuda.device(v.device):
            v = _loadable(v)
            get_kernel(ValueStatisticsSpec(dtype, head_dim))(v, partial)
            get_kernel(ValueScalesSpec(dtype, head_dim, kind, center))(partial, scale, inverse, mean, 1.0 / seqlen)
            get_kernel(QuantizeValuesSpec(dtype, head_dim))(v, inverse, mean, data)
    else:
        scale.fill_(1.0)
        mean.zero_()
    return data, scale, mean


def transpose_values(data: torch.Tensor) -> torch.Tensor:
    """As :func:`reference_fp8.transpose_values`, on torch's current stream."""
    hopper_multiprocessors(data.device)
    batch, seqlen, heads, head_dim = data.shape
    out = _empty((batch, heads, head_dim, -(-seqlen // VALUE_KEYS) * VALUE_KEYS), E4M3, data)
    if out.numel():
        with torch.cuda.device(data.device):
            get_kernel(QuantizeValuesSpec(FP8, head_dim))(_loadable(data), None, None, out)
    return out


def forward(
    operands: Operands, problem: AttentionProblem, fast: bool, config: ForwardConfig | None = None
) -> ForwardResult:
    """Attention on CUDA operands of a validated problem, whose dtype is that of out; ``config`` overrides the table.

    Returns out ``(batch, seqlen_q, heads, head_dim_v)`` and LSE ``(batch, heads, seqlen_q)`` fp32.
    """
    return _plan(problem, fast, config)(operands)


@lru_cache(maxsize=4096)
def _plan(problem: AttentionProblem, fast: bool, config: ForwardConfig | None) -> _Fp8Plan:
    return _Fp8Plan(problem, fast, config)


def _log2(rows: int) -> int:
    """Of a power of two."""
    if rows & rows - 1 or rows < 1:
        raise ValueError(f"{rows} rows share a scale; accepted are powers of two")
    return rows.bit_length() - 1


class _Fp8Plan:
    """A compiled kernel and all that does not change between two calls with the same problem."""

    def __init__(self, problem: AttentionProblem, fast: bool, config: ForwardConfig | None):
        num_sms = hopper_multiprocessors(problem.device)
        margin = problem.options.sm_margin
        if margin >= num_sms:
            raise ValueError(f"sm_margin is {margin}; the card has {num_sms} SMs, at least 1 must be left")
        self.problem = problem
        self.is_empty = 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k)
        self.spec = select_fp8_spec(problem, fast, config)
        num_tiles = -(-problem.seqlen_q // self.spec.config.tile_m) * problem.num_heads * problem.batch
        if num_tiles > MAX_TILES:
            raise ValueError(
                f"q has shape {tuple(problem.q.shape)}, {num_tiles} tiles of {self.spec.config.tile_m} rows; at most "
                f"{MAX_TILES} are accepted"
            )
        self.kernel: Any = None if self.is_empty else get_kernel(self.spec)
        self.out_shape = (problem.batch, problem.seqlen_q, problem.num_heads, problem.head_dim_v)
        self.lse_shape = (problem.batch, problem.num_heads, problem.seqlen_q)
        self.scale_log2 = max(problem.softmax_scale * LOG2_E, SMALLEST_SCALE)
        self.max_ctas = num_sms - margin
        window = kernel_window(problem)
        # In the order of kernels.features.FeatureArgs.
        self.feature_args = None if window is None else (window, None, None, None, None)

    def __call__(self, operands: Operands) -> ForwardResult:
        p = self.problem
        out = torch.empty(self.out_shape, dtype=p.dtype, device=p.device)
        lse = torch.empty(self.lse_shape, dtype=torch.float32, device=p.device)
        if self.is_empty:
            return out.zero_(), lse.fill_(-torch.inf)
        log2_rows = _log2(operands.q_rows), _log2(operands.k_rows)
        missing = self.spec.head_dim_v - p.head_dim_v
        v_scale, v_mean = operands.v_scale, operands.v_mean
        if missing:
            v_scale, v_mean = (torch.nn.functional.pad(x, (0, missing)) for x in (v_scale, v_mean))
        with torch.cuda.device(p.device):
            q, k, v = map(_loadable, operands[:3])
            workspace = scheduler_workspace(p.device.index)
            scales = operands.q_scale, operands.k_scale, v_scale, v_mean
            numbers = *log2_rows, self.scale_log2, self.max_ctas
            self.kernel(q, k, v, out, lse, workspace, *scales, *numbers, self.feature_args)
        return out, lse
