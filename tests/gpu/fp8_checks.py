"""FP8 results against references, and tensors bit by bit."""

from __future__ import annotations

import math

import torch
from tolerance import assert_lse_close, root_mean_square

from flashhopper import launch_fp8, reference_fp8
from flashhopper.config import ScaleKind
from flashhopper.reference_fp8 import E4M3


def source(seqlen: int, head_dim: int, dtype: torch.dtype, spoilt: bool) -> torch.Tensor:
    """``(2, seqlen, 3, head_dim)`` with a mean and, if ``spoilt``, zeros, outliers and values that are not finite."""
    x = torch.randn(2, seqlen, 3, head_dim) + torch.randn(3, head_dim)
    if spoilt:
        x[0, 3, 0, 5], x[0, 70, 0, 1], x[0, 71, 2, 1] = math.nan, math.inf, -math.inf
        x[1, 64:128], x[1, 10, 0], x[0, 20, 0, 2], x[1, :, 1, 3] = 0, 1e-30, 3e4, math.nan
    return x.to(dtype)


def same_bits(given: torch.Tensor, expected: torch.Tensor) -> bool:
    kind = torch.uint8 if given.dtype.itemsize == 1 else torch.int32
    same = (given.shape, given.dtype) == (expected.shape, expected.dtype)
    return same and torch.equal(given.cpu().view(kind), expected.view(kind))


def assert_quantised_alike(x: torch.Tensor, on_card: torch.Tensor, kind: ScaleKind, fp8: torch.dtype = E4M3) -> None:
    """The card's quantisers of a tensor, as rows and as values, against the CPU's, bit by bit."""
    for rows in (64, 128):
        for seed in (None, 5):
            given = launch_fp8.quantize_rows(on_card, rows, kind, seed, dtype=fp8)
            expected = reference_fp8.quantize_rows(x, rows, kind, seed, fp8)
            assert [same_bits(a, b) for a, b in zip(given, expected, strict=True)] == [True, True]
    for center in (False, True):
        values = launch_fp8.quantize_values(on_card, kind, center, dtype=fp8)
        expected_values = reference_fp8.quantize_values(x, kind, center, fp8)
        assert [same_bits(a, b) for a, b in zip(values, expected_values, strict=True)] == [True] * 3


def compare(out: torch.Tensor, lse: torch.Tensor, ref: torch.Tensor, ref_lse: torch.Tensor) -> None:
    """Against attention on what the quantised tensors stand for: what is left is P's 3-bit mantissa, 2.6 % of each
    weight, and the output's rounding."""
    assert torch.equal(out.isfinite(), ref.isfinite())
    error, size = root_mean_square(out.double() - ref), root_mean_square(ref)
    eps = torch.finfo(out.dtype).eps
    assert error <= 0.035 * size + eps * size, f"root mean square error {error:.2e} of {size:.2e}"
    assert_lse_close(lse, ref_lse, atol=4e-3)  # S in an accumulator of 14 bits
