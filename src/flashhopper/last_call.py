"""The last dense call with some options, and its plan: the next one like it is recognised without gathering its key.

Torch's own guards, which see to it that a compiled graph runs on what it was compiled for, compare three tensors in 0.5
µs: their types, shapes, strides, dtypes, devices, whether they require gradients, and what else dispatch depends on. To
gather a key and to look it up takes 2.8 (on a development machine's CPU). Guards tell apart more than plans do: what
they do not know is looked up as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from flashhopper.options import AttentionOptions

MAX_CALLS = 256

_TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)  # a torch without it gathers keys
_unwrap_if_dead = torch._C._functorch.unwrap_if_dead
P = TypeVar("P")


class _LastCall(NamedTuple):
    options: AttentionOptions
    """Held, so that no other object can get its id."""
    is_like: Callable[..., bool]
    plan: Any


class LastCalls(Generic[P]):
    """The last call with each of some options. Nothing but its tensors and options may tell a call's plan."""

    def __init__(self) -> None:
        self._calls: dict[int, _LastCall] = {}  # by the id of options: one object has the same values of the same types
        self._plans: dict[int, tuple[AttentionOptions, P]] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def find(self, options: AttentionOptions, *tensors: Any) -> P | None:
        """The plan of the last call with these options if this one is like it."""
        last = self._calls.get(id(options))
        if last is None:
            return None
        for x in tensors:  # guards ask for sizes, which a nested tensor has none of: that would end the process
            if getattr(x, "is_nested", True):  # or no tensor at all
                return None
        return last.plan if last.is_like(*tensors) else None

    def keep(self, options: AttentionOptions, plan: P, *tensors: torch.Tensor) -> None:
        """A call was looked up. After two in a row with the same plan, recognise the next one that is like this."""
        before = self._plans.get(id(options))
        if before is None and len(self._plans) >= MAX_CALLS:
            self._plans.clear()
        self._plans[id(options)] = options, plan
        if before != (options, plan):  # shapes in turn: guards that serve no call would add 3 µs to each
            return
        if _TensorGuards is None:
            return
        if len(set(map(id, tensors))) < len(tensors):  # torch guards a tensor once
            return
        if any(_unwrap_if_dead(x) is not x for x in tensors):  # left over from torch.func: must be looked at
            return
        if len(self._calls) >= MAX_CALLS and id(options) not in self._calls:
            self._calls.clear()
        is_like = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        self._calls[id(options)] = _LastCall(options, is_like, plan)
