"""A sanity check of what is timed: each result against attention in fp32, once per head_dim and mask."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from flashhopper.bench.grid import Cell

CHECK_SEQLEN = 1024
CHECK_BATCH = 2
PATH = re.compile(r"(?:/[\w.+-]+)+/([\w.+-]+)")


@dataclass(frozen=True)
class Check:
    """The largest absolute error of one implementation; ``ok`` if it is within the numerics contract's bound.

    ``tensor`` is ``dq``, ``dk`` or ``dv``, and None for the output.
    """

    cell: str
    name: str
    error: float | None
    tolerance: float
    reason: str | None = None
    tensor: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is not None and self.error <= self.tolerance

    @property
    def label(self) -> str:
        return self.name if self.tensor is None else f"{self.name} {self.tensor}"

    def to_json(self) -> dict[str, Any]:
        data = {**asdict(self), "ok": self.ok}
        if self.tensor is None:
            del data["tensor"]
        return data


@dataclass(frozen=True)
class Expected:
    """What a result is compared with: the value in fp32, and the largest error allowed."""

    tensor: str | None
    reference: torch.Tensor
    tolerance: float


def random_inputs(cell: Cell, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of a cell, standard normal, on the generator's device."""
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}[cell.dtype]
    q, k, v = (
        torch.randn(cell.b, cell.s, cell.h, head_dim, generator=generator, device=generator.device, dtype=dtype)
        for head_dim in (cell.d, cell.d, cell.head_dim_v)
    )
    return q, k, v


def random_like(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)


def check_cell(cell: Cell) -> Cell:
    """The small shape on which a cell's dtype, head_dim and mask are checked."""
    return replace(cell, s=CHECK_SEQLEN, b=CHECK_BATCH)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Plain attention in the dtype of its inputs, without any blocking."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    if causal:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return (scores.softmax(dim=3) @ v).transpose(1, 2)


def tolerance_of(reference: torch.Tensor, plain: torch.Tensor, factor: float = 2.0) -> float:
    """``factor`` times the error of the same mathematics in plain PyTorch, plus twice the rounding of adding and
    removing 0.3.
    """
    rounding = ((reference + 0.3) - 0.3 - reference).abs().max()
    return factor * float((plain.float() - reference).abs().max()) + 2.0 * float(rounding)


def check_outputs(
    cell: Cell,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    outputs: Mapping[str, Callable[[], torch.Tensor]],
) -> list[Check]:
    """Run each of ``outputs`` once on ``inputs``; a call that raises becomes a check with its reason."""
    q, k, v = inputs
    reference = attention(q.float(), k.float(), v.float(), cell.causal)
    tolerance = tolerance_of(reference, attention(q, k, v, cell.causal))
    return compare_with(
        cell, [Expected(None, reference, tolerance)], {name: _alone(call) for name, call in outputs.items()}
    )


def check_gradients(
    cell: Cell,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    gradients: Mapping[str, Callable[[], Sequence[torch.Tensor]]],
) -> list[Check]:
    """The same for dq, dk and dv, a check each. ``inputs`` are leaves that require gradients."""
    q, k, v = (x.detach().float().requires_grad_() for x in inputs)
    references = torch.autograd.grad(attention(q, k, v, cell.causal), (q, k, v), dout.float())
    plain = torch.autograd.grad(attention(*inputs, cell.causal), inputs, dout)
    expected = [
        Expected(tensor, reference, tolerance_of(reference, same_math))
        for tensor, reference, same_math in zip(("dq", "dk", "dv"), references, plain, strict=True)
    ]
    return compare_with(cell, expected, gradients)


def _alone(call: Callable[[], torch.Tensor]) -> Callable[[], tuple[torch.Tensor]]:
    return lambda: (call(),)


def compare_with(
    cell: object, expected: Sequence[Expected], results: Mapping[str, Callable[[], Sequence[torch.Tensor]]]
) -> list[Check]:
    """A check for each expected tensor of each result; ``cell`` is what was run, by its ``str``."""
    checks = []
    for name, result in results.items():
        errors: list[float] = []
        reason = None
        try:
            for value, what in zip(result(), expected, strict=True):
                errors.append(float((value.float() - what.reference).abs().max()))
        except Exception as problem:  # whatever a peer raises is the result of its check
            errors, reason = [math.nan] * len(expected), reason_of(problem)
        for error, what in zip(errors, expected, strict=True):
            finite = math.isfinite(error)
            why = None if finite else reason or f"the {'output' if what.tensor is None else what.tensor} is not finite"
            checks.append(Check(str(cell), name, error if finite else None, what.tolerance, why, what.tensor))
    return checks


def reason_of(error: BaseException) -> str:
    """One line of an exception, short enough for a table, and without the folders of the machine it comes from."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    text = PATH.sub(r"\1", text)
    return text if len(text) <= 300 else text[:297] + "..."
