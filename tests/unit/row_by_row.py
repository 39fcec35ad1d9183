"""Attention from its definition, one query of one head at a time: what the tests of the reference compare with."""

from __future__ import annotations

import math
from typing import Any

import torch

F64 = torch.float64


def sees(i: int, j: int, seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int], chunk: int) -> bool:
    """Whether query i sees key j, from the definition."""
    position = i + seqlen_k - seqlen_q
    left, right = window
    return (
        (not causal or j <= position)
        and (left < 0 or j >= position - left)
        and (right < 0 or j <= position + right)
        and (chunk == 0 or math.floor(j / chunk) == math.floor(position / chunk))
    )


def row_by_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and LSE, one row of one head at a time; ``alibi_slopes`` may be ``(heads,)`` or ``(batch, heads)``."""
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, ratio = k.shape[1], heads // k.shape[2]
    causal, window = options.get("causal", False), options.get("window_size", (-1, -1))
    chunk, softcap = options.get("attention_chunk", 0), options.get("softcap", 0.0)
    slopes = options.get("alibi_slopes", torch.zeros(heads)).double().expand(batch, heads)
    out = torch.zeros(batch, seqlen_q, heads, v.shape[3], dtype=F64)
    lse = torch.full((batch, heads, seqlen_q), -math.inf, dtype=F64)
    for b in range(batch):
        for h in range(heads):
            for i in range(seqlen_q):
                keys = [j for j in range(seqlen_k) if sees(i, j, seqlen_q, seqlen_k, causal, window, chunk)]
                scores = k[b, keys, h // ratio] @ q[b, i, h] / head_dim**0.5
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                scores = scores - slopes[b, h] * (torch.tensor(keys) - (i + seqlen_k - seqlen_q)).abs()
                extra = scores if sink is None else torch.cat((scores, sink[h : h + 1]))
                if len(extra):
                    lse[b, h, i] = torch.logsumexp(extra, 0)
                if keys:
                    out[b, i, h] = torch.exp(scores - lse[b, h, i]) @ v[b, keys, h // ratio]
    return out, lse
