"""FP8 on CUDA tensors: quantising, and the forward on what that gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any

import torch

from flashhopper import current, reference_fp8
from flashhopper.compiler import get_kernel
from flashhopper.config import (
    PLAIN,
    Dtype,
    ForwardConfig,
    QuantizeRowsSpec,
    QuantizeValuesSpec,
    ScaleKind,
    ValueScalesSpec,
    ValueStatisticsSpec,
)
from flashhopper.device import hopper_multiprocessors
from flashhopper.heuristics_fp8 import select_fp8_spec
from flashhopper.launch import LOG2_E, SMALLEST_SCALE, compact, kernel_window, scheduler_workspace
from flashhopper.launch_schedule import MAX_TILES, Schedule
from flashhopper.plan import ForwardResult
from flashhopper.problem import DTYPES, AttentionProblem, RaggedTensors, TensorFacts
from flashhopper.reference_fp8 import E4M3, FP8_DTYPES, STATISTICS_KEYS, VALUE_KEYS, Operands
from flashhopper.reference_fp8_varlen import Sequences, num_blocks
from flashhopper.tma_view import TMA_ALIGNMENT, TmaView, aligned

SIGN_WORDS = 8


def _loadable(x: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy, with a base address and strides that are multiples of 16 bytes."""
    if x.is_contiguous() and not any(stride * x.element_size() % TMA_ALIGNMENT for stride in x.stride()[:-1]):
        return aligned(x)
    view = TmaView(TensorFacts.of(x))
    return aligned(view(x) if view.changes else x)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


@lru_cache(maxsize=256)
def _sign_words(seed: int | None, head_dim: int) -> tuple[int, ...]:
    """The sign bits as 8 signed words of 32 channels each, the even channels' in the lower half."""
    bits = 0 if seed is None else reference_fp8.sign_bits(seed, head_dim)
    words = [sum((bits >> 32 * i + c & 1) << c // 2 + 16 * (c % 2) for c in range(32)) for i in range(SIGN_WORDS)]
    return tuple(word - 2**32 if word >= 2**31 else word for word in words)


class _Blocks:
    """How the rows of one tensor are cut into blocks: of a dense batch, or of a ragged one, whose tensors the kernels
    take with a batch of 1."""

    def __init__(self, x: torch.Tensor, sequences: Sequences | None):
        self.sequences = sequences
        self.x = x if sequences is None else x.unsqueeze(0)
        self.entries = x.shape[0] if sequences is None else sequences.batch

    def count(self, rows: int) -> int:
        """Blocks of ``rows`` rows per head."""
        seqlen = self.x.shape[1]
        return -(-seqlen // rows) if self.sequences is None else num_blocks(seqlen, self.entries, rows)

    @property
    def is_empty(self) -> bool:
        """Nothing to quantise: no row, or none that belongs to a sequence."""
        return self.x.numel() == 0 or self.entries == 0

    def lengths(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """``cu_seqlens`` and lengths as the kernels take them."""
        if self.sequences is None:
            return None
        _, cu_seqlens, seqused = self.sequences
        return cu_seqlens, cu_seqlens.diff() if seqused is None else seqused

    def out(self, x: torch.Tensor) -> torch.Tensor:
        """A result as the caller gets it."""
        return x if self.sequences is None else x[0]


class _DensePlan(ABC):
    """What quantises tensors with the same facts, of a dense batch that is not empty, needs beside them."""

    def __init__(self, facts: TensorFacts):
        hopper_multiprocessors(facts.device)
        self.device_index, self.view = facts.device.index, TmaView(facts)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.device_index != current.device():
            with torch.cuda.device(self.device_index):
                return self(x)
        return self.launch(aligned(self.view(x) if self.view.changes else x))

    @abstractmethod
    def launch(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """For a tensor that TMA could load, on the current device."""


class _RowsPlan(_DensePlan):
    def __init__(self, facts: TensorFacts, rows: int, kind: ScaleKind, hadamard_seed: int | None, dtype: torch.dtype):
        super().__init__(facts)
        batch, seqlen, heads, head_dim = facts.shape
        self.data, self.dtype = compact(facts.shape), dtype
        self.scale = compact((batch, heads, -(-seqlen // rows)))
        dtypes = DTYPES[facts.dtype], FP8_DTYPES[dtype]
        spec = QuantizeRowsSpec(dtypes[0], head_dim, rows, kind, hadamard_seed is not None, False, dtypes[1])
        self.kernel, self.sign_words = get_kernel(spec), _sign_words(hadamard_seed, head_dim)

    def launch(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        data = current.empty_strided(*self.data, self.dtype)
        scale = current.empty_strided(*self.scale, torch.float32)
        self.kernel(x, data, scale, self.sign_words, None)
        return data, scale


class _ValuesPlan(_DensePlan):
    def __init__(self, facts: TensorFacts, kind: ScaleKind, center: bool, dtype: torch.dtype):
        super().__init__(facts)
        batch, seqlen, heads, head_dim = facts.shape
        self.dtype, self.one_over_keys = dtype, 1.0 / seqlen
        self.data = compact((batch, heads, head_dim, -(-seqlen // VALUE_KEYS) * VALUE_KEYS))
        self.channels = compact((batch, heads, head_dim))
        self.partial = compact((batch, heads, -(-seqlen // STATISTICS_KEYS), 3, head_dim))
        source, result = DTYPES[facts.dtype], FP8_DTYPES[dtype]
        self.statistics = get_kernel(ValueStatisticsSpec(source, head_dim))
        self.scales = get_kernel(ValueScalesSpec(source, head_dim, kind, center, out_dtype=result))
        self.convert = get_kernel(QuantizeValuesSpec(source, head_dim, out_dtype=result))

    def launch(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        data = current.empty_strided(*self.data, self.dtype)
        scale, inverse, mean = (current.empty_strided(*self.channels, torch.float32) for _ in range(3))
        partial = current.empty_strided(*self.partial, torch.float32)
        self.statistics(x, partial, None)
        self.scales(partial, scale, inverse, mean, self.one_over_keys, None)
        self.convert(x, inverse, mean, data, None)
        return data, scale, mean


_rows_plan: Any = lru_cache(maxsize=1024)(_RowsPlan)
_values_plan: Any = lru_cache(maxsize=1024)(_ValuesPlan)


def quantize_rows(
    x: torch.Tensor,
    rows: int,
    kind: ScaleKind,
    hadamard_seed: int | None,
    sequences: Sequences | None = None,
    dtype: torch.dtype = E4M3,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`reference_fp8_varlen.quantize_rows`, bit by bit, on torch's current stream."""
    if sequences is None and x.numel() > 0:
        quantised: tuple[torch.Tensor, torch.Tensor]
        quantised = _rows_plan(TensorFacts.of(x), rows, kind, hadamard_seed, dtype)(x)
        return quantised
    hopper_multiprocessors(x.device)
    blocks = _Blocks(x, sequences)
    x, is_ragged = blocks.x, sequences is not None
    batch, _, heads, head_dim = x.shape
    data = (
        torch.zeros(x.shape, dtype=torch.uint8, device=x.device).view(dtype) if is_ragged else _empty(x.shape, dtype, x)
    )
    scale = _empty((batch, heads, blocks.count(rows)), torch.float32, x)
    if blocks.is_empty:
        scale.fill_(1.0)
    else:
        dtypes = DTYPES[x.dtype], FP8_DTYPES[dtype]
        spec = QuantizeRowsSpec(dtypes[0], head_dim, rows, kind, hadamard_seed is not None, is_ragged, dtypes[1])
        with torch.cuda.device(x.device):
            get_kernel(spec)(_loadable(x), data, scale, _sign_words(hadamard_seed, head_dim), blocks.lengths())
    return blocks.out(data), blocks.out(scale)


def quantize_values(
    v: torch.Tensor,
    kind: ScaleKind,
    center: bool,
    sequences: Sequences | None = None,
    dtype: torch.dtype = E4M3,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`reference_fp8_varlen.quantize_values`, bit by bit, on torch's current stream."""
    if sequences is None and v.numel() > 0:
        quantised: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
        quantised = _values_plan(TensorFacts.of(v), kind, center, dtype)(v)
        return quantised
    hopper_multiprocessors(v.device)
    blocks, is_ragged = _Blocks(v, sequences), sequences is not None
    batch, seqlen, heads, head_dim = blocks.x.shape
    data = _slots(blocks, dtype)
    scale, inverse, mean = (_empty((blocks.entries, heads, head_dim), torch.float32, v) for _ in range(3))
    if blocks.is_empty:
        scale.fill_(1.0)
        mean.zero_()
    else:
        partial = _empty((batch, heads, blocks.count(STATISTICS_KEYS), 3, head_dim), torch.float32, v)
        source, result, lengths = DTYPES[v.dtype], FP8_DTYPES[dtype], blocks.lengths()
        with torch.cuda.device(v.device):
            v = _loadable(blocks.x)
            get_kernel(ValueStatisticsSpec(source, head_dim, is_ragged))(v, partial, lengths)
            numbers = get_kernel(ValueScalesSpec(source, head_dim, kind, center, is_ragged, result))
            numbers(partial, scale, inverse, mean, 1.0 / seqlen, lengths)
            get_kernel(QuantizeValuesSpec(source, head_dim, is_ragged, result))(v, inverse, mean, data, lengths)
    return blocks.out(data), scale, mean


def transpose_values(data: torch.Tensor, sequences: Sequences | None = None) -> torch.Tensor:
    """As :func:`reference_fp8_varlen.transpose_values`, on torch's current stream.

    e4m3's kernel serves e5m2: its conversion to fp32 and back returns every byte but 0xff, which is NaN in both types
    and becomes 0x7f, NaN too.
    """
    hopper_multiprocessors(data.device)
    blocks = _Blocks(data.view(E4M3), sequences)
    slots = _slots(blocks, E4M3)
    if not blocks.is_empty:
        spec = QuantizeValuesSpec(FP8_DTYPES[E4M3], data.shape[-1], sequences is not None)
        with torch.cuda.device(data.device):
            get_kernel(spec)(_loadable(blocks.x), None, None, slots, blocks.lengths())
    return blocks.out(slots).view(data.dtype)


def _slots(blocks: _Blocks, dtype: torch.dtype) -> torch.Tensor:
    """For V transposed; the kernel writes all of it unless there is nothing to write."""
    batch, _, heads, head_dim = blocks.x.shape
    shape = batch, heads, head_dim, blocks.count(VALUE_KEYS) * VALUE_KEYS
    if blocks.is_empty:
        return torch.zeros(shape, dtype=torch.uint8, device=blocks.x.device).view(dtype)
    return _empty(shape, dtype, blocks.x)


def forward(
    operands: Operands,
    problem: AttentionProblem,
    fast: bool,
    config: ForwardConfig | None = None,
    ragged: RaggedTensors | None = None,
) -> ForwardResult:
    """Attention on CUDA operands of a validated problem, whose dtype is that of out; ``config`` overrides the table.

    Returns out ``(batch, seqlen_q, heads, head_dim_v)`` and LSE ``(batch, heads, seqlen_q)`` fp32; of a ragged batch
    ``(total_q, heads, head_dim_v)`` and ``(heads, total_q)``.
    """
    return plan_of(operands, problem, fast, config)(operands, ragged)


def plan_of(operands: Operands, problem: AttentionProblem, fast: bool, config: ForwardConfig | None = None) -> _Fp8Plan:
    """That of a validated problem on operands as these."""
    return _plan(problem, fast, operands.is_centered, config, FP8_DTYPES[operands.q.dtype])


@lru_cache(maxsize=4096)
def _plan(
    problem: AttentionProblem, fast: bool, is_centered: bool, config: ForwardConfig | None, dtype: Dtype
) -> _Fp8Plan:
    return _Fp8Plan(problem, fast, is_centered, config, dtype)


def _log2(rows: int) -> int:
    """Of a power of two."""
    if rows & rows - 1 or rows < 1:
        raise ValueError(f"{rows} rows share a scale; accepted are powers of two")
    return rows.bit_length() - 1


class _Fp8Plan:
    """A compiled kernel and all that does not change between two calls with the same problem."""

    def __init__(
        self, problem: AttentionProblem, fast: bool, is_centered: bool, config: ForwardConfig | None, dtype: Dtype
    ):
        """``dtype``: of the operands."""
        num_sms = hopper_multiprocessors(problem.device)
        margin = problem.options.sm_margin
        if margin >= num_sms:
            raise ValueError(f"sm_margin is {margin}; the card has {num_sms} SMs, at least 1 must be left")
        self.problem = problem
        self.is_empty = 0 in (problem.batch, problem.rows_q, problem.rows_k)
        self.spec = select_fp8_spec(problem, fast, is_centered, config, dtype)
        num_tiles = -(-problem.seqlen_q // self.spec.config.tile_m) * problem.num_heads * problem.batch
        if problem.ragged is None and num_tiles > MAX_TILES:
            raise ValueError(
                f"q has shape {tuple(problem.q.shape)}, {num_tiles} tiles of {self.spec.config.tile_m} rows; at most "
                f"{MAX_TILES} are accepted"
            )
        self.kernel: Any = None if self.is_empty else get_kernel(self.spec)
        self.schedule: Schedule | None = None
        if problem.ragged is not None and not self.is_empty:
            tile_rows = self.spec.config.tile_m
            self.schedule = Schedule(problem.ragged, by_keys=False, tile_rows=tile_rows, heads=problem.num_heads)
        self.scale_log2 = max(problem.softmax_scale * LOG2_E, SMALLEST_SCALE)
        self.max_ctas = num_sms - margin
        self.window = kernel_window(problem)
        self.out, self.lse = compact(problem.out_shape), compact(problem.lse_shape)

    def __call__(self, operands: Operands, ragged: RaggedTensors | None) -> ForwardResult:
        p = self.problem
        if p.device.index != current.device():
            with torch.cuda.device(p.device):
                return self(operands, ragged)
        out = current.empty_strided(*self.out, p.dtype)
        lse = current.empty_strided(*self.lse, torch.float32)
        if self.is_empty:
            return out.zero_(), lse.fill_(-torch.inf)
        log2_rows = _log2(operands.q_rows), _log2(operands.k_rows)
        missing = self.spec.head_dim_v - p.head_dim_v
        v_scale, v_mean = operands.v_scale, operands.v_mean
        if missing:
            v_scale, v_mean = (torch.nn.functional.pad(x, (0, missing)) for x in (v_scale, v_mean))
        tensors: tuple[torch.Tensor, ...] = (*operands[:3], out, lse, operands.q_scale, operands.k_scale)
        sequences = None
        if self.schedule is not None and ragged is not None:
            sequences = self.schedule(ragged, p.rows_q)
            tensors = tuple(x.unsqueeze(0) for x in tensors)
        q, k, v = map(_loadable, tensors[:3])
        workspace = scheduler_workspace(p.device.index)
        features = None
        if self.spec.features != PLAIN:  # in the order of kernels.features.FeatureArgs
            features = (self.window, None, None, None, sequences, None, None)
        numbers = *log2_rows, self.scale_log2, self.max_ctas
        self.kernel(q, k, v, *tensors[3:5], workspace, *tensors[5:], v_scale, v_mean, *numbers, features)
        return out, lse
