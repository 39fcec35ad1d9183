"""Ragged batches as the tests describe them: lengths that the host knows, and the tensors that say the same."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import NamedTuple

import torch

I32 = torch.int32


def cu(*values: int, dtype: torch.dtype = I32, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


class Side(NamedTuple):
    """Lengths of the sequences on one side, how many rows of each count, and rows after the last one."""

    owned: list[int]
    used: list[int] | None = None
    outside: int = 0

    @property
    def total(self) -> int:
        return sum(self.owned) + self.outside

    @property
    def counted(self) -> list[int]:
        return self.owned if self.used is None else self.used

    @property
    def longest(self) -> int:
        return max(self.counted, default=0)

    def cu_seqlens(self, device: str = "cpu") -> torch.Tensor:
        return torch.tensor([0, *accumulate(self.owned)], dtype=I32, device=device)

    def seqused(self, device: str = "cpu") -> torch.Tensor | None:
        return None if self.used is None else torch.tensor(self.used, dtype=I32, device=device)

    @property
    def slices(self) -> list[slice]:
        """The used rows of each sequence."""
        starts = accumulate(self.owned, initial=0)
        return [slice(start, start + used) for start, used in zip(starts, self.counted, strict=False)]

    @property
    def unused(self) -> torch.Tensor:
        """Whether a row counts for nothing, ``(total,)``, on the CPU."""
        unused = torch.ones(self.total, dtype=torch.bool)
        for rows in self.slices:
            unused[rows] = False
        return unused


class Batch(NamedTuple):
    """Both sides; ``slack`` is by how much ``max_seqlen_q`` and ``max_seqlen_k`` exceed the longest sequences."""

    q: Side
    k: Side
    slack: int = 0

    def arguments(self, device: str = "cpu") -> dict[str, int | torch.Tensor | None]:
        """Those of ``flash_attn_varlen_func``."""
        return {
            "cu_seqlens_q": self.q.cu_seqlens(device),
            "cu_seqlens_k": self.k.cu_seqlens(device),
            "max_seqlen_q": self.q.longest + self.slack,
            "max_seqlen_k": self.k.longest + self.slack,
            "seqused_q": self.q.seqused(device),
            "seqused_k": self.k.seqused(device),
        }


SHORT = [random.Random(7).randint(0, 40) for _ in range(100)]
AROUND_TILES = [127, 128, 129, 64, 65, 1, 192, 176]
BATCHES: dict[str, Batch] = {
    "equal": Batch(Side([300, 300]), Side([300, 300])),
    "last alone": Batch(Side([0, 0, 1023]), Side([0, 1, 2045])),
    "no queries, keys": Batch(Side([0, 5, 0]), Side([300, 200, 77])),
    "queries, no keys": Batch(Side([300, 200, 77]), Side([0, 5, 0])),
    "no keys at all": Batch(Side([130, 70]), Side([0, 0])),
    "one long, many short": Batch(Side([1, 3000, 3, 0, 257, 64, 2]), Side([700, 2500, 1, 90, 257, 0, 2])),
    "many short": Batch(Side(SHORT), Side(SHORT[::-1])),
    "around tiles": Batch(Side(AROUND_TILES), Side(AROUND_TILES[::-1])),
    "more queries than keys": Batch(Side([400, 300]), Side([150, 20])),
    "rows outside": Batch(Side([100, 200], outside=300), Side([150, 90], outside=170)),
    "bounds of no sequence": Batch(Side([100, 50, 200]), Side([150, 90, 10]), slack=5000),
    "used": Batch(Side([300, 200, 64], used=[130, 0, 64], outside=5), Side([400, 90, 70], used=[129, 90, 0])),
}
