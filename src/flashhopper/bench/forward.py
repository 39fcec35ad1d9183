"""``flashhopper bench forward``: every installed implementation over the grid, in one run on one card."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flashhopper.bench.check import check_cell, check_outputs, random_inputs, reason_of
from flashhopper.bench.environment import describe_machine, matmul_tflops
from flashhopper.bench.grid import Cell
from flashhopper.bench.peers import Peer
from flashhopper.bench.results import ForwardResults, Row
from flashhopper.bench.timing import Candidate, Clock, Plan, cold_burst, measure, medians

COOL_SECONDS = 2.5
CLOSING_SECONDS = 2.0  # the matmul rate after the run
MATMUL = "matmul rate"


@dataclass(frozen=True)
class ForwardOptions:
    """What to run and for how long; ``budget_seconds`` bounds the whole run, compiling included."""

    cells: Sequence[Cell]
    peers: Sequence[Peer]
    seed: int
    budget_seconds: float = 300.0
    seconds_per_cell: float = 6.0
    burst: bool = True


@dataclass(frozen=True)
class Progress:
    """How a run reports: ``step`` when a unit of work is done, ``say`` for a line worth keeping."""

    step: Callable[[str], None]
    say: Callable[[str], None]


class ForwardRun:
    """The stages of one run, in order: check and compile, cold burst, the grid."""

    def __init__(self, options: ForwardOptions, clock: Clock, progress: Progress, device: str = "cuda") -> None:
        self.options = options
        self.clock = clock
        self.progress = progress
        self.rng = random.Random(options.seed)
        self.generator = torch.Generator(device).manual_seed(options.seed)
        self.results = ForwardResults(describe_machine(), {peer.name: peer.version() for peer in options.peers})
        self.started = clock.now()
        self.peers: list[Peer] = []
        for peer in options.peers:
            reason = peer.available()
            if reason is None:
                self.peers.append(peer)
            else:
                self.results.skip(peer.name, "everywhere", reason)

    def burst_cells(self) -> list[Cell]:
        return [cell for cell in self.options.cells if cell.is_headline] if self.options.burst else []

    def check_cells(self) -> list[Cell]:
        return list(dict.fromkeys(check_cell(cell) for cell in self.options.cells))

    def steps(self) -> int:
        """Units of work, for a progress bar."""
        return len(self.check_cells()) + len(self.burst_cells()) + len(self.options.cells) + 2

    @torch.no_grad()
    def run(self) -> ForwardResults:
        for cell in self.check_cells():
            self.check(cell)
        self.results.matmul_tflops["before"] = matmul_tflops(self.clock)
        self.progress.step(MATMUL)
        for cell in self.burst_cells():
            self.burst(cell)
        for index, cell in enumerate(self.options.cells):
            self.cell(cell, self.seconds_for(len(self.options.cells) - index))
        self.results.matmul_tflops["after"] = matmul_tflops(self.clock)
        self.progress.step(MATMUL)
        return self.results

    def seconds_for(self, cells_left: int) -> float:
        """The next cell's share of what is left of the budget."""
        left = self.options.budget_seconds - CLOSING_SECONDS - (self.clock.now() - self.started)
        return max(0.0, min(self.options.seconds_per_cell, left / cells_left))

    def check(self, cell: Cell) -> None:
        """One small call per implementation: compiles its kernel for this head_dim and mask, and checks its output."""
        inputs = random_inputs(cell, self.generator)
        checks = check_outputs(cell, inputs, {peer.name: _output(peer, inputs, cell) for peer in self.peers})
        for check in checks:
            self.results.checks.append(check.to_json())
            if not check.ok:
                reason = check.reason or f"error {check.error:.2e} is over the tolerance {check.tolerance:.2e}"
                self.results.skip(check.name, f"check {cell}", reason)
                self.progress.say(f"{check.name}: check {cell}: {reason}")
        errors = (f"{check.name} {check.error:.1e}" for check in checks if check.error is not None)
        self.progress.say(f"checked {cell}: largest error {', '.join(errors)}")
        self.progress.step(f"compile and check {cell}")

    def candidates(self, cell: Cell) -> list[Candidate]:
        """Those that can run the cell, each called once; the others are noted with their reason."""
        q, k, v = random_inputs(cell, self.generator)
        ready = []
        for peer in self.peers:
            try:
                candidate = peer.candidate(q, k, v, cell.causal)
                candidate.launch(1)
                self.clock.synchronize()
            except Exception as error:  # whatever a peer raises is its result in this cell
                self.results.skip(peer.name, str(cell), reason_of(error))
                self.progress.say(f"{peer.name}: {cell}: {reason_of(error)}")
            else:
                ready.append(candidate)
        return ready

    def timed(self, cell: Cell, times: Callable[[list[Candidate]], dict[str, float]]) -> Row:
        """The cell's row, empty if timing itself failed (an asynchronous CUDA error cannot be told apart by peer)."""
        candidates = self.candidates(cell)
        try:
            return Row.of(cell, times(candidates) if candidates else {})
        except Exception as error:
            for candidate in candidates:
                self.results.skip(candidate.name, str(cell), reason_of(error))
            return Row(cell, {})

    def burst(self, cell: Cell) -> None:
        row = self.timed(cell, lambda ready: cold_burst(ready, self.clock, COOL_SECONDS))
        self.results.burst.append(row)
        self.progress.say("cold  " + describe_row(row))
        self.progress.step(f"cold burst {cell}")

    def cell(self, cell: Cell, seconds: float) -> None:
        plan = Plan.within(seconds)
        row = self.timed(cell, lambda ready: medians(measure(ready, plan, self.clock, self.rng)))
        self.results.rows.append(row)
        self.progress.say(describe_row(row))
        self.progress.step(str(cell))


def describe_row(row: Row) -> str:
    """``d128 causal s=8192  ours 690.1  fa4 640.2``, with the ratio to the best peer."""
    rates = "  ".join(f"{name} {rate:.1f}" for name, rate in row.tflops.items() if rate is not None)
    ratio = row.ratio()
    verdict = "" if ratio is None else f"  ratio {ratio:.3f}"
    return f"d{row.cell.d} {row.cell.mask} s={row.cell.s}  {rates}{verdict}"


def _output(
    peer: Peer, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], cell: Cell
) -> Callable[[], torch.Tensor]:
    def output() -> torch.Tensor:
        call = peer.prepare(*inputs, cell.causal)
        with peer.session():
            return peer.output(call())

    return output
