"""The keyword arguments of an attention call: their names and defaults, what they may be, and the mask they come to."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

MAX_SOFTMAX_SCALE = 2.0**20  # with scores of ordinary size stays below what the kernels' exponents can hold
NO_WINDOW = (-1, -1)


class AttentionOptions(NamedTuple):
    """The keyword arguments of the public functions, with FA3's names and meanings."""

    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = NO_WINDOW
    attention_chunk: int = 0
    softcap: float = 0.0
    num_splits: int = 1
    pack_gqa: bool | None = None
    deterministic: bool = False
    sm_margin: int = 0


_INTS = int, int
_PLAIN = {bool, int, float, type(None), tuple}


@lru_cache(maxsize=256, typed=True)
def _kept_options(*values: Any, **named: Any) -> AttentionOptions:
    """TypeError for values of other types than options have, which may be anything and are not kept alive."""
    options = AttentionOptions(*values, **named)
    if not _PLAIN.issuperset(map(type, options)):
        raise TypeError
    return options


def options_of(softmax_scale: Any, causal: Any, window_size: Any, *others: Any, **named: Any) -> AttentionOptions:
    """What ``AttentionOptions(…)`` gives, in the same time, but one object for values that are equal and of equal
    types: what was found out about it is known again by its identity."""
    if torch.compiler.is_compiling():
        return AttentionOptions(softmax_scale, causal, window_size, *others, **named)
    try:  # the cache tells types of arguments apart, but not of what is in them: (1, True) and (1, 1)
        if window_size is NO_WINDOW or tuple(map(type, window_size)) == _INTS:
            return _kept_options(softmax_scale, causal, window_size, *others, **named)
    except TypeError:  # no tuple, or not hashable: validation will say so
        pass
    return AttentionOptions(softmax_scale, causal, window_size, *others, **named)


class Mask(NamedTuple):
    """Which of the kernels' masks a call needs."""

    causal: bool
    window: tuple[int, int, int] | None
    """Keys to the left and to the right (-1: without bound), keys per chunk (0: no chunks)."""


def mask_of(options: AttentionOptions, seqlen_q: int, seqlen_k: int) -> Mask:
    """What the mask options come to. A window that hides nothing is none, and one that ends at the row's own position
    and has no other end is causal."""
    left, right = options.window_size
    chunk = options.attention_chunk
    if left >= seqlen_k - 1:
        left = -1
    if options.causal:
        right = 0  # at most: a causal window never looks ahead
    elif right >= seqlen_q - 1:
        right = -1
    if chunk == 0 and left == -1 and right in (-1, 0):
        return Mask(causal=right == 0, window=None)
    return Mask(causal=False, window=(left, right, chunk))


def check_options(options: AttentionOptions) -> None:
    """Of :meth:`AttentionProblem.validate`, what does not depend on shapes: ``torch.compile`` traces it."""
    scale = options.softmax_scale
    if scale is not None:
        if isinstance(scale, bool) or not isinstance(scale, (int, float)):
            raise TypeError(f"softmax_scale must be a float or None, got {type(scale).__name__}")
        if not 0 <= scale <= MAX_SOFTMAX_SCALE:  # also false for NaN
            raise ValueError(f"softmax_scale is {scale}; accepted are numbers from 0 to 2**20, or None")
    for name in ("causal", "deterministic"):
        value = getattr(options, name)
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
    if isinstance(options.sm_margin, bool) or not isinstance(options.sm_margin, int):
        raise TypeError(f"sm_margin must be an int, got {type(options.sm_margin).__name__}")
    if options.sm_margin < 0:
        raise ValueError(f"sm_margin is {options.sm_margin}; accepted is a number of SMs of at least 0")
    for name, option in _OPTIONS.items():
        value = getattr(options, name)
        if not isinstance(value, option.types) or (isinstance(value, bool) and bool not in option.types):
            names = " or ".join(t.__name__ for t in option.types)
            raise TypeError(f"{name} must be {names}, got {type(value).__name__}")
        if value in option.accepted:
            continue
        if option.check is not None:
            option.check(value)
            continue
        today = " and ".join(map(repr, option.accepted))
        raise NotImplementedError(f"{name}={value!r} is not there yet; accepted today: {today}")


def refuse_tensors(**tensors: torch.Tensor | None) -> None:
    """NotImplementedError for a tensor argument that is not there yet and is not None."""
    for name, value in tensors.items():
        if value is not None:
            raise NotImplementedError(f"{name} is not there yet; accepted today: None, got {type(value).__name__}")


def refuse_mods(**functions: object) -> None:
    """NotImplementedError for a function of scores with quantised tensors."""
    for name, value in functions.items():
        if value is not None:
            raise NotImplementedError(f"{name} is not there yet with FP8; accepted today: None")


def _check_window(value: tuple[Any, ...]) -> None:
    if len(value) != 2 or not all(isinstance(side, int) and not isinstance(side, bool) for side in value):
        raise TypeError(f"window_size must be two ints (left, right), got {value!r}")
    if min(value) < -1:
        raise ValueError(f"window_size is {value}; each side is -1 (without bound) or a number of keys of at least 0")


def _check_chunk(value: int) -> None:
    if value < 0:
        raise ValueError(f"attention_chunk is {value}; accepted is a number of keys, or 0 for no chunks")


def _check_softcap(value: float) -> None:
    if not 0 <= value < math.inf:  # also false for NaN
        raise ValueError(f"softcap is {value}; accepted are finite numbers over 0, or 0 for none")


class _Option(NamedTuple):
    """An option whose values are checked, or are not there yet."""

    types: tuple[type, ...]
    accepted: tuple[object, ...]
    """The values that ask for nothing."""
    check: Callable[[Any], None] | None = None
    """Of other values; without it they are not there yet."""


_OPTIONS = {
    "window_size": _Option((tuple,), (), _check_window),
    "attention_chunk": _Option((int,), (0,), _check_chunk),
    "softcap": _Option((float, int), (0.0,), _check_softcap),
    "num_splits": _Option((int,), (1,)),
    "pack_gqa": _Option((type(None), bool), (None, False)),
}
