"""The last dense call with some options, and its plan: the next one like it is recognised without gathering its key.

Torch's own guards, which see to it that a compiled graph runs on what it was compiled for, compare three tensors in 0.5
µs: their types, shapes, strides, dtypes, devices, whether they require gradients, and what else dispatch depends on.
Their key takes 2.5 to gather and to look up (on a development machine's CPU). They tell apart more than plans do: what
they do not know is looked up as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flashhopper.options import AttentionOptions
from flashhopper.plan import Plan

MAX_CALLS = 256

_guards: Any = torch._C._dynamo.guards
_unwrap_if_dead = torch._C._functorch.unwrap_if_dead


class LastCall(NamedTuple):
    options: AttentionOptions
    """Held, so that no other object can get its id."""
    is_like: Callable[[Any, Any, Any], bool]
    plan: Plan
    needs_gradient: bool
    """Of q, k or v, which autograd alone cannot give; asked for or not."""


_last_calls: dict[int, LastCall] = {}
"""By the id of options: the same object has the same values of the same types."""


def find(q: Any, k: Any, v: Any, options: AttentionOptions) -> LastCall | None:
    """The last call with these options if this one is like it."""
    last = _last_calls.get(id(options))
    return last if last is not None and last.is_like(q, k, v) else None


def keep(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions, plan: Plan) -> None:
    """Recognise the next call if it is like this one, whose plan is known. Takes a microsecond."""
    if q is k or k is v or q is v:  # torch guards a tensor once
        return
    if any(_unwrap_if_dead(x) is not x for x in (q, k, v)):  # left over from torch.func: must be looked at
        return
    if len(_last_calls) >= MAX_CALLS:
        _last_calls.clear()
    is_like = _guards.TensorGuards(q, k, v, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    needs_gradient = not plan.is_differentiable and (q.requires_grad or k.requires_grad or v.requires_grad)
    _last_calls[id(options)] = LastCall(options, is_like, plan, needs_gradient)
