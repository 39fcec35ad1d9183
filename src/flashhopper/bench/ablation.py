"""``flashhopper bench ablation`` and ``bench tiles``: explicit configurations of our own kernel, interleaved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashhopper.bench.configs import AnyConfig, VariantPlan
from flashhopper.bench.environment import describe_machine
from flashhopper.bench.grid import Cell
from flashhopper.bench.peers import Peer
from flashhopper.bench.run import Progress
from flashhopper.bench.sampler import Sampler
from flashhopper.bench.timing import Clock, Plan
from flashhopper.bench.variants import VariantResults, rows_of


@dataclass(frozen=True)
class VariantOptions:
    """What to run and for how long; ``budget_seconds`` bounds the run, checks and late compiling included."""

    plan: VariantPlan
    peers: Sequence[Peer]
    seed: int
    budget_seconds: float
    seconds_per_cell: float = 6.0


class VariantRun:
    """Checks and times the feasible configurations of each cell."""

    def __init__(self, options: VariantOptions, clock: Clock, progress: Progress, device: str = "cuda") -> None:
        self.options = options
        self.clock = clock
        self.progress = progress
        self.results = VariantResults(describe_machine(), infeasible=list(options.plan.infeasible))
        self.sampler = Sampler(options.plan.kind, options.seed, clock, progress, self.results, device)
        self.peers: list[Peer] = []
        for peer in options.peers:
            reason = peer.available()
            if reason is None:
                self.peers.append(peer)
            else:
                self.results.skip(peer.name, "everywhere", reason)

    def steps(self) -> int:
        """Units of work, for a progress bar."""
        return 2 * len(self.options.plan.cells)

    def run(self) -> VariantResults:
        """Check everything first, so that the timing is timing only."""
        started = self.clock.now()
        cells = {cell: dict(configs) for cell, configs in self.options.plan.cells.items()}
        with torch.set_grad_enabled(self.options.plan.kind.has_gradients):
            for cell, configs in cells.items():
                self.sampler.check(cell, configs)
            for index, (cell, configs) in enumerate(cells.items()):
                left = self.options.budget_seconds - (self.clock.now() - started)
                share = left / (len(cells) - index)
                self.time(cell, configs, Plan.within(min(self.options.seconds_per_cell, share)))
                self.progress.step(str(cell))
        return self.results

    def time(self, cell: Cell, configs: dict[str, AnyConfig], plan: Plan) -> None:
        samples = self.sampler.samples(cell, configs, plan, self.peers)
        for row in rows_of(cell, samples, configs, self.options.plan.kind):
            self.results.rows.append(row)
            speed = f"{row.tflops} TFLOPS, {row.ratio} of the default"
            self.progress.say(f"{cell.head_dims} {cell.mask} s={cell.s}  {row.variant}: {speed}")
