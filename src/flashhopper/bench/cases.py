"""The cases of ``flashhopper bench varlen`` and ``bench masks``: what is attended to, and how much work that is."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flashhopper.bench.grid import WIDTH
from flashhopper.config import Dtype
from flashhopper.reference import visible_keys

TOKENS = 32768  # of a ragged batch
LONGEST = 8192
MASKED_SEQLEN = 16384
CASE_HEAD_DIMS = (64, 128)
CHECK_LENGTHS = (513, 1, 300, 64)
CHECK_SEQLEN = 1024
CHECK_WINDOW = 200  # sides of a window on the small shape: it must hide something


@dataclass(frozen=True)
class Case:
    """Self-attention of sequences of these lengths, ``h`` heads of ``d``; ``ragged`` ones share one tensor."""

    name: str
    dtype: Dtype
    d: int
    lengths: tuple[int, ...]
    ragged: bool = False
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sink: bool = False

    @property
    def h(self) -> int:
        return max(1, WIDTH // self.d)

    @property
    def masks(self) -> dict[str, Any]:
        return {"causal": self.causal, "window_size": self.window_size}

    @property
    def pairs(self) -> int:
        """Query-key pairs that a mask leaves visible, of one head."""
        counted = {length: _visible_pairs(length, self.causal, self.window_size) for length in set(self.lengths)}
        return sum(counted[length] for length in self.lengths)

    @property
    def flop(self) -> float:
        """Floating-point operations of Q·Kᵀ and P·V on visible pairs; the softmax is not counted."""
        return 4.0 * self.pairs * self.h * self.d

    def tflops(self, milliseconds: float) -> float:
        return self.flop / (milliseconds * 1e9)

    def small(self) -> Case:
        """The shape on which implementations are checked, with the same features."""
        lengths = CHECK_LENGTHS if self.ragged else (CHECK_SEQLEN,) * 2
        left, right = (min(side, CHECK_WINDOW) for side in self.window_size)
        return dataclasses.replace(self, lengths=lengths, window_size=(left, right))

    def dense(self) -> Case:
        """A dense batch of about as many tokens and visible pairs: its length is the mean that a token's row sees."""
        tokens = sum(self.lengths)
        length = max(128, round(sum(n * n for n in self.lengths) / tokens / 128) * 128)
        lengths = (length,) * max(1, round(tokens / length))
        return dataclasses.replace(self, lengths=lengths, ragged=False)

    def to_json(self) -> dict[str, Any]:
        lengths = {"sequences": len(self.lengths), "tokens": sum(self.lengths), "longest": max(self.lengths)}
        features = {"causal": self.causal, "window_size": list(self.window_size), "softcap": self.softcap}
        return {
            "case": self.name,
            "dtype": self.dtype,
            "d": self.d,
            "h": self.h,
            **lengths,
            **features,
            "sink": self.sink,
        }

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} d{self.d}"


def _visible_pairs(seqlen: int, causal: bool, window_size: tuple[int, int]) -> int:
    visible = visible_keys(seqlen, seqlen, causal=causal, window_size=window_size)
    return int((visible.ends.clamp(0, seqlen) - visible.starts.clamp(0, seqlen)).clamp_min(0).sum())


def mixes(seed: int = 0) -> dict[str, tuple[int, ...]]:
    """Lengths of ragged batches of 32k tokens, the same in every run: the cells of two runs can be compared."""
    shuffle = random.Random(seed)
    uniform = _filled(shuffle.randint(1, LONGEST // 2) for _ in range(TOKENS))
    zipf = _filled(max(16, LONGEST // rank) for rank in range(1, TOKENS))
    return {
        "equal": (2048,) * (TOKENS // 2048),
        "uniform": uniform,
        "zipf": tuple(shuffle.sample(zipf, len(zipf))),
        "one long": (*(128,) * 64, TOKENS // 2, *(128,) * 64),
    }


def _filled(lengths: Iterable[int]) -> tuple[int, ...]:
    """The first of ``lengths`` that fill the batch, the last one cut."""
    taken: list[int] = []
    left = TOKENS
    for length in lengths:
        taken.append(min(length, left))
        left -= taken[-1]
        if left == 0:
            break
    return tuple(taken)


def varlen_cases(dtype: Dtype, head_dims: Iterable[int] = CASE_HEAD_DIMS) -> list[Case]:
    return [
        Case(f"{name}, {'causal' if causal else 'full'}", dtype, d, lengths, ragged=True, causal=causal)
        for d in head_dims
        for causal in (False, True)
        for name, lengths in mixes().items()
    ]


def mask_cases(dtype: Dtype, head_dims: Iterable[int] = CASE_HEAD_DIMS) -> list[Case]:
    """16k tokens in one sequence: windows of today's models, softcap and sinks with and without them."""
    features: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "window 128": {"window_size": (128, 0)},
        "window 1k": {"window_size": (1024, 0)},
        "window 4k": {"window_size": (4096, 0)},
        "window 512 to both sides": {"window_size": (512, 512)},
        "softcap": {"softcap": 50.0, "causal": True},
        "softcap, window 4k": {"softcap": 50.0, "window_size": (4096, 0)},
        "sink": {"sink": True, "causal": True},
        "sink, window 128": {"sink": True, "window_size": (128, 0)},
    }
    return [Case(name, dtype, d, (MASKED_SEQLEN,), **chosen) for d in head_dims for name, chosen in features.items()]


CASES = {"varlen": varlen_cases, "masks": mask_cases}
