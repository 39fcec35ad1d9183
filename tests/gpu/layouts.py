"""Ways to lay q, k and v out in memory, which the kernels have to read as they are or copy."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from checks import BF16, Shape, Tensors, random_inputs

Cut = Callable[[Shape], Tensors]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(BF16)


def heads_first(shape: Shape) -> Tensors:
    q, k, v = (normal(b, h, s, d).transpose(1, 2) for b, s, h, d in shape.tensors)
    return q, k, v


def sequence_first(shape: Shape) -> Tensors:
    q, k, v = (normal(s, b, h, d).transpose(0, 1) for b, s, h, d in shape.tensors)
    return q, k, v


def packed_qkv(shape: Shape) -> Tensors:
    packed = normal(shape.batch, shape.seqlen_q, shape.heads + 2 * shape.heads_k, shape.head_dim)
    q, k, v = packed.split((shape.heads, shape.heads_k, shape.heads_k), dim=2)
    return q, k, v


def packed_in_head_dim(shape: Shape) -> Tensors:
    d = shape.head_dim
    packed = normal(shape.batch, shape.seqlen_k, shape.heads_k, 2 * d + shape.head_dim_v)
    return normal(*shape.tensors[0]), packed[..., d : 2 * d], packed[..., 2 * d :]


def one_batch_expanded(shape: Shape) -> Tensors:
    q, k, v = (normal(1, s, h, d).expand(b, s, h, d) for b, s, h, d in shape.tensors)
    return q, k, v


def one_head_expanded(shape: Shape) -> Tensors:
    q, k, v = (normal(b, s, 1, d).expand(b, s, h, d) for b, s, h, d in shape.tensors)
    return q, k, v


def one_row_expanded(shape: Shape) -> Tensors:
    q, k, v = (normal(b, 1, h, d).expand(b, s, h, d) for b, s, h, d in shape.tensors)
    return q, k, v


def every_other(shape: Shape) -> Tensors:
    q, k, v = (normal(2 * b, 3 * s, 2 * h, d)[::2, ::3, 1::2] for b, s, h, d in shape.tensors)
    return q, k, v


def overlapping_rows(shape: Shape) -> Tensors:
    """Row i starts 8 elements after row i - 1: windows that slide over one signal."""
    cut = []
    for b, s, h, d in shape.tensors:
        signal = normal(b, h, 8 * s + d)
        cut.append(signal.as_strided((b, s, h, d), (signal.stride(0), 8, signal.stride(1), 1)))
    q, k, v = cut
    return q, k, v


def odd_base_address(shape: Shape) -> Tensors:
    cut = []
    for offset, size in enumerate(shape.tensors, start=1):
        cut.append(normal(math.prod(size) + 8)[offset : offset + math.prod(size)].view(size))
    q, k, v = cut
    return q, k, v


def odd_row_stride(shape: Shape) -> Tensors:
    q, k, v = (normal(b, s, h, d + 1)[..., :d] for b, s, h, d in shape.tensors)
    return q, k, v


def odd_batch_stride(shape: Shape) -> Tensors:
    cut = []
    for b, s, h, d in shape.tensors:
        cut.append(normal(b * (s * h * d + 3)).as_strided((b, s, h, d), (s * h * d + 3, h * d, d, 1)))
    q, k, v = cut
    return q, k, v


def only_v_is_odd(shape: Shape) -> Tensors:
    q, k, _ = random_inputs(shape)
    return q, k, odd_row_stride(shape)[2]


CUTS: list[Cut] = [
    heads_first,
    sequence_first,
    packed_qkv,
    packed_in_head_dim,
    one_batch_expanded,
    one_head_expanded,
    one_row_expanded,
    every_other,
    overlapping_rows,
    odd_base_address,
    odd_row_stride,
    odd_batch_stride,
    only_v_is_odd,
]


def fitted(shape: Shape, cut: Cut) -> Shape:
    """The shape, with equal lengths where the layout asks for them."""
    return shape._replace(seqlen_k=shape.seqlen_q) if cut is packed_qkv else shape
