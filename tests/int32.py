"""Ints as the kernels have them."""

from __future__ import annotations

INT32_MAX = 2**31 - 1


class Int32(int):
    """An int that refuses to leave 32 bits, as the kernel's would wrap around."""

    def __new__(cls, value: int) -> Int32:
        if not -INT32_MAX - 1 <= value <= INT32_MAX:
            raise OverflowError(value)
        return super().__new__(cls, value)

    def __add__(self, other: int) -> Int32:
        return Int32(int(self) + int(other))

    def __sub__(self, other: int) -> Int32:
        return Int32(int(self) - int(other))

    def __mul__(self, other: int) -> Int32:
        return Int32(int(self) * int(other))

    def __floordiv__(self, other: int) -> Int32:
        return Int32(int(self) // int(other))

    def __rfloordiv__(self, other: int) -> Int32:
        return Int32(int(other) // int(self))

    __radd__, __rmul__ = __add__, __mul__
