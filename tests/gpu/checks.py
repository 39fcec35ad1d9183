"""Inputs, launches and comparisons that the GPU tests share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
from tolerance import assert_close_to_reference, assert_lse_close

from flashhopper import current, flash_attn_func, launch
from flashhopper.config import ForwardConfig
from flashhopper.options import AttentionOptions
from flashhopper.reference import attention

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Result = tuple[torch.Tensor, torch.Tensor]

BF16, FP16 = torch.bfloat16, torch.float16
TORCH_DTYPES = {"bfloat16": BF16, "float16": FP16}
FENCE = 1024  # elements of NaN on either side of each output


class Shape(NamedTuple):
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_k: int
    head_dim: int
    head_dim_v: int

    @property
    def tensors(self) -> tuple[tuple[int, int, int, int], ...]:
        """The shapes of q, k and v."""
        b, sq, sk, h, hk, d, dv = self
        return (b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv)


def random_inputs(shape: Shape, dtype: torch.dtype = BF16, size: float = 1.0) -> Tensors:
    """q, k and v of normal values, contiguous."""
    q, k, v = ((size * torch.randn(s, device="cuda")).to(dtype) for s in shape.tensors)
    return q, k, v


def guarded_inputs(shape: Shape, dtype: torch.dtype = BF16) -> Tensors:
    """As :func:`random_inputs`, cut out of larger buffers that are NaN everywhere else, in every dimension."""
    guarded = []
    for tensor in random_inputs(shape, dtype):
        b, s, h, d = tensor.shape
        buffer = tensor.new_full((b + 2, s + 512, h + 2, d + 16), math.nan)
        inside = buffer[1 : 1 + b, 256 : 256 + s, 1 : 1 + h, 8 : 8 + d]
        guarded.append(inside.copy_(tensor))
    q, k, v = guarded
    return q, k, v


def dense(tensors: Tensors) -> Tensors:
    """Contiguous copies."""
    q, k, v = (x.clone(memory_format=torch.contiguous_format) for x in tensors)
    return q, k, v


@contextmanager
def poisoned_outputs(launches: int = 1) -> Iterator[None]:
    """Outputs of the launches inside are NaN until a kernel writes them, and lie between fences that nobody may touch.

    ``launches``: how many calls will take an output and an LSE from ``current.empty_strided``.
    """
    buffers: list[torch.Tensor] = []

    def poisoned_empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        buffer = torch.full((math.prod(shape) + 2 * FENCE,), math.nan, dtype=dtype, device="cuda")
        buffers.append(buffer)
        inside = buffer[FENCE:-FENCE].view(shape)
        assert inside.stride() == strides
        return inside

    with mock.patch.object(current, "empty_strided", poisoned_empty):
        yield
    assert len(buffers) == 2 * launches, "launch.py takes its outputs from elsewhere: they were not poisoned"
    for buffer in buffers:
        written = int((~buffer[:FENCE].isnan()).sum()) + int((~buffer[-FENCE:].isnan()).sum())
        assert written == 0, f"{written} elements next to an output of {buffer.numel() - 2 * FENCE} were written"


def run(
    tensors: Tensors,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    sm_margin: int = 0,
    config: ForwardConfig | None = None,
) -> Result:
    """Out and LSE of the public function or, with ``config``, of that configuration; outputs poisoned."""
    empty = 0 in tensors[0].shape[:2] or tensors[1].shape[1] == 0
    with poisoned_outputs(launches=0 if empty else 1):
        if config is None:
            result: Result = flash_attn_func(
                *tensors, softmax_scale=softmax_scale, causal=causal, sm_margin=sm_margin, return_lse=True
            )
            return result
        options = AttentionOptions(softmax_scale=softmax_scale, causal=causal, sm_margin=sm_margin)
        return launch.forward(*tensors, options, config=config)


def redone_tiles() -> int:
    return launch.redone_tiles(torch.cuda.current_device())


def scale_of(q: torch.Tensor, softmax_scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale


def check(
    tensors: Tensors,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    sm_margin: int = 0,
    config: ForwardConfig | None = None,
    redone: int | None = 0,
) -> Result:
    """Run, and compare with fp32 by the numerics contract. ``redone``: tiles that the lazy softmax must redo."""
    q, k, v = tensors
    print(f"q {tuple(q.shape)} k {tuple(k.shape)} v {tuple(v.shape)} {q.dtype} causal={causal} scale={softmax_scale}")
    before = redone_tiles()
    out, lse = run(tensors, causal=causal, softmax_scale=softmax_scale, sm_margin=sm_margin, config=config)
    if redone is not None:
        assert redone_tiles() - before == redone
    compare(tensors, (out, lse), causal=causal, softmax_scale=softmax_scale)
    return out, lse


def compare(tensors: Tensors, result: Result, *, causal: bool = False, softmax_scale: float | None = None) -> None:
    """A result against fp32, by the numerics contract; rows that see no key are exactly 0."""
    q, k, v = tensors
    out, lse = result
    assert out.dtype == q.dtype
    assert out.is_contiguous()
    assert lse.is_contiguous()
    scale = scale_of(q, softmax_scale)
    ref, ref_lse = attention(q.float(), k.float(), v.float(), softmax_scale=scale, causal=causal)
    low, _ = attention(q, k, v, softmax_scale=scale, causal=causal, compute_dtype=q.dtype)
    assert_close_to_reference(out, ref, low)
    assert_lse_close(lse, ref_lse)
    assert out.transpose(1, 2)[ref_lse == -math.inf].count_nonzero() == 0


def assert_same_bits(result: Result, expected: Result) -> None:
    """Bitwise equal outputs; the same NaN counts as equal."""
    assert count_differing_bits(result, expected).tolist() == [0, 0]


def count_differing_bits(result: Result, expected: Result) -> torch.Tensor:
    """How many elements of out and of LSE differ in any bit, without a host synchronisation."""
    (out, lse), (expected_out, expected_lse) = result, expected
    assert (out.shape, lse.shape) == (expected_out.shape, expected_lse.shape)
    out_differs = out.view(torch.int16) != expected_out.view(torch.int16)
    lse_differs = lse.view(torch.int32) != expected_lse.view(torch.int32)
    return torch.stack((out_differs.sum(), lse_differs.sum()))
