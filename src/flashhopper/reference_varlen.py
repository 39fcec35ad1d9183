"""The reference for ragged batches: one call of :mod:`flashhopper.reference` for each sequence."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from flashhopper import reference
from flashhopper.mod_call import Mods
from flashhopper.problem import RaggedTensors


class Lengths(NamedTuple):
    """Of one side of a ragged batch, as host numbers: of each sequence the rows it owns and how many of them count."""

    owned: list[int]
    used: list[int]
    outside: int
    """Rows after the last sequence."""

    @classmethod
    def read(
        cls, side: str, total: int, max_seqlen: int, cu_seqlens: torch.Tensor, seqused: torch.Tensor | None
    ) -> Lengths:
        """From valid tensors, of ``side`` "q" or "k"; ValueError if what is in them does not fit ``total`` rows."""
        starts = cu_seqlens.tolist()
        owned = [stop - start for start, stop in pairwise(starts)]
        used = owned if seqused is None else seqused.tolist()
        if starts[0] != 0:
            raise ValueError(f"cu_seqlens_{side} begins with {starts[0]}; it must begin with 0")
        for i, (rows, count) in enumerate(zip(owned, used, strict=True)):
            if rows < 0:
                raise ValueError(f"cu_seqlens_{side} falls from {starts[i]} to {starts[i + 1]}; it must never fall")
            if not 0 <= count <= rows:
                raise ValueError(f"seqused_{side}[{i}] is {count}; accepted are 0 to the sequence's length, {rows}")
            if count > max_seqlen:
                raise ValueError(f"max_seqlen_{side} is {max_seqlen}, but sequence {i} has length {count}")
        if starts[-1] > total:
            raise ValueError(f"cu_seqlens_{side} ends with {starts[-1]}; there are {total} rows")
        return cls(owned, used, total - starts[-1])

    def split(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The used rows of each sequence, then those outside. One operation to autograd: gaps get gradients of 0."""
        sizes = [size for rows, count in zip(self.owned, self.used, strict=True) for size in (count, rows - count)]
        parts = x.split([*sizes, self.outside])
        return [*parts[:-1:2], parts[-1]]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ragged: RaggedTensors,
    *,
    learnable_sink: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    mods: Mods | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`flashhopper.reference.attention` of each sequence, differentiable; the lengths are read and checked.

    q ``(total_q, h, d)``, k ``(total_k, hk, d)``, v ``(total_k, hk, dv)``; returns out ``(total_q, h, dv)`` and LSE
    ``(h, total_q)``. Masks are aligned to the used lengths. Rows past ``seqused_q`` or outside any sequence have out 0
    and LSE -inf, with a sink too; nothing is read past ``seqused_k``. ``options``: as there.
    """
    q_lengths = Lengths.read("q", q.shape[0], ragged.max_seqlen_q, ragged.cu_seqlens_q, ragged.seqused_q)
    k_lengths = Lengths.read("k", k.shape[0], ragged.max_seqlen_k, ragged.cu_seqlens_k, ragged.seqused_k)
    options["learnable_sink"] = learnable_sink
    *q_parts, q_outside = q_lengths.split(q)
    *k_parts, k_outside = k_lengths.split(k)
    *v_parts, v_outside = k_lengths.split(v)
    outs, lses = [], []
    unused = [rows - count for rows, count in zip(q_lengths.owned, q_lengths.used, strict=True)]
    per_sequence = alibi_slopes is not None and alibi_slopes.dim() == 2
    for i, (rest, *parts) in enumerate(zip(unused, q_parts, k_parts, v_parts, strict=True)):
        slopes = alibi_slopes[i] if per_sequence and alibi_slopes is not None else alibi_slopes
        given: dict[str, Any] = options | {"alibi_slopes": slopes, "mods": mods, "first_batch": i}
        out, lse = reference.attention(*(x[None] for x in parts), **given)
        outs += [out[0], out.new_zeros(rest, *out.shape[2:])]
        lses += [lse[0], lse.new_full((lse.shape[1], rest), -math.inf)]
    # Also without any row: so the result depends on q, k, v and the sink for autograd, however few sequences there are.
    out, lse = reference.attention(q_outside[None], k_outside[None, :0], v_outside[None, :0], **options)
    outs.append(out[0])
    lses.append(lse[0].masked_fill(torch.ones_like(lse[0], dtype=torch.bool), -math.inf))
    return torch.cat(outs), torch.cat(lses, dim=1)
