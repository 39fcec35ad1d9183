"""A clock that only launches move, peers that move it, and made-up results, for the tests of the benchmarks."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console

from flashhopper.bench import check
from flashhopper.bench.check import attention
from flashhopper.bench.grid import HEAD_DIMS, SEQLENS, Cell, grid
from flashhopper.bench.passes import FORWARD, Pass
from flashhopper.bench.peers import Peer
from flashhopper.bench.results import GridResults, Row
from flashhopper.bench.run import Progress
from flashhopper.bench.timing import Candidate

SMALL = [Cell("bfloat16", 16, causal, 4096, 1, 2) for causal in (False, True)]


class FakeClock:
    """Device and host share one time, which only launches and sleeps move."""

    def __init__(self) -> None:
        self.milliseconds = 0.0
        self.launched: list[str] = []

    def candidate(self, name: str, cost: Callable[[], float]) -> Candidate:
        def call() -> None:
            self.launched.append(name)
            self.milliseconds += cost()

        return Candidate(name, call)

    def mark(self) -> float:
        return self.milliseconds

    def elapsed_ms(self, start: float, end: float) -> float:
        return end - start

    def synchronize(self) -> None:
        pass

    def now(self) -> float:
        return self.milliseconds / 1000

    def sleep(self, seconds: float) -> None:
        self.launched.append("sleep")
        self.milliseconds += seconds * 1000


class FakeAttention(torch.autograd.Function):
    """Moves the peer's clock forward and, twice as far, backward; keeps q, k, v and as much as an LSE."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, peer: FakePeer) -> torch.Tensor:
        peer.spend(1.0)
        ctx.peer = peer
        ctx.save_for_backward(q, k, v, torch.zeros(q.shape[:3]))
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, _ = ctx.saved_tensors
        ctx.peer.spend(2.0)
        return q, k, v, None


class FakePeer(Peer):
    """Attention in plain PyTorch that moves the fake clock; ``factor`` spoils its output and gradients."""

    def __init__(
        self, name: str, clock: FakeClock, cost: float, factor: float = 1.0, reason: str | None = None
    ) -> None:
        super().__init__(name)
        self.clock, self.cost, self.factor, self.reason = clock, cost, factor, reason
        self.fails_causal = False

    def available(self) -> str | None:
        return self.reason

    def version(self) -> str | None:
        return "1.2.3"

    def spend(self, factor: float) -> None:
        self.clock.launched.append(self.name)
        self.clock.milliseconds += factor * self.cost

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Callable[[], object]:
        def call() -> object:
            if causal and self.fails_causal:
                raise RuntimeError("no causal kernel\nsecond line")
            if q.shape[1] != check.CHECK_SEQLEN:
                return FakeAttention.apply(q, k, v, self)
            self.spend(1.0)
            return attention(q, k, v, causal) * self.factor, None

        return call

    def ragged_call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int
    ) -> Callable[[], object]:
        lengths = cu_seqlens.diff()
        assert (int(cu_seqlens[0]), int(cu_seqlens[-1]), int(lengths.max())) == (0, q.shape[0], max_seqlen)
        return lambda: FakeAttention.apply(q, k, v, self)


def quiet() -> Progress:
    return Progress(step=lambda text: None, say=lambda text: None)


def made_up_results(kind: Pass = FORWARD) -> GridResults:
    """A full grid in which ours is 10 % ahead of fa4, except for one cell where it is 10 % behind.

    A pass with gradients has memory too, and our deterministic kernel at 80 % of the other.
    """
    rows = []
    for index, cell in enumerate(grid("bfloat16", HEAD_DIMS, (False, True), SEQLENS)):
        fa4 = 300.0 + index
        ours = fa4 * (0.9 if index == 5 else 1.1)
        rows.append(Row(cell, {"ours": round(ours, 1), "fa4": fa4, "fa3": 200.0, "cudnn": None, "fa2": fa4 / 2}))
    machine = {"device": "Made-up GPU", "date": "2001-02-03", "torch": "9.9", "driver": "1.0"}
    versions: dict[str, str | None] = {"ours": "0.1", "fa4": "4", "fa3": None}
    if kind.has_gradients:
        versions = {"ours": "0.1", "ours_deterministic": "0.1", "fa4": "4"}
        rows = [_with_gradients(row) for row in rows]
    results = GridResults(machine, versions, {"before": 700.0, "after": 690.0}, rows, kind=kind)
    results.burst = [row for row in rows if row.cell.is_headline]
    return results


def _with_gradients(row: Row) -> Row:
    rates = {name: rate for name, rate in row.tflops.items() if name != "fa3"}
    memory = {"ours": {"saved_mib": 258.0, "backward_peak_mib": 321.5}, "fa4": {"saved_mib": 259.0}}
    return Row(row.cell, {**rates, "ours_deterministic": 0.8 * (rates["ours"] or 0.0)}, memory)


def with_rates(row: Row, **rates: float | None) -> Row:
    return Row(row.cell, {**row.tflops, **rates})


def rendered(table: object) -> str:
    stream = io.StringIO()
    Console(file=stream, width=160).print(table)
    return stream.getvalue()
