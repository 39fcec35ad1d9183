"""Small values that live through the DSL's dynamic control flow as one, and arithmetic that also runs on plain ints."""

from typing import Any, ClassVar, Self

import cutlass
from cutlass._mlir.dialects import arith
from cutlass.cutlass_dsl import dsl_user_op


class DynamicValues:
    """Base of named run-time values that a dynamic loop or branch carries together.

    A subclass names the run-time attributes in ``dynamic`` and the compile-time ones in ``static``; its ``__init__``
    takes them in that order.
    """

    dynamic: ClassVar[tuple[str, ...]] = ()
    static: ClassVar[tuple[str, ...]] = ()

    def __extract_mlir_values__(self) -> list[Any]:
        return [value for name in self.dynamic for value in cutlass.extract_mlir_values(getattr(self, name))]

    def __new_from_mlir_values__(self, values: list[Any]) -> Self:
        rebuilt = []
        for name in self.dynamic:
            old = getattr(self, name)
            count = len(cutlass.extract_mlir_values(old))
            rebuilt.append(cutlass.new_from_mlir_values(old, values[:count]))
            values = values[count:]
        return type(self)(*rebuilt, *(getattr(self, name) for name in self.static))


def ceil_div(numerator: Any, denominator: Any) -> Any:
    """Quotient rounded up, for non-negative numerators; ints or DSL integers."""
    return (numerator + denominator - 1) // denominator


def divide(numerator: Any, denominator: Any) -> tuple[Any, Any]:
    """Quotient and remainder, for non-negative numerators; ints or DSL integers."""
    quotient = numerator // denominator
    return quotient, numerator - quotient * denominator


def minimum(a: Any, b: Any) -> Any:
    """The smaller of two ints or DSL integers."""
    return cutlass.min(a, b)


def maximum(a: Any, b: Any) -> Any:
    """The larger of two ints or DSL integers."""
    return cutlass.max(a, b)


@dsl_user_op
def select(condition: Any, a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """a where the condition holds, else b: DSL values of one type, both of which are computed."""
    chosen, left, right = (x.ir_value(loc=loc, ip=ip) for x in (condition, a, b))
    return type(a)(arith.select(chosen, left, right, loc=loc, ip=ip))
