"""FP8 results against references, and tensors bit by bit."""

from __future__ import annotations

import torch
from tolerance import assert_lse_close, root_mean_square

from flashhopper.reference_fp8 import E4M3


def same_bits(given: torch.Tensor, expected: torch.Tensor) -> bool:
    kind = torch.uint8 if given.dtype == E4M3 else torch.int32
    return given.shape == expected.shape and torch.equal(given.cpu().view(kind), expected.view(kind))


def compare(out: torch.Tensor, lse: torch.Tensor, ref: torch.Tensor, ref_lse: torch.Tensor) -> None:
    """Against attention on what the quantised tensors stand for: what is left is P's 3-bit mantissa, 2.6 % of each
    weight, and the output's rounding."""
    assert torch.equal(out.isfinite(), ref.isfinite())
    error, size = root_mean_square(out.double() - ref), root_mean_square(ref)
    eps = torch.finfo(out.dtype).eps
    assert error <= 0.035 * size + eps * size, f"root mean square error {error:.2e} of {size:.2e}"
    assert_lse_close(lse, ref_lse, atol=4e-3)  # S in an accumulator of 14 bits
