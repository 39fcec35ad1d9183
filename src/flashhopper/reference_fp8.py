"""FP8 in plain PyTorch: the quantiser that the kernels equal bit by bit, attention on what it gives, and an emulator of
the FP8 forward kernel's arithmetic.

Every step of the quantiser is one IEEE fp32 operation in a fixed order, so that CPU and GPU agree in every bit.
"""

from __future__ import annotations

import math
import random
from functools import lru_cache
from typing import NamedTuple

import torch

from flashhopper.config import FP8_MAX_EXPONENT, ROWS_PER_WARPGROUP, Dtype, ForwardConfig, ScaleKind

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8_DTYPES: dict[torch.dtype, Dtype] = {E4M3: "float8_e4m3fn", E5M2: "float8_e5m2"}
FP8_NAN = 0x7F  # of both
WHOLE_SEQUENCE = 2**30  # rows that share a scale where there is one for a whole head
VALUE_KEYS = 128  # V's rows are padded to whole blocks of so many keys
STATISTICS_KEYS = 512  # keys whose sum, minimum and maximum are taken together, by
STATISTICS_LANES = 8  # threads with every eighth key each
EXPONENT_BITS = 0x7F800000  # of fp32
SCALE_EXPONENTS = (-100, 120)  # of power-of-two scales; their reciprocals are normal fp32 numbers

SCALE_KINDS: tuple[ScaleKind, ...] = ("power_of_two", "amax")


@lru_cache(maxsize=256)
def sign_bits(seed: int, head_dim: int) -> int:
    """Bit i is set if channel i changes its sign before the Hadamard transform."""
    return random.Random(seed).getrandbits(head_dim)


def hadamard_block(head_dim: int) -> int:
    """Channels that are transformed together: the largest power of two that divides head_dim."""
    return head_dim & -head_dim


def hadamard(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Random signs, then a Hadamard transform of each block of channels, an orthogonal map; fp32 in and out."""
    head_dim = x.shape[-1]
    block, bits = hadamard_block(head_dim), sign_bits(seed, head_dim)
    signs = torch.tensor([-1.0 if bits >> i & 1 else 1.0 for i in range(head_dim)], device=x.device)
    y = (x * signs).unflatten(-1, (head_dim // block, block))
    stride = 1
    while stride < block:
        low, high = y.unflatten(-1, (block // (2 * stride), 2, stride)).unbind(-2)
        y = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        stride *= 2
    result: torch.Tensor = y.flatten(-2) * block**-0.5
    return result


def inverse_hadamard(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Undo :func:`hadamard`, up to rounding: the transform is symmetric, the signs come last."""
    head_dim = x.shape[-1]
    bits = sign_bits(seed, head_dim)
    signs = torch.tensor([-1.0 if bits >> i & 1 else 1.0 for i in range(head_dim)], device=x.device)
    block = hadamard_block(head_dim)
    y = x.unflatten(-1, (head_dim // block, block))
    matrix = _hadamard_matrix(block).to(x)
    result: torch.Tensor = (y @ matrix).flatten(-2) * signs
    return result


def _hadamard_matrix(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix.mul(size**-0.5)


def max_exponent(dtype: torch.dtype) -> int:
    """The largest number of an FP8 type is 1.75 times 2 to this power: 448 in e4m3, 57344 in e5m2."""
    return FP8_MAX_EXPONENT[FP8_DTYPES[dtype]]


def largest_number(dtype: torch.dtype) -> float:
    """Of an FP8 type."""
    return 1.75 * 2.0 ** max_exponent(dtype)


def scales_of(amax: torch.Tensor, kind: ScaleKind, dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and their reciprocals for largest magnitudes, fp32; 1 where all is 0.

    ``power_of_two``: the smallest one with amax / scale ≤ the dtype's largest number. ``amax``: amax over that number.
    Neither is below 2**-100.
    """
    low, high = SCALE_EXPONENTS
    if kind == "power_of_two":
        bits = amax.contiguous().view(torch.int32)
        over = (bits & 0x7FFFFF) > 0x600000  # a mantissa above 1.75
        exponent = (bits >> 23) - 127 - max_exponent(dtype) + over.int()
        exponent = exponent.clamp(low, high)
        scale = ((exponent + 127) << 23).view(torch.float32)
        inverse = ((127 - exponent) << 23).view(torch.float32)
    else:
        scale = (amax / largest_number(dtype)).clamp_min(2.0**low)
        inverse = 1.0 / scale
    zero = amax == 0
    return scale.masked_fill(zero, 1.0), inverse.masked_fill(zero, 1.0)


def to_fp8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to nearest even, saturating; what is not finite becomes NaN, so that no infinity passes for 448. In e5m2,
    which has infinities, too: a Hadamard transform would make infinities or NaN of a row that has one as it happens."""
    largest = largest_number(dtype)
    bits = x.clamp(-largest, largest).to(dtype).view(torch.uint8)
    return torch.where(x.isfinite(), bits, bits.new_full((), FP8_NAN)).view(dtype)


def _largest(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """The largest finite magnitude."""
    magnitude = x.abs()
    return magnitude.masked_fill(~magnitude.isfinite(), 0.0).amax(dims)


def quantize_rows(
    x: torch.Tensor, rows: int, kind: ScaleKind, hadamard_seed: int | None, dtype: torch.dtype = E4M3
) -> tuple[torch.Tensor, torch.Tensor]:
    """Q or K ``(b, s, h, d)`` as FP8 of that shape, and scales fp32 ``(b, h, ceil(s / rows))``."""
    seqlen = x.shape[1]
    y = x.float()
    if hadamard_seed is not None:
        y = hadamard(y, hadamard_seed)
    blocks = -(-seqlen // rows)
    y = torch.nn.functional.pad(y, (0, 0, 0, 0, 0, blocks * rows - seqlen)).unflatten(1, (blocks, rows))
    scale, inverse = scales_of(_largest(y, (2, 4)), kind, dtype)  # (b, blocks, h)
    data = to_fp8(y * inverse[:, :, None, :, None], dtype).view(torch.uint8).flatten(1, 2)[:, :seqlen]
    return data.contiguous().view(dtype), scale.transpose(1, 2).contiguous()


def channel_statistics(v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum, minimum and maximum over the keys of the finite values, fp32 ``(b, h, d)``, summed in the kernels' order."""
    batch, seqlen, heads, head_dim = v.shape
    chunks = max(-(-seqlen // STATISTICS_KEYS), 1)
    pad = (0, 0, 0, 0, 0, chunks * STATISTICS_KEYS - seqlen)
    x = torch.nn.functional.pad(v.float(), pad, value=math.nan)
    finite = x.isfinite()
    lowest = x.masked_fill(~finite, math.inf).amin(1)
    highest = x.masked_fill(~finite, -math.inf).amax(1)
    parts = x.masked_fill(~finite, 0.0).unflatten(1, (chunks, STATISTICS_KEYS // STATISTICS_LANES, STATISTICS_LANES))
    total = parts.new_zeros(batch, heads, head_dim)
    for chunk in range(chunks):
        lanes = parts.new_zeros(batch, STATISTICS_LANES, heads, head_dim)
        for step in range(parts.shape[2]):
            lanes = lanes + parts[:, chunk, step]
        partial = lanes[:, 0]
        for lane in range(1, STATISTICS_LANES):
            partial = partial + lanes[:, lane]
        total = total + partial
    return total, lowest, highest


def rounded_to_spacing(mean: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``mean`` rounded to a multiple of the spacing that ``dtype`` has at ``largest``, both fp32: what fp32 has at
    1.5 · 2**(exponent + what fp32's mantissa is longer), which is added and subtracted again."""
    steps = 23 - min(round(-math.log2(torch.finfo(dtype).eps)), 23)
    exponent = (largest.view(torch.int32) & EXPONENT_BITS).clamp(max=EXPONENT_BITS - ((steps + 1) << 23))
    shift = (exponent + (steps << 23) | 0x400000).view(torch.float32)
    return (mean + shift) - shift


def value_scales(
    v: torch.Tensor, kind: ScaleKind, center: bool, dtype: torch.dtype = E4M3
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scale, its reciprocal and the mean of each channel of V over all keys, fp32 ``(b, h, d)``.

    The mean is rounded to a multiple of the spacing that V's dtype has at the channel's largest value: V less the mean
    then lies on a grid around 0, whose roundings to FP8 cancel over the keys. On a shifted grid they share a sign:
    2.4e-3 at any length for values around 1 in bfloat16.
    """
    total, lowest, highest = channel_statistics(v)
    mean = total * torch.tensor(1.0 / max(v.shape[1], 1), dtype=torch.float32)
    largest = torch.maximum(highest, -lowest)
    largest = largest.masked_fill(~largest.isfinite(), 0.0)
    mean = rounded_to_spacing(mean, largest, v.dtype)
    mean = mean.masked_fill(~mean.isfinite(), 0.0) if center else torch.zeros_like(mean)
    amax = torch.maximum(highest - mean, mean - lowest)
    amax = amax.masked_fill(~amax.isfinite(), 0.0)
    return (*scales_of(amax, kind, dtype), mean)


def key_of_slot(num_slots: int) -> torch.Tensor:
    """Which key each slot of the transposed V holds, int64.

    In each 16 keys the order is that in which a thread holds P: the accumulators of S are then the register operand of
    P V as they stand. Slot 4 t + 2 g + i is key 8 g + 2 t + i.
    """
    slot = torch.arange(num_slots)
    t, g, i = slot % 16 // 4, slot % 4 // 2, slot % 2
    return slot - slot % 16 + 8 * g + 2 * t + i


def transpose_values(data: torch.Tensor) -> torch.Tensor:
    """FP8 ``(b, s, h, d)`` as ``(b, h, d, slots)``, slots padded with zeros to whole blocks of ``VALUE_KEYS``."""
    pad = -data.shape[1] % VALUE_KEYS
    padded = torch.nn.functional.pad(data.view(torch.uint8), (0, 0, 0, 0, 0, pad))
    order = key_of_slot(padded.shape[1]).to(data.device)
    return padded[:, order].permute(0, 2, 3, 1).contiguous().view(data.dtype)


def restore_values(data: torch.Tensor, seqlen: int) -> torch.Tensor:
    """Undo :func:`transpose_values`: FP8 ``(b, s, h, d)``."""
    slot_of_key = key_of_slot(data.shape[-1]).argsort().to(data.device)
    rows = data.view(torch.uint8)[..., slot_of_key].permute(0, 3, 1, 2)
    return rows[:, :seqlen].contiguous().view(data.dtype)


def quantize_values(
    v: torch.Tensor, kind: ScaleKind, center: bool, dtype: torch.dtype = E4M3
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """V ``(b, s, h, d)`` as FP8 ``(b, h, d, slots)`` with scale and mean, fp32 ``(b, h, d)``."""
    scale, inverse, mean = value_scales(v, kind, center, dtype)
    data = to_fp8((v.float() - mean[:, None]) * inverse[:, None], dtype)
    return transpose_values(data), scale, mean


class Operands(NamedTuple):
    """What the FP8 forward kernel reads."""

    q: torch.Tensor
    """``(b, sq, h, d)``; e4m3 or e5m2, as k and v are"""
    k: torch.Tensor
    """``(b, sk, hk, d)``"""
    v: torch.Tensor
    """``(b, hk, dv, slots)``"""
    q_scale: torch.Tensor
    """fp32 ``(b, h, blocks)``"""
    k_scale: torch.Tensor
    """fp32 ``(b, hk, blocks)``"""
    v_scale: torch.Tensor
    """fp32 ``(b, hk, dv)``"""
    v_mean: torch.Tensor
    """fp32 ``(b, hk, dv)``"""
    q_rows: int
    """Rows of q that share a scale."""
    k_rows: int
    seqlen_k: int
    is_centered: bool = False
    """Whether each channel of v had its mean subtracted, so that sums over keys stay small."""

    def dequantized(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v as fp32 ``(b, s, h, d)``; q and k as they were quantised, after a Hadamard transform if any."""
        q = self.q.float() * rows_of_scales(self.q_scale, self.q_rows, self.q.shape[1])
        k = self.k.float() * rows_of_scales(self.k_scale, self.k_rows, self.k.shape[1])
        v = restore_values(self.v, self.seqlen_k).float() * self.v_scale[:, None] + self.v_mean[:, None]
        return q, k, v


def rows_of_scales(scale: torch.Tensor, rows: int, seqlen: int) -> torch.Tensor:
    """Scales ``(b, h, blocks)`` of ``rows`` rows each as ``(b, seqlen, h, 1)``."""
    block = torch.arange(seqlen, device=scale.device) // rows
    return scale[:, :, block].transpose(1, 2)[..., None]


LOG2_E = math.log2(math.e)
NO_KEY_YET = -3.0e38
OFFSET = {"exact": 8.0, "lazy": 4.0}
"""P is 2**offset where the score is the reference."""
MOVE_FROM = 248.0  # a P of this size moves the lazy reference; e4m3 ends at 448
ACCUMULATOR_BITS = 13  # of an FP8 WGMMA's accumulator after the leading one: 2**-13 of it survives, 2**-14 is lost
WGMMA_K = 32


def emulate_fp8_forward(
    operands: Operands, *, softmax_scale: float, causal: bool, config: ForwardConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """The FP8 forward kernel's arithmetic: out ``(b, sq, h, dv)`` and LSE ``(b, h, sq)``, both fp32.

    Key blocks from the last to the first, P with an offset in its exponent, PV in a tensor core's short accumulator:
    a fresh one for each key block with ``two_level_columns``, for so many with ``flush_blocks``, else one for all. Of
    ``config`` these, tile_n and softmax count. A tile that the lazy softmax would redo raises ArithmeticError: tests
    choose inputs without.
    """
    seqlen_q, heads = operands.q.shape[1:3]
    heads_k, seqlen_k, tile_n = operands.k.shape[2], operands.seqlen_k, config.tile_n
    group = heads // heads_k
    blocks = -(-seqlen_k // tile_n)
    q = operands.q.float().transpose(1, 2)
    k = torch.nn.functional.pad(operands.k.float(), (0, 0, 0, 0, 0, blocks * tile_n - seqlen_k)).transpose(1, 2)
    v = restore_values(operands.v, seqlen_k).float()
    v = torch.nn.functional.pad(v, (0, 0, 0, 0, 0, blocks * tile_n - seqlen_k)).transpose(1, 2)
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    q_scale = rows_of_scales(operands.q_scale, operands.q_rows, seqlen_q).transpose(1, 2)
    rows = torch.arange(seqlen_q)
    ends = (rows + 1 + seqlen_k - seqlen_q if causal else torch.full_like(rows, seqlen_k)).clamp_max(seqlen_k)
    unmasked = torch.zeros(-(-seqlen_q // ROWS_PER_WARPGROUP) * ROWS_PER_WARPGROUP, dtype=torch.int64)
    if config.softmax == "lazy":
        unmasked[:seqlen_q] = ends.clamp_min(0) // tile_n
        first = unmasked.view(-1, ROWS_PER_WARPGROUP)[:, :1]
        unmasked = first.expand(-1, ROWS_PER_WARPGROUP).flatten()
        unmasked = unmasked.minimum((-(-ends.clamp_min(1) // tile_n) - 1).amax())
    state = _Rows.start(q.shape[:3], v.shape[-1])
    scale = torch.tensor(softmax_scale * LOG2_E, dtype=torch.float32) * q_scale
    for block in reversed(range(blocks)):
        keys = slice(block * tile_n, (block + 1) * tile_n)
        k_scale = operands.k_scale.repeat_interleave(group, 1)[:, :, block * tile_n // operands.k_rows, None, None]
        hidden = torch.arange(keys.start, keys.stop) >= ends[:, None]
        acc_S = _tensor_core(q, k[:, :, keys].transpose(2, 3))
        exponents = (acc_S * (scale * k_scale)).masked_fill(hidden, -math.inf)
        lazy = (block < unmasked[:seqlen_q])[:, None]
        state = state.visited(exponents, v[:, :, keys], lazy, config)
    total = state.row_sum
    if not total.isfinite().all():
        raise ArithmeticError("a tile would be redone with the exact softmax, or an input is not finite")
    inverse = torch.where(total == 0, 0.0, 1.0 / total)
    v_scale, v_mean = (x.repeat_interleave(group, 1)[:, :, None] for x in (operands.v_scale, operands.v_mean))
    out = ((state.flushed + state.acc_O) * inverse * v_scale + v_mean).masked_fill(total == 0, 0.0)
    lse = ((state.reference + torch.log2(total)) * (1.0 / LOG2_E)).squeeze(-1)
    return out.transpose(1, 2).contiguous(), lse


class _Rows(NamedTuple):
    """Running state of all query rows: ``(b, h, sq, 1 or dv)``, fp32."""

    reference: torch.Tensor
    row_sum: torch.Tensor
    acc_O: torch.Tensor
    flushed: torch.Tensor
    """The second level of ``flush_blocks``."""
    num_blocks: int
    """In acc_O."""

    @classmethod
    def start(cls, rows: torch.Size, head_dim_v: int) -> _Rows:
        zero, empty = torch.zeros(*rows, 1), torch.zeros(*rows, head_dim_v)
        return cls(zero + NO_KEY_YET, zero, empty, empty, 0)

    def rescaled(self, reference: torch.Tensor) -> _Rows:
        factor = torch.exp2(self.reference - reference)
        return self._replace(
            reference=reference,
            row_sum=self.row_sum * factor,
            acc_O=self.acc_O * factor,
            flushed=self.flushed * factor,
        )

    def visited(self, exponents: torch.Tensor, v: torch.Tensor, lazy: torch.Tensor, config: ForwardConfig) -> _Rows:
        """Add one key block; rows that are ``lazy`` keep their reference unless some P is too large for e4m3."""
        offset = OFFSET[config.softmax]
        top = exponents.amax(-1, keepdim=True)
        moved = torch.maximum(self.reference, top - offset)
        kept = torch.exp2(top - self.reference) < MOVE_FROM
        state = self.rescaled(torch.where(lazy & kept, self.reference, moved))
        p = torch.exp2(exponents - state.reference)
        p8 = to_fp8(p, E4M3).float()  # whatever v is
        row_sum = state.row_sum + p.sum(-1, keepdim=True)
        if config.two_level_columns:
            return state._replace(row_sum=row_sum, acc_O=state.acc_O + _tensor_core(p8, v))
        acc_O, num_blocks = _tensor_core(p8, v, state.acc_O), state.num_blocks + 1
        if num_blocks == config.flush_blocks:
            acc_O, num_blocks, flushed = torch.zeros_like(acc_O), 0, state.flushed + acc_O
            state = state._replace(flushed=flushed)
        return state._replace(row_sum=row_sum, acc_O=acc_O, num_blocks=num_blocks)


def _tensor_core(a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor | None = None) -> torch.Tensor:
    """``a @ b`` (+ acc) as FP8 WGMMAs add up: 32 products at a time, cut to the bits of the larger addend."""
    result = torch.zeros(*a.shape[:-1], b.shape[-1]) if acc is None else acc
    for k in range(0, a.shape[-1], WGMMA_K):
        addend = a[..., k : k + WGMMA_K] @ b[..., k : k + WGMMA_K, :]
        largest = torch.maximum(result.abs(), addend.abs()).clamp_min(2.0**-100)
        unit = torch.exp2(torch.floor(torch.log2(largest)) - ACCUMULATOR_BITS)
        result = (torch.trunc(result / unit) + torch.trunc(addend / unit)) * unit
    return result
