"""The polynomial that stands in for exp2 where its unit is busy: its PTX, instruction by instruction, in fp32."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from flashhopper.kernels.ptx import exp2_text

MAX_ERROR = 1.05e-4  # what bf16 keeps of P is 20 times coarser


def bits_of(value: Any) -> int:
    return int(np.float32(value).view(np.uint32))


def float_of(bits: int) -> np.float32:
    return np.uint32(bits & 0xFFFFFFFF).view(np.float32)


def fused(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """One rounding: products of floats are exact in doubles, and what a sum of doubles loses is far below fp32."""
    return np.float32(np.float64(a) * np.float64(b) + np.float64(c))


def run(x: float) -> np.float32:
    """$0 of the text for $1 = x. Registers hold floats, ``e`` bits."""
    registers: dict[str, Any] = {"$1": np.float32(x)}

    def read(name: str) -> Any:
        if name.startswith("0f"):
            return float_of(int(name[2:], 16))
        return registers[name] if name in registers else int(name, 0)

    operations = {
        "max.NaN.f32": np.maximum,  # NaN if one is
        "min.NaN.f32": np.minimum,
        "add.rn.f32": lambda a, b: np.float32(a + b),
        "sub.rn.f32": lambda a, b: np.float32(a - b),
        "mul.rn.f32": lambda a, b: np.float32(a * b),
        "fma.rn.f32": fused,
        "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
        "add.s32": lambda a, b: a + b & 0xFFFFFFFF,
        "mov.b32": lambda a: float_of(a) if isinstance(a, int) else bits_of(a),
    }
    lines = [line.strip() for line in re.sub(r"\.reg [^;]*;", "", exp2_text().strip(" {}")).split(";")]
    with np.errstate(all="ignore"):
        for line in filter(None, lines):
            name, _, operands = line.partition(" ")
            target, *sources = (operand.strip() for operand in operands.split(","))
            registers[target] = operations[name](*map(read, sources))
    return np.float32(registers["$0"])


def test_it_is_exp2() -> None:
    for x in np.linspace(-126, 127.49, 4001, dtype=np.float32):
        assert abs(float(run(x)) / math.exp2(float(x)) - 1) <= MAX_ERROR, x
    errors = [float(run(x)) / math.exp2(float(x)) - 1 for x in np.linspace(-20, 0, 4001, dtype=np.float32)]
    assert abs(float(np.mean(errors))) <= 5e-5  # what row sums may gain


@pytest.mark.parametrize("x", [-126.0, -20.0, -1.0, 0.0, 1.0, 64.0, 127.0])
def test_powers_of_two_are_exact(x: float) -> None:
    assert run(x) == 2.0**x


@pytest.mark.parametrize(
    "x, expected",
    [
        (-math.inf, 0.0),
        (-1e6, 0.0),
        (-200.0, 0.0),
        (-127.0, 0.0),
        (-126.6, 0.0),
        (127.6, math.inf),
        (200.0, math.inf),
        (math.inf, math.inf),
    ],
)
def test_both_ends(x: float, expected: float) -> None:
    assert run(x) == expected


def test_nan_stays_nan() -> None:
    assert np.isnan(run(math.nan))
