"""CPU tensors that pose as a card's: the launchers run as they are, and kernels are recorded instead of launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from flashhopper import current, launch, launch_backward, launch_schedule, ops
from flashhopper.config import AnySpec
from flashhopper.last_call import LastCalls
from flashhopper.plan import EmptyPlan, Plan
from flashhopper.problem import AttentionProblem

NUM_SMS = 132
EMPTY_ON_CPU: Any = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]


class PosedCard:
    """What was asked of it: kernels as they were looked up, launches as ``(spec, arguments)``, devices switched to."""

    def __init__(self) -> None:
        self.specs: list[AnySpec] = []
        self.launches: list[tuple[AnySpec, tuple[Any, ...]]] = []
        self.switches: list[int | None] = []
        self.current: int | None = None
        """The index of CPU tensors' device is None."""

    def get_kernel(self, spec: AnySpec) -> Any:
        self.specs.append(spec)
        return lambda *arguments: self.launches.append((spec, arguments))

    @contextmanager
    def device(self, index: int | None) -> Iterator[None]:
        self.switches.append(index)
        before, self.current = self.current, index
        yield
        self.current = before


def pose(monkeypatch: pytest.MonkeyPatch) -> PosedCard:
    card = PosedCard()
    kinds = {False: launch._DensePlan, True: launch._RaggedPlan}

    def make_plan(
        problem: AttentionProblem, has: launch.Given | None = None, config: Any = None
    ) -> Plan:  # as the real one, but for the look at the device
        if problem.options.sm_margin >= NUM_SMS:
            raise ValueError("sm_margin")
        if 0 in (problem.batch, problem.rows_q, problem.rows_k):
            return EmptyPlan(problem)
        return kinds[problem.ragged is not None](problem, NUM_SMS, config, has)

    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(current, "device", lambda: card.current)
    monkeypatch.setattr(current, "empty_strided", EMPTY_ON_CPU)
    monkeypatch.setattr(torch.cuda, "device", card.device)
    monkeypatch.setattr(launch, "make_plan", make_plan)
    monkeypatch.setattr(launch, "_plans", {})
    for recogniser in (ops, launch_backward):
        monkeypatch.setattr(recogniser, "_last_calls", LastCalls())
    monkeypatch.setattr(launch, "scheduler_workspace", lambda index: torch.zeros(4, dtype=torch.int32))
    monkeypatch.setattr(launch_backward, "_plans", {})
    monkeypatch.setattr(launch_backward, "hopper_multiprocessors", lambda device: NUM_SMS)
    for module in (launch, launch_backward, launch_schedule):
        monkeypatch.setattr(module, "get_kernel", card.get_kernel)
    return card
