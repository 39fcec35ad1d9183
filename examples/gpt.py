"""A small GPT over bytes: RMSNorm, rotary positions, attention by whichever function it is given, tied embedding.

Beside the model are the attention functions that ``train_gpt.py`` compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashhopper import flash_attn_func

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Causal (q, k, v) -> out, all of them (batch, seqlen, heads or heads_k, head_dim)."""

BYTES = 256
ROTARY_BASE = 10_000.0


def flash_attention(deterministic: bool = False) -> Attention:
    return lambda q, k, v: flash_attn_func(q, k, v, causal=True, deterministic=deterministic)


def math_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's attention written out as matrix products and a softmax, in the shapes of ``flash_attn_func``."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def rounded_attention(generator: torch.Generator) -> Attention:
    """``math_attention`` with a rounding more on every tensor that enters or leaves it, forward and backward.

    That is what another correct implementation does, by another order of summation or a tensor rounded on the way, and
    hence the measure of differences that mean nothing.
    """

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (Jitter.apply(x, generator) for x in (q, k, v))
        out: torch.Tensor = Jitter.apply(math_attention(q, k, v), generator)
        return out

    return attention


class Jitter(torch.autograd.Function):
    """Moves each element, and each element of its gradient, at random by up to the dtype's epsilon."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        ctx.generator = generator
        return jittered(x, generator)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return jittered(grad_outputs[0], ctx.generator), None


def jittered(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """x · (1 + u · eps) with u uniform in [-1, 1), computed in fp64 and rounded to x's dtype."""
    u = torch.rand(x.shape, generator=generator, device=x.device, dtype=torch.float64) * 2 - 1
    return (x.double() * (1 + u * torch.finfo(x.dtype).eps)).to(x.dtype)


@dataclass(frozen=True)
class ModelConfig:
    layers: int
    heads: int
    heads_k: int
    head_dim: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = (config.heads, config.heads_k)
        width, width_k = config.width, config.heads_k * config.head_dim
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width_k, bias=False)
        self.value = nn.Linear(width, width_k, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attention: Attention) -> torch.Tensor:
        heads, heads_k = self.heads
        normed = self.attention_norm(x)
        q = rotate(self.query(normed).unflatten(-1, (heads, -1)), *rotary)
        k = rotate(self.key(normed).unflatten(-1, (heads_k, -1)), *rotary)
        v = self.value(normed).unflatten(-1, (heads_k, -1))
        x = x + self.attention_out(attention(q, k, v).flatten(-2))
        out: torch.Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return out


class GPT(nn.Module):
    """Bytes ``(batch, seqlen)`` to logits of the next byte ``(batch, seqlen, 256)``."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.embedding = nn.Embedding(BYTES, config.width)  # also the output projection
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                std = weight.shape[1] ** -0.5
                if name.endswith("_out.weight"):
                    std *= (2 * config.layers) ** -0.5  # so that the residual stream does not grow with depth
                nn.init.normal_(weight, std=std, generator=generator)

    def forward(self, tokens: torch.Tensor, attention: Attention) -> torch.Tensor:
        x = self.embedding(tokens) * self.embedding.embedding_dim**0.5  # as large as what the blocks add
        rotary = rotary_angles(tokens.shape[1], self.head_dim, like=x)
        for block in self.blocks:
            x = block(x, rotary, attention)
        return F.linear(self.norm(x), self.embedding.weight)


def rotary_angles(seqlen: int, head_dim: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines ``(seqlen, 1, head_dim / 2)``."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, device=like.device, dtype=like.dtype) / head_dim)
    angles = torch.arange(seqlen, device=like.device, dtype=like.dtype)[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al. 2021): turn component i and i + head_dim / 2 together. Rounded once, to x's dtype."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)
