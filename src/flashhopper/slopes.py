"""The derivative of a score function by its score: forward-mode duals along its program."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import cast

from flashhopper.programs import KINDS, Kind, Program, Tape, Value, operand_places, unary, where

Slope = Value | float
"""A derivative; Python's 0.0 and 1.0 are what is known to be constant, and cost nothing."""


@lru_cache(maxsize=256)
def with_slope(program: Program) -> Program:
    """The program with its slope as a second result, or as it was if the slope is the constant 1.

    Where a function has a kink the slope is PyTorch's: 0 for ``abs`` at 0, one half each for ``minimum`` and
    ``maximum`` of equal numbers.
    """
    tape = Tape(program.tensors)
    values: list[Value] = []
    slopes: list[Slope] = []
    kinds = kinds_of(program)
    for kind, instruction in zip(kinds, program.instructions, strict=True):
        name, places = str(instruction[0]), operand_places(instruction)
        kept = instruction[1 : len(instruction) - len(places)]
        operands = [values[place] for place in places]
        value = tape.emit(kind, name, *kept, *(operand.place for operand in operands))
        values.append(value)
        given = [slopes[place] for place in places]
        if instruction == ("input", "score"):
            slopes.append(1.0)
        elif kind != "float" or all(isinstance(slope, float) and slope == 0.0 for slope in given):
            slopes.append(0.0)
        else:
            slopes.append(_RULES[name](value, operands, given))
    (place,) = program.results
    slope = slopes[place]
    if isinstance(slope, float) and slope == 1.0:
        return program
    return tape.program(values[place], tape.value(slope))


def scales_gradients(program: Program) -> bool:
    """Whether the derivative of a score function is anything but the constant 1."""
    return len(with_slope(program).results) == 2


def kinds_of(program: Program) -> list[Kind]:
    """Of each instruction, the kind of its value."""
    kinds: list[Kind] = []
    for instruction in program.instructions:
        name, places = str(instruction[0]), operand_places(instruction)
        if name == "input":
            kinds.append("float" if instruction[1] == "score" else "int")
        elif name in ("float", "int", "bool"):
            kinds.append(cast(Kind, name))
        elif name == "load":
            kinds.append(KINDS[program.tensors[int(instruction[1])].dtype])
        elif name in ("lt", "le", "eq"):
            kinds.append("bool")
        elif name.startswith("to_"):
            kinds.append(cast(Kind, name.removeprefix("to_")))
        else:
            kinds.append(kinds[places[-1]])
    return kinds


def _is(slope: Slope, number: float) -> bool:
    return isinstance(slope, float) and slope == number


def _plus(a: Slope, b: Slope) -> Slope:
    if _is(a, 0.0):
        return b
    return a if _is(b, 0.0) else a + b


def _times(a: Slope, b: Slope) -> Slope:
    if _is(a, 0.0) or _is(b, 0.0):
        return 0.0
    if _is(a, 1.0):
        return b
    return a if _is(b, 1.0) else a * b


def _negated(slope: Slope) -> Slope:
    return 0.0 if _is(slope, 0.0) else -slope


def _over(slope: Slope, b: Value) -> Slope:
    return 0.0 if _is(slope, 0.0) else slope / b


def _chosen(condition: Value, a: Slope, b: Slope) -> Slope:
    if isinstance(a, float) and isinstance(b, float) and a == b:
        return a
    return where(condition, a, b)


def _if_smaller(a: Value, b: Value, first: Slope, second: Slope) -> Slope:
    """``first`` where a is smaller, ``second`` where b is, half of each where they are equal."""
    return _chosen(a < b, first, _chosen(b < a, second, _times(0.5, _plus(first, second))))


_Rule = Callable[[Value, list[Value], list[Slope]], Slope]
# Of a result, its operands and their slopes.
_RULES: dict[str, _Rule] = {
    "add": lambda r, x, d: _plus(d[0], d[1]),
    "sub": lambda r, x, d: _plus(d[0], _negated(d[1])),
    "mul": lambda r, x, d: _plus(_times(d[0], x[1]), _times(d[1], x[0])),
    "div": lambda r, x, d: _over(_plus(d[0], _negated(_times(d[1], r))), x[1]),
    "neg": lambda r, x, d: _negated(d[0]),
    "abs": lambda r, x, d: _times(d[0], unary("sign", x[0])),
    "sign": lambda r, x, d: 0.0,
    "minimum": lambda r, x, d: _if_smaller(x[0], x[1], d[0], d[1]),
    "maximum": lambda r, x, d: _if_smaller(x[1], x[0], d[0], d[1]),
    "where": lambda r, x, d: _chosen(x[0], d[1], d[2]),
    "exp": lambda r, x, d: _times(d[0], r),
    "log": lambda r, x, d: _over(d[0], x[0]),
    "sqrt": lambda r, x, d: _over(_times(0.5, d[0]), r),
    "tanh": lambda r, x, d: _times(d[0], 1.0 - r * r),
    "sigmoid": lambda r, x, d: _times(d[0], r * (1.0 - r)),
}
