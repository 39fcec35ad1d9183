"""The benchmark's cells: shapes of a constant amount of tokens and of model width, and what a cell's work is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

TOKENS = 16384  # batch · seqlen; a longer sequence runs alone
WIDTH = 2048  # heads · head_dim
HEAD_DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
QUICK_SEQLENS = (2048, 16384)
PEAK_TFLOPS = 989.0  # dense bf16 and fp16 of H100 SXM and H200, NVIDIA's data sheet
HEADLINE_HEAD_DIM = 128
HEADLINE_SEQLENS = (8192, 16384, 32768)

Dtype = Literal["bfloat16", "float16"]
MASKS = {"full": (False,), "causal": (True,), "both": (False, True)}


@dataclass(frozen=True)
class Cell:
    """One shape: self-attention of ``b`` sequences of ``s`` tokens, ``h`` heads of ``d``; of ``dv`` in v, if not 0."""

    dtype: Dtype
    d: int
    causal: bool
    s: int
    b: int
    h: int
    dv: int = 0

    @classmethod
    def of(cls, dtype: Dtype, d: int, causal: bool, s: int, dv: int = 0) -> Cell:
        """The grid's cell: ``b·s`` = 16k tokens (32k at s = 32k) and ``h·d`` = 2048."""
        return cls(dtype, d, causal, s, max(1, TOKENS // s), max(1, WIDTH // d), 0 if dv == d else dv)

    @property
    def head_dim_v(self) -> int:
        return self.dv or self.d

    @property
    def head_dims(self) -> str:
        return f"d{self.d}x{self.dv}" if self.dv else f"d{self.d}"

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def flop(self) -> float:
        """Floating-point operations of Q·Kᵀ and P·V: the softmax is not counted, a causal mask counts half."""
        return 2.0 * self.b * self.h * self.s * self.s * (self.d + self.head_dim_v) / (2 if self.causal else 1)

    def tflops(self, milliseconds: float) -> float:
        return self.flop / (milliseconds * 1e9)

    @property
    def is_headline(self) -> bool:
        return self.d == HEADLINE_HEAD_DIM and self.s in HEADLINE_SEQLENS

    def __str__(self) -> str:
        return f"{self.dtype} {self.head_dims} {self.mask} s={self.s} b={self.b} h={self.h}"


def grid(dtype: Dtype, head_dims: Iterable[int], masks: Iterable[bool], seqlens: Iterable[int]) -> list[Cell]:
    """Every combination, in the order in which tables and plots show them."""
    lengths = list(seqlens)
    masks = list(masks)
    return [Cell.of(dtype, d, causal, s) for d in head_dims for causal in masks for s in lengths]


def short_seqlen(s: int) -> str:
    """``512``, ``1k``, ``16k``."""
    return f"{s // 1024}k" if s % 1024 == 0 else str(s)
