"""``flashhopper bench forward``, ``backward``, ``train``: every installed implementation over the grid, in one run."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flashhopper.bench.check import check_cell, reason_of
from flashhopper.bench.environment import describe_machine, matmul_tflops
from flashhopper.bench.grid import Cell
from flashhopper.bench.passes import FORWARD, OUR_NAMES, Pass
from flashhopper.bench.peers import Peer
from flashhopper.bench.results import GridResults, Row
from flashhopper.bench.timing import Candidate, Clock, Plan, cold_burst, measure, medians
from flashhopper.bench.work import Work, work_of

COOL_SECONDS = 2.5
CLOSING_SECONDS = 2.0  # the matmul rate after the run
MATMUL = "matmul rate"
MEMORY_OF = (*OUR_NAMES, "fa4")


@dataclass(frozen=True)
class GridOptions:
    """What to run and for how long; ``budget_seconds`` bounds the whole run, compiling included."""

    cells: Sequence[Cell]
    peers: Sequence[Peer]
    seed: int
    budget_seconds: float = 300.0
    seconds_per_cell: float = 6.0
    burst: bool = True
    kind: Pass = FORWARD


@dataclass(frozen=True)
class Progress:
    """How a run reports: ``step`` when a unit of work is done, ``say`` for a line worth keeping."""

    step: Callable[[str], None]
    say: Callable[[str], None]


class GridRun:
    """The stages of one run, in order: check and compile, cold burst, the grid."""

    def __init__(self, options: GridOptions, clock: Clock, progress: Progress, device: str = "cuda") -> None:
        self.options = options
        self.clock = clock
        self.progress = progress
        self.rng = random.Random(options.seed)
        self.generator = torch.Generator(device).manual_seed(options.seed)
        versions = {peer.name: peer.version() for peer in options.peers}
        self.results = GridResults(describe_machine(), versions, kind=options.kind)
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

    def run(self) -> GridResults:
        with torch.set_grad_enabled(self.options.kind.has_gradients):
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

    def work(self, cell: Cell) -> Work:
        return work_of(self.options.kind, cell, self.generator)

    def check(self, cell: Cell) -> None:
        """One small call per implementation: compiles its kernel for this head_dim and mask, and checks its result."""
        checks = self.work(cell).check(self.peers)
        for check in checks:
            self.results.checks.append(check.to_json())
            if not check.ok:
                reason = check.reason or f"error {check.error:.2e} is over the tolerance {check.tolerance:.2e}"
                where = f"check {cell}" if check.tensor is None else f"check {check.tensor} {cell}"
                self.results.skip(check.name, where, reason)
                self.progress.say(f"{check.name}: {where}: {reason}")
        errors = (f"{check.label} {check.error:.1e}" for check in checks if check.error is not None)
        self.progress.say(f"checked {cell}: largest error {', '.join(errors)}")
        self.progress.step(f"compile and check {cell}")

    def candidates(self, work: Work) -> list[Candidate]:
        """Those that can run the cell, each called once; the others are noted with their reason."""
        ready = []
        for peer in self.peers:
            try:
                candidate = work.candidate(peer)
                candidate.launch(1)
                self.clock.synchronize()
            except Exception as error:  # whatever a peer raises is its result in this cell
                self.results.skip(peer.name, str(work.cell), reason_of(error))
                self.progress.say(f"{peer.name}: {work.cell}: {reason_of(error)}")
            else:
                ready.append(candidate)
        return ready

    def timed(self, work: Work, times: Callable[[list[Candidate]], dict[str, float]]) -> Row:
        """The cell's row, empty if timing itself failed (an asynchronous CUDA error cannot be told apart by peer)."""
        candidates = self.candidates(work)
        try:
            return Row.of(work.cell, times(candidates) if candidates else {}, self.options.kind)
        except Exception as error:
            for candidate in candidates:
                self.results.skip(candidate.name, str(work.cell), reason_of(error))
            return Row(work.cell, {})

    def memory(self, work: Work, names: Sequence[str]) -> dict[str, dict[str, float]]:
        """What ours and FA4 keep and allocate, of those in ``names``; after timing, which it would disturb."""
        found: dict[str, dict[str, float]] = {}
        for peer in self.peers:
            if peer.name not in names or peer.name not in MEMORY_OF:
                continue
            try:
                memory = work.memory(peer)
            except Exception as error:
                self.results.skip(peer.name, f"memory {work.cell}", reason_of(error))
            else:
                if memory:
                    found[peer.name] = memory
        return found

    def burst(self, cell: Cell) -> None:
        row = self.timed(self.work(cell), lambda ready: cold_burst(ready, self.clock, COOL_SECONDS))
        self.results.burst.append(row)
        self.progress.say("cold  " + describe_row(row))
        self.progress.step(f"cold burst {cell}")

    def cell(self, cell: Cell, seconds: float) -> None:
        plan = Plan.within(seconds)
        work = self.work(cell)
        row = self.timed(work, lambda ready: medians(measure(ready, plan, self.clock, self.rng)))
        row = dataclasses.replace(row, memory=self.memory(work, list(row.tflops)))
        self.results.rows.append(row)
        self.progress.say(describe_row(row))
        self.progress.step(str(cell))


def describe_row(row: Row) -> str:
    """``d128 causal s=8192  ours 690.1  fa4 640.2``, with the ratio to the best peer."""
    rates = "  ".join(f"{name} {rate:.1f}" for name, rate in row.tflops.items() if rate is not None)
    ratio = row.ratio()
    verdict = "" if ratio is None else f"  ratio {ratio:.3f}"
    return f"d{row.cell.d} {row.cell.mask} s={row.cell.s}  {rates}{verdict}"
