"""``flashhopper tune``: the neighbours of rows of the tile tables, checked, timed and halved until the best are left.

Successive halving: all configurations are timed shortly, side by side; the faster half is timed again for as long, and
so on. The row's own configuration is in every round: it is what all others are compared with.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flashhopper.bench.configs import DEFAULT, AnyConfig, MainSpec
from flashhopper.bench.environment import describe_machine
from flashhopper.bench.findings import Finding, LengthClass, Standing
from flashhopper.bench.run import Progress
from flashhopper.bench.sampler import Sampler
from flashhopper.bench.table_rows import AnyRow
from flashhopper.bench.timing import Clock, Plan
from flashhopper.bench.variants import Ratio, VariantResults, VariantRow, rows_of
from flashhopper.heuristics import TileRow
from flashhopper.inspect_kernel import PtxasReport

SEQLENS = (512, 1024, 2048, 4096, 16384)
FINALISTS = 4  # beside the row's own
MIN_ROUNDS = 3


def without_unfit(
    classes: Sequence[LengthClass], report_of: Callable[[MainSpec], PtxasReport | None]
) -> tuple[list[LengthClass], list[dict[str, str]]]:
    """The classes without configurations whose kernels no row may have, and those with their reasons. The row's own
    stays: it is there."""
    kept, dropped = [], []
    for one in classes:
        configs = dict(one.configs)
        for name, spec in one.specs.items():
            report = report_of(spec)
            reason = "did not compile" if report is None else report.problem
            if reason is not None and name != DEFAULT:
                dropped.append({"variant": name, "where": str(one), "reason": reason})
                del configs[name]
        kept.append(dataclasses.replace(one, configs=configs))
    return kept, dropped


def rungs(count: int, finalists: int = FINALISTS) -> list[int]:
    """How many of ``count`` configurations take part in each round of halving, the first and the last included."""
    sizes = [count]
    while sizes[-1] > finalists:
        sizes.append(max(finalists, sizes[-1] // 2))
    return sizes


def rung_plan(seconds: float, candidates: int) -> Plan:
    """How to measure ``candidates`` in ``seconds``: rounds as long as ever, or with shorter samples if that would be
    fewer than MIN_ROUNDS of them."""
    plan = Plan.within(seconds)
    slot_ms = 1000 * plan.seconds / (MIN_ROUNDS * max(candidates, 1) * 1.25)  # a quarter is the samples' lead-in
    return dataclasses.replace(plan, sample_ms=min(plan.sample_ms, slot_ms), min_rounds=MIN_ROUNDS)


@dataclass
class TuneResults(VariantResults):
    """``rows``: every configuration in every shape, each as its last round found it."""

    findings: list[Finding] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        data = super().to_json()
        findings = [finding.to_json(self.machine["device"]) for finding in self.findings]
        return {**self.machine, "findings": findings, **{key: data[key] for key in data if key not in self.machine}}

    def new_rows(self) -> dict[int, list[AnyRow]]:
        """What takes the place of rows, by their number. A row for both masks, of which one has a new
        configuration, becomes two."""
        device = self.machine["device"]
        found: dict[int, dict[bool, AnyRow]] = {}
        for finding in self.findings:
            row = finding.row(device)
            if row is not None:
                found.setdefault(finding.of.number, {})[finding.of.causal] = row
        rows = {finding.of.number: finding.of.row for finding in self.findings}
        return {number: _for_masks(rows[number], by_mask) for number, by_mask in found.items()}


def _for_masks(row: AnyRow, new: Mapping[bool, AnyRow]) -> list[AnyRow]:
    if isinstance(row, TileRow) or row.causal is not None:
        return list(new.values())
    return [new.get(causal, row._replace(causal=causal)) for causal in (False, True)]


@dataclass(frozen=True)
class TuneOptions:
    """``budget_seconds`` bounds checks and timing; compiling comes before. ``dropped``: configurations that are not to
    run, as :attr:`VariantResults.infeasible` has them."""

    classes: Sequence[LengthClass]
    seed: int
    budget_seconds: float
    dropped: Sequence[dict[str, str]] = ()


class TuneRun:
    """Checks everything first, then halves class by class; a class's share of the budget is an equal part of the rest,
    a round's of the class's."""

    def __init__(self, options: TuneOptions, clock: Clock, progress: Progress, device: str = "cuda") -> None:
        self.options = options
        self.clock = clock
        self.progress = progress
        self.results = TuneResults(describe_machine(), infeasible=list(options.dropped))
        self.kind = options.classes[0].kind
        self.sampler = Sampler(self.kind, options.seed, clock, progress, self.results, device)

    def steps(self) -> int:
        """Units of work, for a progress bar."""
        return sum(1 + len(rungs(len(one.configs) - 1)) for one in self.options.classes)

    def run(self) -> TuneResults:
        end = self.clock.now() + self.options.budget_seconds
        classes = [dataclasses.replace(one, configs=dict(one.configs)) for one in self.options.classes]
        with torch.set_grad_enabled(self.kind.has_gradients):
            for one in classes:
                assert isinstance(one.configs, dict)
                self.sampler.check(one.cells[0], one.configs)
            for index, one in enumerate(classes):
                left = end - self.clock.now()
                if DEFAULT not in one.configs:
                    self.results.skip(DEFAULT, str(one), "the row's own kernel failed: nothing to compare with")
                elif left <= 0:
                    reason = "the budget had ended: a larger --budget-seconds, or fewer --seqlen"
                    self.results.skip("everything", str(one), reason, error=True)
                else:
                    self.halve(one, self.clock.now() + left / (len(classes) - index))
        return self.results

    def halve(self, one: LengthClass, end: float) -> None:
        """Time the class until ``end``. Whoever fails in a shape is out."""
        configs = dict(one.configs)
        last: dict[str, Standing] = {}
        standings: list[Standing] = []
        sizes = rungs(len(configs) - 1)
        for number, size in enumerate(sizes):
            if number:
                kept = [standing.name for standing in standings if standing.name != DEFAULT][:size]
                configs = {name: configs[name] for name in (DEFAULT, *kept)}
            left = end - self.clock.now()
            if left <= 0:
                note = f"the budget ended after {number} of {len(sizes)} rounds of halving"
                self.results.skip("the rest", str(one), note)
                break
            standings = self.rung(one, configs, left / (len(sizes) - number))
            if not any(standing.name == DEFAULT for standing in standings):
                self.results.skip(DEFAULT, str(one), "the row's own kernel failed: nothing to compare with")
                return
            last |= {standing.name: standing for standing in standings}
            first = standings[0]
            self.progress.say(f"{one}: {len(standings)} left, first {first.name} {first.gain.value:.3f}")
            self.progress.step(f"{one}: {size} configurations")
        self.results.rows += itertools.chain.from_iterable(standing.rows for standing in last.values())
        self.results.findings.append(Finding(one, tuple(standings)))

    def rung(self, one: LengthClass, configs: Mapping[str, AnyConfig], seconds: float) -> list[Standing]:
        """Those that ran in every shape, fastest first."""
        end = self.clock.now() + seconds
        rows: dict[str, list[VariantRow]] = {}
        ratios: dict[str, list[Ratio]] = {}
        for index, cell in enumerate(one.cells):
            share = (end - self.clock.now()) / (len(one.cells) - index)
            samples = self.sampler.samples(cell, configs, rung_plan(share, len(configs)))
            if DEFAULT not in samples:
                return []
            for row in rows_of(cell, samples, configs, self.kind):
                rows.setdefault(row.variant, []).append(row)
                ratios.setdefault(row.variant, []).append(Ratio.of(samples[DEFAULT], samples[row.variant]))
        complete = [name for name, found in rows.items() if len(found) == len(one.cells)]
        standings = [Standing.of(name, rows[name], ratios[name]) for name in complete]
        return sorted(standings, key=lambda standing: -standing.gain.value)
