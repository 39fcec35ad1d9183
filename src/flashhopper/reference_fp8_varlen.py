"""The FP8 quantiser in plain PyTorch, of ragged batches too: :mod:`flashhopper.reference_fp8`, sequence by sequence.

Every sequence has blocks of its own, as if each of them began with a new one: see :func:`own_block`. What belongs to no
used row is 0, with scale 1.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from flashhopper import reference_fp8
from flashhopper.config import ScaleKind
from flashhopper.problem import MAX_EXTENT
from flashhopper.reference_fp8 import E4M3, VALUE_KEYS, Operands
from flashhopper.reference_varlen import Lengths


class Sequences(NamedTuple):
    """One side of a ragged batch, as :func:`flashhopper.flash_attn_varlen_func` takes it."""

    side: Literal["q", "k"]
    cu_seqlens: torch.Tensor
    seqused: torch.Tensor | None

    @property
    def batch(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    def spans(self, total: int) -> list[tuple[int, int]]:
        """First row and number of used rows of each sequence; ValueError for what does not fit ``total`` rows."""
        lengths = Lengths.read(self.side, total, MAX_EXTENT, self.cu_seqlens, self.seqused)
        return list(zip(self.cu_seqlens.tolist(), lengths.used, strict=False))


def num_blocks(total: int, batch: int, rows: int) -> int:
    """Blocks of ``rows`` rows that a ragged batch has at most, and has room for."""
    return total // rows + batch


def own_block(start: int, sequence: int, rows: int) -> int:
    """The first block of a sequence that begins at row ``start``."""
    return start // rows + sequence


def quantize_rows(
    x: torch.Tensor,
    rows: int,
    kind: ScaleKind,
    hadamard_seed: int | None,
    sequences: Sequences | None = None,
    dtype: torch.dtype = E4M3,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Q or K ``(total, h, d)`` as FP8 of that shape, and scales fp32 ``(h, total // rows + batch)``. Without
    ``sequences`` all is as in :func:`flashhopper.reference_fp8.quantize_rows`, and so below."""
    if sequences is None:
        return reference_fp8.quantize_rows(x, rows, kind, hadamard_seed, dtype)
    total, heads, _ = x.shape
    data = torch.zeros(x.shape, dtype=torch.uint8)
    scale = torch.ones(heads, num_blocks(total, sequences.batch, rows))
    for i, (start, used) in enumerate(sequences.spans(total)):
        alone = x[None, start : start + used]
        part, scales = reference_fp8.quantize_rows(alone, rows, kind, hadamard_seed, dtype)
        data[start : start + used] = part[0].view(torch.uint8)
        first = own_block(start, i, rows)
        scale[:, first : first + scales.shape[2]] = scales[0]
    return data.view(dtype), scale


def quantize_values(
    v: torch.Tensor,
    kind: ScaleKind,
    center: bool,
    sequences: Sequences | None = None,
    dtype: torch.dtype = E4M3,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """V ``(total, h, d)`` as FP8 ``(h, d, slots)`` with scale and mean of each sequence, fp32 ``(batch, h, d)``."""
    if sequences is None:
        return reference_fp8.quantize_values(v, kind, center, dtype)
    total, heads, head_dim = v.shape
    data = torch.zeros(heads, head_dim, _num_slots(total, sequences.batch), dtype=torch.uint8)
    scale, mean = torch.ones(sequences.batch, heads, head_dim), torch.zeros(sequences.batch, heads, head_dim)
    for i, (start, used) in enumerate(sequences.spans(total)):
        part, scale[i : i + 1], mean[i : i + 1] = reference_fp8.quantize_values(
            v[None, start : start + used], kind, center, dtype
        )
        _place(data, part, start, i)
    return data.view(dtype), scale, mean


def transpose_values(data: torch.Tensor, sequences: Sequences | None = None) -> torch.Tensor:
    """FP8 ``(total, h, d)`` as ``(h, d, slots)``."""
    if sequences is None:
        return reference_fp8.transpose_values(data)
    total, heads, head_dim = data.shape
    slots = torch.zeros(heads, head_dim, _num_slots(total, sequences.batch), dtype=torch.uint8)
    for i, (start, used) in enumerate(sequences.spans(total)):
        _place(slots, reference_fp8.transpose_values(data[None, start : start + used]), start, i)
    return slots.view(data.dtype)


def _num_slots(total: int, batch: int) -> int:
    return num_blocks(total, batch, VALUE_KEYS) * VALUE_KEYS


def _place(slots: torch.Tensor, part: torch.Tensor, start: int, sequence: int) -> None:
    first = own_block(start, sequence, VALUE_KEYS) * VALUE_KEYS
    slots[..., first : first + part.shape[-1]] = part[0].view(torch.uint8)


def rows_of_scales(scale: torch.Tensor, rows: int, total: int, sequences: Sequences) -> torch.Tensor:
    """Scales ``(h, blocks)`` as ``(total, h, 1)``, 1 for rows that are not used."""
    result = torch.ones(total, scale.shape[0], 1, device=scale.device)
    for i, (start, used) in enumerate(sequences.spans(total)):
        block = own_block(start, i, rows) + torch.arange(used, device=scale.device) // rows
        result[start : start + used] = scale[:, block].t()[..., None]
    return result


def restore_values(
    data: torch.Tensor, scale: torch.Tensor, mean: torch.Tensor, total: int, sequences: Sequences
) -> torch.Tensor:
    """What V's slots ``(h, d, slots)`` stand for: fp32 ``(total, h, d)``, 0 for rows that are not used."""
    result = torch.zeros(total, *data.shape[:2], device=data.device)
    for i, (start, used) in enumerate(sequences.spans(total)):
        first = own_block(start, i, VALUE_KEYS) * VALUE_KEYS
        slots = data[None, ..., first : first + -(-used // VALUE_KEYS) * VALUE_KEYS]
        result[start : start + used] = reference_fp8.restore_values(slots, used)[0].float() * scale[i] + mean[i]
    return result


def dequantized(
    operands: Operands, q_sequences: Sequences, k_sequences: Sequences
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:meth:`Operands.dequantized` of a ragged batch, ``(total, h, d)`` each."""
    q = operands.q.float() * rows_of_scales(operands.q_scale, operands.q_rows, operands.q.shape[0], q_sequences)
    k = operands.k.float() * rows_of_scales(operands.k_scale, operands.k_rows, operands.k.shape[0], k_sequences)
    return q, k, restore_values(operands.v, operands.v_scale, operands.v_mean, operands.k.shape[0], k_sequences)
