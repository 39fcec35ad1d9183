"""Users' functions in the kernels: a :class:`Program`, instruction by instruction, on DSL values."""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.runtime import make_fake_tensor

from flashhopper.kernels.values import maximum, minimum, select
from flashhopper.programs import KINDS, Program, TensorType, apply, dependencies, operand_places

LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
ELEMENTS = {
    "float32": cutlass.Float32,
    "float16": cutlass.Float16,
    "bfloat16": cutlass.BFloat16,
    "int32": cutlass.Int32,
    "bool": cutlass.Uint8,
}


def fake_tensor(kind: TensorType) -> Any:
    """The type of a tensor that functions read, for the compiler: any strides, and at least one dimension."""
    dims = max(kind.dims, 1)
    element = ELEMENTS[kind.dtype]
    shape, strides = (tuple(symbol() for _ in range(dims)) for symbol in (cute.sym_int, cute.sym_int64))
    return make_fake_tensor(element, shape, strides, assumed_align=element.width // 8)


def _exp(x: Float32) -> Float32:
    return cute.math.exp2(x * LOG2_E, fastmath=True)


def _tanh(x: Float32) -> Float32:
    """By the exponential: MUFU.TANH has an error of 2**-11, which a factor behind it would make one of the score."""
    return 1.0 - 2.0 * cute.arch.rcp_approx(cute.math.exp2(x * (2.0 * LOG2_E), fastmath=True) + 1.0)


def _by_type(of_float: Callable[..., Any], of_int: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *x: of_float(*x) if isinstance(x[0], Float32) else of_int(*x)


def _sign(x: Any) -> Any:
    zero, one = type(x)(0), type(x)(1)
    return select(x > zero, one, select(x < zero, -one, zero))


OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": lambda a, b: a * cute.arch.rcp_approx(b),
    "floordiv": operator.floordiv,
    "mod": lambda a, b: a - a // b * b,
    "neg": operator.neg,
    "abs": _by_type(lambda x: cute.arch.fmax(x, -x), lambda x: maximum(x, -x)),
    "sign": _sign,
    "minimum": _by_type(lambda a, b: -cute.arch.fmax(-a, -b), minimum),
    "maximum": _by_type(cute.arch.fmax, maximum),
    "lt": operator.lt,
    "le": operator.le,
    "eq": operator.eq,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": lambda x: x ^ type(x)(-1 if isinstance(x, Int32) else True),
    "where": select,
    "exp": _exp,
    "log": lambda x: cute.math.log2(x, fastmath=True) * LN_2,
    "sqrt": lambda x: cute.math.sqrt(x, fastmath=True),
    "tanh": _tanh,
    "sigmoid": lambda x: cute.arch.rcp_approx(_exp(-x) + 1.0),
    "to_float": lambda x: select(x, Float32(1.0), Float32(0.0)) if isinstance(x, Boolean) else Float32(x),
    "to_int": lambda x: select(x, Int32(1), Int32(0)),
}


def pausing(steps: int, between: int, pause: Callable[[], None]) -> Iterator[int]:
    """The steps of an unrolled loop, with a ``pause`` after every ``between`` of them: the wait at a barrier that is
    open, across which the compiler moves no loads. Else all are issued first, and what they load takes the registers
    of everything else."""
    for step in range(steps):
        if step and step % between == 0:
            pause()
        yield step


class PairProgram:
    """A program on the pairs of one thread. What depends on the row alone, or on the key alone, is computed once for
    each, loads among it. For straight-line code: its values are kept from pair to pair."""

    operations = OPERATIONS

    def __init__(self, program: Program, tensors: tuple, head: Int32, batch: Int32):
        self.program, self.tensors = program, tensors
        self.inputs: dict[str, Any] = {"head": head, "batch": batch}
        self.depends = dependencies(program)
        self.kept: dict[tuple, Any] = {}

    def __call__(self, row: tuple[Any, Int32], key: tuple[Any, Int32], score: Any = None) -> tuple[Any, ...]:
        """The results for a row and a key, each a name and its index in the sequence."""
        inputs = self.inputs | {"q_idx": row[1], "kv_idx": key[1], "score": score}
        values: list[Any] = []
        for place, instruction in enumerate(self.program.instructions):
            depends = self.depends[place]
            name = (place, row[0] if "q_idx" in depends else None, key[0] if "kv_idx" in depends else None)
            is_kept = "score" not in depends and not depends >= {"q_idx", "kv_idx"}
            if is_kept and name in self.kept:
                values.append(self.kept[name])
                continue
            value = apply(instruction, [values[at] for at in operand_places(instruction)], inputs, self)
            values.append(value)
            if is_kept:
                self.kept[name] = value
        return tuple(values[place] for place in self.program.results)

    def constant(self, kind: str, number: float) -> Any:
        return {"float": Float32, "int": Int32, "bool": Boolean}[kind](number)

    def load(self, number: int, indices: list[Int32]) -> Any:
        """An element. Negative indices count from the end; others out of range, which the CPU refuses, are brought to
        the nearest in range, so that nothing outside of the tensor is read."""
        tensor = self.tensors[number]
        places = []
        for mode, index in enumerate(indices or [Int32(0)]):
            extent = tensor.shape[mode]
            from_start = select(index < 0, index + extent, index)
            places.append(minimum(maximum(from_start, Int32(0)), extent - 1))
        element = tensor[tuple(places)]
        kind = KINDS[self.program.tensors[number].dtype]
        return {"float": lambda: element.to(Float32), "int": lambda: element, "bool": lambda: element != 0}[kind]()
