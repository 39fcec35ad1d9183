"""``score_mod`` and ``mask_mod`` as straight-line programs.

A user's function is called once, with :class:`Value` in place of numbers, and leaves a :class:`Program`: what the
kernels compute, what their cache is keyed by, and what the reference evaluates. So a kernel cannot be one of another
function, whatever closures, globals or bytecode did in between, and two functions that say the same share a kernel.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

Kind = Literal["float", "int", "bool"]

KINDS: dict[str, Kind] = {
    "float32": "float",
    "float64": "float",
    "float16": "float",
    "bfloat16": "float",
    "int32": "int",
    "bool": "bool",
}
"""What is loaded from a tensor of a dtype."""
INDEX_NAMES = ("batch", "head", "q_idx", "kv_idx")
INT_LIMIT = 2**31
MAX_INSTRUCTIONS = 4096  # each is compiled for every score that a thread holds


class TensorType(NamedTuple):
    """What a program knows of a tensor: its dtype, by name, and its number of dimensions."""

    dtype: str
    dims: int


class Program(NamedTuple):
    """Instructions ``(name, *operands)`` in order; operands are places of earlier instructions.

    ``("input", name)``; ``("float", hex)``, ``("int", n)`` and ``("bool", 0 or 1)`` are constants; ``("load", number,
    *indices)`` reads tensor ``number``. Floats are kept as text, for which -0.0 is not 0.0.
    """

    instructions: tuple[tuple[str | int, ...], ...]
    results: tuple[int, ...]
    tensors: tuple[TensorType, ...]


class Tape:
    """A program under construction. Equal instructions are one."""

    def __init__(self, tensors: tuple[TensorType, ...]) -> None:
        self.tensors = tensors
        self.instructions: list[tuple[str | int, ...]] = []
        self.kinds: list[Kind] = []
        self._places: dict[tuple[str | int, ...], int] = {}

    def emit(self, kind: Kind, name: str, *operands: str | int) -> Value:
        """The value of an instruction, new or not."""
        instruction = (name, *operands)
        place = self._places.get(instruction)
        if place is None:
            if len(self.instructions) == MAX_INSTRUCTIONS:
                raise ValueError(f"a function of more than {MAX_INSTRUCTIONS} operations per score")
            place = self._places[instruction] = len(self.instructions)
            self.instructions.append(instruction)
            self.kinds.append(kind)
        return Value(self, place)

    def value(self, x: Any) -> Value:
        """A value of this tape, or a Python number as one."""
        if isinstance(x, Value):
            if x.tape is not self:
                raise TypeError("a value of one call of a function was used in another call")
            return x
        if isinstance(x, bool):
            return self.emit("bool", "bool", int(x))
        if isinstance(x, numbers.Integral):
            if not -INT_LIMIT <= int(x) < INT_LIMIT:
                raise ValueError(f"{x} is no 32-bit integer, which is what score_mod and mask_mod compute with")
            return self.emit("int", "int", int(x))
        if isinstance(x, numbers.Real):
            return self.emit("float", "float", float(x).hex())
        raise TypeError(
            f"score_mod and mask_mod compute with their arguments and Python numbers, not with {type(x).__name__};"
            " tensors go through mod_tensors"
        )

    def program(self, *results: Value) -> Program:
        """What the results need, renumbered."""
        needed: set[int] = set()
        for place in sorted((value.place for value in results), reverse=True):
            self._mark(place, needed)
        new = {old: at for at, old in enumerate(sorted(needed))}
        instructions = tuple(_renumbered(self.instructions[old], new) for old in sorted(needed))
        return Program(instructions, tuple(new[value.place] for value in results), self.tensors)

    def _mark(self, place: int, needed: set[int]) -> None:
        waiting = [place]
        while waiting:
            at = waiting.pop()
            if at not in needed:
                needed.add(at)
                waiting += operand_places(self.instructions[at])


def operand_places(instruction: tuple[str | int, ...]) -> list[int]:
    """Of an instruction, the places it reads."""
    name, *operands = instruction
    if name in ("input", "float", "int", "bool"):
        return []
    return [int(x) for x in (operands[1:] if name == "load" else operands)]


def _renumbered(instruction: tuple[str | int, ...], new: dict[int, int]) -> tuple[str | int, ...]:
    kept = len(instruction) - len(operand_places(instruction))
    return *instruction[:kept], *(new[place] for place in operand_places(instruction))


class Value:
    """A number that is known when the kernel runs, with PyTorch's arithmetic, comparisons, ``&``, ``|``, ``^``, ``~``.

    Integers have 32 bits, ``//`` and ``%`` round down. There is no ``if`` on it: ``flashhopper.mods.where`` chooses.
    """

    __slots__ = ("place", "tape")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tape: Tape, place: int) -> None:
        self.tape, self.place = tape, place

    @property
    def kind(self) -> Kind:
        return self.tape.kinds[self.place]

    def __repr__(self) -> str:
        return f"<{self.kind} of a score_mod or mask_mod>"

    def __bool__(self) -> bool:
        raise TypeError(
            "what a score_mod or mask_mod computes is not known yet: no if, and, or, not, min or max on it; use"
            " flashhopper.mods.where, &, |, ~, minimum and maximum"
        )

    def __add__(self, other: Any) -> Value:
        return arithmetic("add", self, other)

    def __radd__(self, other: Any) -> Value:
        return arithmetic("add", other, self)

    def __sub__(self, other: Any) -> Value:
        return arithmetic("sub", self, other)

    def __rsub__(self, other: Any) -> Value:
        return arithmetic("sub", other, self)

    def __mul__(self, other: Any) -> Value:
        return arithmetic("mul", self, other)

    def __rmul__(self, other: Any) -> Value:
        return arithmetic("mul", other, self)

    def __truediv__(self, other: Any) -> Value:
        return arithmetic("div", self, other, only="float")

    def __rtruediv__(self, other: Any) -> Value:
        return arithmetic("div", other, self, only="float")

    def __floordiv__(self, other: Any) -> Value:
        return arithmetic("floordiv", self, other, only="int")

    def __rfloordiv__(self, other: Any) -> Value:
        return arithmetic("floordiv", other, self, only="int")

    def __mod__(self, other: Any) -> Value:
        return arithmetic("mod", self, other, only="int")

    def __rmod__(self, other: Any) -> Value:
        return arithmetic("mod", other, self, only="int")

    def __pow__(self, exponent: Any) -> Value:
        if isinstance(exponent, bool) or not isinstance(exponent, int) or not 1 <= exponent <= 16:
            raise TypeError(f"** takes a whole exponent from 1 to 16, got {exponent!r}")
        power = self
        for bit in bin(exponent)[3:]:
            power = power * power * self if bit == "1" else power * power
        return power

    def __neg__(self) -> Value:
        return unary("neg", self)

    def __abs__(self) -> Value:
        return unary("abs", self)

    def abs(self) -> Value:
        return unary("abs", self)

    def __lt__(self, other: Any) -> Value:
        return arithmetic("lt", self, other, result="bool")

    def __le__(self, other: Any) -> Value:
        return arithmetic("le", self, other, result="bool")

    def __gt__(self, other: Any) -> Value:
        return arithmetic("lt", other, self, result="bool")

    def __ge__(self, other: Any) -> Value:
        return arithmetic("le", other, self, result="bool")

    def __eq__(self, other: Any) -> Value:  # type: ignore[override]
        return arithmetic("eq", self, other, result="bool")

    def __ne__(self, other: Any) -> Value:  # type: ignore[override]
        return ~arithmetic("eq", self, other, result="bool")

    def __and__(self, other: Any) -> Value:
        return bitwise("and", self, other)

    def __or__(self, other: Any) -> Value:
        return bitwise("or", self, other)

    def __xor__(self, other: Any) -> Value:
        return bitwise("xor", self, other)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __invert__(self) -> Value:
        if self.kind == "float":
            raise TypeError("~ takes a truth value or an integer, not a float")
        return self.tape.emit(self.kind, "not", self.place)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Value:
        """So that functions written with ``torch.where``, ``torch.tanh`` and the like need no change."""
        function = TORCH_FUNCTIONS.get(func.__name__)
        if function is None or kwargs:
            raise TypeError(
                f"score_mod and mask_mod cannot use torch's {func.__name__} here: accepted are"
                f" {', '.join(sorted(TORCH_FUNCTIONS))}, and tensors through mod_tensors alone"
            )
        return function(*args)


class TensorHandle:
    """A tensor of ``mod_tensors`` inside a function: ``tensor[i, j]`` with one index for each dimension."""

    def __init__(self, tape: Tape, number: int) -> None:
        self._tape, self._number = tape, number

    def __getitem__(self, indices: Any) -> Value:
        indices = indices if isinstance(indices, tuple) else (indices,)
        kind = self._tape.tensors[self._number]
        if len(indices) != kind.dims:
            raise IndexError(f"a tensor of mod_tensors has {kind.dims} dimensions and was given {len(indices)} indices")
        values = [self._tape.value(index) for index in indices]
        for value in values:
            if value.kind != "int":
                raise TypeError(f"an index of a tensor of mod_tensors must be an integer, got a {value.kind}")
        return self._tape.emit(KINDS[kind.dtype], "load", self._number, *(value.place for value in values))


def _tape_of(*operands: Any) -> Tape:
    return next(x.tape for x in operands if isinstance(x, Value))


def to_kind(value: Value, kind: Kind) -> Value:
    """As another kind of number: truth values are 0 and 1."""
    if value.kind == kind:
        return value
    name, *operands = value.tape.instructions[value.place]
    if kind == "float" and name in ("int", "bool"):  # -1.0 and not a conversion of -1
        return value.tape.value(float(operands[0]))
    return value.tape.emit(kind, f"to_{kind}", value.place)


def common_kind(a: Value, b: Value) -> Kind:
    """What two operands are brought to: float before int before bool."""
    return next(kind for kind in ("float", "int", "bool") if kind in (a.kind, b.kind))


def arithmetic(name: str, a: Any, b: Any, *, only: Kind | None = None, result: Kind | None = None) -> Value:
    """A binary operation on two numbers; truth values are 0 and 1."""
    tape = _tape_of(a, b)
    left, right = tape.value(a), tape.value(b)
    kind = common_kind(left, right)
    kind = "int" if kind == "bool" else kind
    if only == "int" and kind == "float":
        raise TypeError(f"{name} takes integers, got a float")
    kind = only or kind
    if name in ("floordiv", "mod") and tape.instructions[right.place] == ("int", 0):
        raise ZeroDivisionError(f"{name} by 0 in a score_mod or mask_mod")
    left, right = to_kind(left, kind), to_kind(right, kind)
    return tape.emit(result or kind, name, left.place, right.place)


def bitwise(name: str, a: Any, b: Any) -> Value:
    tape = _tape_of(a, b)
    left, right = tape.value(a), tape.value(b)
    kind = common_kind(left, right)
    if kind == "float":
        raise TypeError(f"{name} takes truth values or integers, not floats")
    left, right = to_kind(left, kind), to_kind(right, kind)
    return tape.emit(kind, name, left.place, right.place)


def unary(name: str, x: Value) -> Value:
    """``neg``, ``abs`` or ``sign``."""
    x = to_kind(x, "int") if x.kind == "bool" else x
    return x.tape.emit(x.kind, name, x.place)


def of_float(name: str, x: Value) -> Value:
    """A function whose argument and result are floats."""
    return x.tape.emit("float", name, to_kind(x, "float").place)


def where(condition: Any, a: Any, b: Any) -> Value:
    """a where the condition holds, else b."""
    tape = _tape_of(condition, a, b)
    chosen, left, right = tape.value(condition), tape.value(a), tape.value(b)
    if chosen.kind != "bool":
        raise TypeError(f"where takes a truth value as its condition, got a {chosen.kind}")
    kind = common_kind(left, right)
    left, right = to_kind(left, kind), to_kind(right, kind)
    return tape.emit(kind, "where", chosen.place, left.place, right.place)


def minimum(a: Any, b: Any) -> Value:
    return arithmetic("minimum", a, b)


def maximum(a: Any, b: Any) -> Value:
    return arithmetic("maximum", a, b)


FLOAT_FUNCTIONS = ("exp", "log", "sqrt", "tanh", "sigmoid")
TORCH_FUNCTIONS: dict[str, Callable[..., Value]] = {
    "where": where,
    "minimum": minimum,
    "maximum": maximum,
    "abs": abs,
    "neg": lambda x: -x,
    "logical_and": lambda a, b: bitwise("and", a, b),
    "logical_or": lambda a, b: bitwise("or", a, b),
    "logical_not": lambda x: ~x,
    **{name: partial(of_float, name) for name in FLOAT_FUNCTIONS},
}


def trace_score(function: Callable[..., Any], tensors: tuple[TensorType | None, ...]) -> Program:
    """``function(score, batch, head, q_idx, kv_idx, tensors) -> score``; TypeError for another result."""
    tape, handles = _start(tensors)
    score = tape.emit("float", "input", "score")
    result = function(score, *(tape.emit("int", "input", name) for name in INDEX_NAMES), handles)
    value = _result(tape, "score_mod", result)
    return tape.program(to_kind(value, "float"))


def trace_mask(function: Callable[..., Any], tensors: tuple[TensorType | None, ...]) -> Program:
    """``function(batch, head, q_idx, kv_idx, tensors) -> bool``; TypeError for another result."""
    tape, handles = _start(tensors)
    result = function(*(tape.emit("int", "input", name) for name in INDEX_NAMES), handles)
    value = _result(tape, "mask_mod", result)
    if value.kind != "bool":
        raise TypeError(f"mask_mod must return a truth value, got a {value.kind}")
    return tape.program(value)


def _result(tape: Tape, name: str, result: Any) -> Value:
    if not isinstance(result, (Value, numbers.Real)):
        raise TypeError(f"{name} must return a number computed from its arguments, got {type(result).__name__}")
    return tape.value(result)


def _start(tensors: tuple[TensorType | None, ...]) -> tuple[Tape, tuple[TensorHandle | None, ...]]:
    """A tape, and handles in the places of the tensors there are; programs count those alone."""
    tape = Tape(tuple(kind for kind in tensors if kind is not None))
    numbering = iter(range(len(tape.tensors)))
    return tape, tuple(None if kind is None else TensorHandle(tape, next(numbering)) for kind in tensors)


def dependencies(program: Program) -> list[frozenset[str]]:
    """Of each instruction, the inputs that its value depends on."""
    found: list[frozenset[str]] = []
    for instruction in program.instructions:
        names = frozenset({str(instruction[1])} if instruction[0] == "input" else ())
        found.append(names.union(*(found[place] for place in operand_places(instruction))))
    return found


def apply(instruction: tuple[str | int, ...], operands: list[Any], inputs: Mapping[str, Any], engine: Any) -> Any:
    """The value of one instruction. ``engine`` has ``constant(kind, number)``, ``load(number, indices)`` and
    ``operations``, functions by name."""
    name = str(instruction[0])
    if name == "input":
        return inputs[str(instruction[1])]
    if name == "float":
        return engine.constant("float", float.fromhex(str(instruction[1])))
    if name in ("int", "bool"):
        return engine.constant(name, int(instruction[1]))
    if name == "load":
        return engine.load(int(instruction[1]), operands)
    return engine.operations[name](*operands)


def evaluate(program: Program, inputs: Mapping[str, Any], engine: Any) -> tuple[Any, ...]:
    """The results of a program; see :func:`apply`."""
    values: list[Any] = []
    for instruction in program.instructions:
        values.append(apply(instruction, [values[place] for place in operand_places(instruction)], inputs, engine))
    return tuple(values[place] for place in program.results)
