"""The polynomial that stands in for exp2 where its unit is busy."""

from __future__ import annotations

import torch

from flashhopper.kernels.ptx import EXP2_CUBIC


def test_the_cubic_is_exp2_between_two_integers() -> None:
    """After rounding to the nearest integer; what bf16 keeps of P is 20 times coarser."""
    f = torch.linspace(-0.5, 0.5, 10_001, dtype=torch.float64)
    linear, square, cubic = EXP2_CUBIC
    polynomial = ((cubic * f + square) * f + linear) * f + 1.0
    error = polynomial / torch.exp2(f) - 1
    assert error.abs().max() <= 1.05e-4
    assert error.mean().abs() <= 5e-5  # what row sums may gain
    assert polynomial[5000] == 1.0
