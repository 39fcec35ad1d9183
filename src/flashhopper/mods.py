"""Functions for ``score_mod`` and ``mask_mod``, and ready ones.

What is called here works on the values that a ``score_mod`` or ``mask_mod`` gets, on torch tensors and on Python
numbers alike, so that the same function can be tried on tensors. ``torch.where``, ``torch.tanh`` and the like of these
names work inside such a function as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from flashhopper import programs
from flashhopper.programs import Value

__all__ = [
    "abs",
    "document_mask",
    "exp",
    "log",
    "maximum",
    "minimum",
    "prefix_lm",
    "relative_bias",
    "sigmoid",
    "sqrt",
    "tanh",
    "where",
]

ScoreMod = Callable[..., Any]
"""``(score, batch, head, q_idx, kv_idx, tensors) -> score``"""
MaskMod = Callable[..., Any]
"""``(batch, head, q_idx, kv_idx, tensors) -> bool``"""


def where(condition: Any, a: Any, b: Any) -> Any:
    """a where the condition holds, else b."""
    if _has_values(condition, a, b):
        return programs.where(condition, a, b)
    if isinstance(condition, torch.Tensor):
        return torch.where(condition, a, b)
    return a if condition else b


def minimum(a: Any, b: Any) -> Any:
    """The smaller of two numbers."""
    if _has_values(a, b):
        return programs.minimum(a, b)
    return torch.minimum(*_as_tensors(a, b)) if _has_tensors(a, b) else min(a, b)


def maximum(a: Any, b: Any) -> Any:
    """The larger of two numbers."""
    if _has_values(a, b):
        return programs.maximum(a, b)
    return torch.maximum(*_as_tensors(a, b)) if _has_tensors(a, b) else max(a, b)


def abs(x: Any) -> Any:
    """The absolute value."""
    return x.__abs__()


def exp(x: Any) -> Any:
    """e ** x."""
    return _of_float("exp", x)


def log(x: Any) -> Any:
    """The natural logarithm."""
    return _of_float("log", x)


def sqrt(x: Any) -> Any:
    """The square root."""
    return _of_float("sqrt", x)


def tanh(x: Any) -> Any:
    """The hyperbolic tangent."""
    return _of_float("tanh", x)


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x))."""
    if not isinstance(x, (Value, torch.Tensor)):
        return 0.5 + 0.5 * math.tanh(0.5 * x)
    return _of_float("sigmoid", x)


def _of_float(name: str, x: Any) -> Any:
    if isinstance(x, Value):
        return programs.of_float(name, x)
    return getattr(torch if isinstance(x, torch.Tensor) else math, name)(x)


def _has_values(*operands: Any) -> bool:
    return any(isinstance(x, Value) for x in operands)


def _has_tensors(*operands: Any) -> bool:
    return any(isinstance(x, torch.Tensor) for x in operands)


def _as_tensors(a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Two numbers, one of them a tensor, as tensors of one dtype."""
    dtype, device = torch.result_type(a, b), a.device if isinstance(a, torch.Tensor) else b.device
    left, right = (torch.as_tensor(x, device=device).to(dtype) for x in (a, b))
    return left, right


def relative_bias(max_distance: int) -> ScoreMod:
    """A ``score_mod`` that adds ``tensors[0][head, distance + max_distance]``, ``(heads, 2 max_distance + 1)``, where
    the distance q_idx - kv_idx is cut to at most ``max_distance`` either way."""

    def score_mod(score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any, tensors: Any) -> Any:
        distance = minimum(maximum(q_idx - kv_idx, -max_distance), max_distance)
        return score + tensors[0][head, distance + max_distance]

    return score_mod


def prefix_lm(batch: Any, head: Any, q_idx: Any, kv_idx: Any, tensors: Any) -> Any:
    """A ``mask_mod``: keys before ``tensors[0][batch]``, int32 ``(batch,)``, are seen by all queries, the others by
    those that do not come before them."""
    return (kv_idx < tensors[0][batch]) | (kv_idx <= q_idx)


def document_mask(batch: Any, head: Any, q_idx: Any, kv_idx: Any, tensors: Any) -> Any:
    """A ``mask_mod``: a query sees the keys of its own document. ``tensors[0]``: int32 ``(batch, seqlen)``, the
    document of each position."""
    documents = tensors[0]
    return documents[batch, q_idx] == documents[batch, kv_idx]
