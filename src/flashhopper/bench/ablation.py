"""``flashhopper bench ablation`` and ``bench tiles``: explicit configurations of our own kernel, interleaved."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flashhopper.bench.check import check_cell, check_outputs, random_inputs, reason_of
from flashhopper.bench.configs import DEFAULT, VariantPlan
from flashhopper.bench.environment import describe_machine
from flashhopper.bench.grid import Cell
from flashhopper.bench.peers import Peer
from flashhopper.bench.run import Progress
from flashhopper.bench.timing import Candidate, Clock, Plan, measure, medians
from flashhopper.bench.variants import VariantResults, VariantRow
from flashhopper.config import ForwardConfig
from flashhopper.launch import forward
from flashhopper.problem import AttentionOptions


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
        self.rng = random.Random(options.seed)
        self.generator = torch.Generator(device).manual_seed(options.seed)
        self.results = VariantResults(describe_machine(), infeasible=list(options.plan.infeasible))
        self.checked: set[tuple[Cell, ForwardConfig]] = set()
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

    @torch.no_grad()
    def run(self) -> VariantResults:
        """Check everything first, so that the timing is timing only."""
        started = self.clock.now()
        cells = {cell: dict(configs) for cell, configs in self.options.plan.cells.items()}
        for cell, configs in cells.items():
            self.check(cell, configs)
        for index, (cell, configs) in enumerate(cells.items()):
            left = self.options.budget_seconds - (self.clock.now() - started)
            share = left / (len(cells) - index)
            self.time(cell, configs, Plan.within(min(self.options.seconds_per_cell, share)))
            self.progress.step(str(cell))
        return self.results

    def check(self, cell: Cell, variants: dict[str, ForwardConfig]) -> None:
        """Run each configuration once on a small shape; those that raise or err are taken out of ``variants``."""
        small = check_cell(cell)
        todo = {name: config for name, config in variants.items() if (small, config) not in self.checked}
        inputs = random_inputs(small, self.generator)
        outputs = {name: _output(inputs, config, small.causal) for name, config in todo.items()}
        for check in check_outputs(small, inputs, outputs) if outputs else ():
            if check.ok:
                self.checked.add((small, todo[check.name]))
                continue
            reason = check.reason or f"error {check.error:.2e} is over the tolerance {check.tolerance:.2e}"
            self.results.skip(check.name, f"check {small}", reason, error=True)
            self.progress.say(f"{check.name}: check {small}: {reason}")
            del variants[check.name]
        self.progress.step(f"compile and check {cell}")

    def time(self, cell: Cell, variants: dict[str, ForwardConfig], plan: Plan) -> None:
        q, k, v = random_inputs(cell, self.generator)
        options = AttentionOptions(causal=cell.causal)
        candidates = {name: Candidate(name, _call(q, k, v, options, config)) for name, config in variants.items()}
        for peer in self.peers:
            try:
                candidates[peer.name] = peer.candidate(q, k, v, cell.causal)
            except Exception as error:  # whatever a peer raises is its result
                self.results.skip(peer.name, str(cell), reason_of(error))
        for name, candidate in list(candidates.items()):
            try:
                candidate.launch(1)
                self.clock.synchronize()
            except Exception as error:
                self.results.skip(name, str(cell), reason_of(error), error=name in variants)
                del candidates[name]
        if not candidates:
            return
        times = medians(measure(list(candidates.values()), plan, self.clock, self.rng))
        base = times.get(DEFAULT)
        for name, milliseconds in times.items():
            ratio = None if base is None else round(base / milliseconds, 3)
            tflops = round(cell.tflops(milliseconds), 1)
            self.results.rows.append(VariantRow(cell, name, variants.get(name), tflops, ratio))
            self.progress.say(f"d{cell.d} {cell.mask} s={cell.s}  {name}: {tflops} TFLOPS, {ratio} of the default")


def _call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions, config: ForwardConfig
) -> Callable[[], object]:
    return lambda: forward(q, k, v, options, config)


def _output(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], config: ForwardConfig, causal: bool
) -> Callable[[], torch.Tensor]:
    return lambda: forward(*inputs, AttentionOptions(causal=causal), config)[0]
