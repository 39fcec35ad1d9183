"""``flashhopper bench varlen`` and ``bench masks``: each case by every implementation, forward and backward."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flashhopper import reference, reference_varlen
from flashhopper.bench.case_peers import CASE_NAMES, OURS_DENSE, CasePeer, CaseTensors
from flashhopper.bench.cases import Case
from flashhopper.bench.check import Expected, compare_with, random_like, reason_of, tolerance_of
from flashhopper.bench.environment import describe_machine, matmul_tflops
from flashhopper.bench.passes import BACKWARD, FORWARD, OURS, Pass
from flashhopper.bench.results import geomean
from flashhopper.bench.run import CLOSING_SECONDS, MATMUL, Progress
from flashhopper.bench.timing import Candidate, Clock, Plan, measure, medians
from flashhopper.problem import RaggedTensors

CASE_PASSES = (FORWARD, BACKWARD)
CASE_PEERS = tuple(name for name in CASE_NAMES if name not in (OURS, OURS_DENSE))


@dataclass(frozen=True)
class CaseRow:
    """TFLOPS on visible pairs of one case and pass, by implementation."""

    case: Case
    kind: Pass
    tflops: dict[str, float]

    @property
    def ratio(self) -> float | None:
        """Ours to the fastest peer."""
        best = max((self.tflops[name] for name in CASE_PEERS if name in self.tflops), default=None)
        return round(self.tflops[OURS] / best, 3) if best and OURS in self.tflops else None

    @property
    def to_dense(self) -> float | None:
        """Ours to our own speed on a dense batch of the same work."""
        dense = self.tflops.get(OURS_DENSE)
        return round(self.tflops[OURS] / dense, 3) if dense and OURS in self.tflops else None

    def to_json(self) -> dict[str, Any]:
        dense = {"dense_seqlen": self.case.dense().lengths[0], "to_dense": self.to_dense} if self.case.ragged else {}
        rates = {name: self.tflops.get(name) for name in CASE_NAMES if self.case.ragged or name != OURS_DENSE}
        return {**self.case.to_json(), "pass": self.kind.name, **rates, "ratio": self.ratio, **dense}


@dataclass
class CaseResults:
    """A whole run, in the form of the other result files."""

    command: str
    machine: dict[str, Any]
    versions: dict[str, str | None]
    matmul_tflops: dict[str, float | None] = field(default_factory=lambda: {"before": None, "after": None})
    rows: list[CaseRow] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def skip(self, name: str, where: str, reason: str) -> None:
        """Note a missing figure; for our own implementation it is an error of the run."""
        self.skipped.append({"implementation": name, "where": where, "reason": reason})
        if name in (OURS, OURS_DENSE):
            self.errors.append(f"{where}: {reason}")

    def summary(self) -> dict[str, Any]:
        """Geometric means and worst of ours to the best peer and to our dense speed, for each pass."""
        return {kind.name: self._summary([row for row in self.rows if row.kind == kind]) for kind in CASE_PASSES}

    @staticmethod
    def _summary(rows: Sequence[CaseRow]) -> dict[str, Any]:
        summary: dict[str, Any] = {}
        for key, values in (("best_peer", [row.ratio for row in rows]), ("dense", [row.to_dense for row in rows])):
            known = [value for value in values if value is not None]
            summary[f"geomean_vs_{key}"] = geomean(known)
            summary[f"min_vs_{key}"] = min(known, default=None)
        return summary

    def to_json(self) -> dict[str, Any]:
        return {
            **self.machine,
            "command": self.command,
            "versions": self.versions,
            "matmul_tflops": self.matmul_tflops,
            "rows": [row.to_json() for row in self.rows],
            "summary": self.summary(),
            "checks": self.checks,
            "skipped": self.skipped,
            "errors": self.errors,
        }


@dataclass(frozen=True)
class CaseOptions:
    """What to run and for how long; ``budget_seconds`` bounds the run, checks and compiling included."""

    command: str
    cases: Sequence[Case]
    peers: Sequence[CasePeer]
    seed: int
    budget_seconds: float = 600.0
    seconds_per_cell: float = 6.0


class CaseRun:
    """Checks each case on a small shape, then times it, forward and backward."""

    def __init__(self, options: CaseOptions, clock: Clock, progress: Progress, device: str = "cuda") -> None:
        self.options, self.clock, self.progress = options, clock, progress
        self.rng = random.Random(options.seed)
        self.generator = torch.Generator(device).manual_seed(options.seed)
        versions = {peer.name: peer.version() for peer in options.peers}
        self.results = CaseResults(options.command, describe_machine(), versions)
        self.started = clock.now()
        self.peers: list[CasePeer] = []
        for peer in options.peers:
            reason = peer.available()
            if reason is None:
                self.peers.append(peer)
            else:
                self.results.skip(peer.name, "everywhere", reason)

    def steps(self) -> int:
        """Units of work, for a progress bar."""
        return len(self.options.cases) * (1 + len(CASE_PASSES)) + 2

    def run(self) -> CaseResults:
        cases = self.options.cases
        for case in cases:
            self.check(case.small())
        self.results.matmul_tflops["before"] = matmul_tflops(self.clock)
        self.progress.step(MATMUL)
        for index, case in enumerate(cases):
            for later, kind in enumerate(CASE_PASSES):
                left = len(CASE_PASSES) * (len(cases) - index) - later
                self.time(case, kind, self.seconds_for(left))
        self.results.matmul_tflops["after"] = matmul_tflops(self.clock)
        self.progress.step(MATMUL)
        return self.results

    def seconds_for(self, rows_left: int) -> float:
        """The next row's share of what is left of the budget."""
        left = self.options.budget_seconds - CLOSING_SECONDS - (self.clock.now() - self.started)
        return max(0.0, min(self.options.seconds_per_cell, left / rows_left))

    def tensors(self, case: Case, kind: Pass) -> CaseTensors:
        tensors = CaseTensors.random(case, self.generator)
        for x in tensors.inputs:
            x.requires_grad_(kind.has_gradients)
        return tensors

    def check(self, case: Case) -> None:
        """Output and gradients of each implementation against fp32."""
        tensors = self.tensors(case, BACKWARD)
        dout = random_like(tensors.inputs[0], self.generator)
        expected = expected_of(tensors, dout)
        gradients = {peer.name: _all_results(peer, tensors, dout) for peer in self.peers if peer.has_backward}
        outputs = {peer.name: _output(peer, tensors) for peer in self.peers if not peer.has_backward}
        checks = compare_with(case, expected, gradients) + compare_with(case, expected[:1], outputs)
        for check in checks:
            self.results.checks.append(check.to_json())
            if not check.ok:
                reason = check.reason or f"error {check.error:.2e} is over the tolerance {check.tolerance:.2e}"
                where = f"check {case}" if check.tensor is None else f"check {check.tensor} {case}"
                self.results.skip(check.name, where, reason)
        errors = (f"{check.label} {check.error:.1e}" for check in checks if check.error is not None)
        self.progress.say(f"checked {case}: largest error {', '.join(errors)}")
        self.progress.step(f"compile and check {case}")

    def time(self, case: Case, kind: Pass, seconds: float) -> None:
        tensors = self.tensors(case, kind)
        work = {peer.name: (peer, tensors) for peer in self.peers if peer.has_backward or not kind.has_gradients}
        if case.ragged and OURS in work:
            work[OURS_DENSE] = work[OURS][0], self.tensors(case.dense(), kind)
        ready: list[Candidate] = []
        with torch.set_grad_enabled(kind.has_gradients):
            for name, (peer, given) in work.items():
                try:
                    candidate = Candidate(name, self.call(peer, given, kind), peer.session)
                    candidate.launch(1)
                    self.clock.synchronize()
                except Exception as error:  # whatever a peer raises is its result in this case
                    self.results.skip(name, f"{case} {kind.name}", reason_of(error))
                else:
                    ready.append(candidate)
            times = medians(measure(ready, Plan.within(seconds), self.clock, self.rng)) if ready else {}
        rates = {name: kind.flop_factor * work[name][1].case.tflops(ms) for name, ms in times.items()}
        row = CaseRow(case, kind, {name: round(rate, 1) for name, rate in rates.items()})
        self.results.rows.append(row)
        self.progress.say(describe(row))
        self.progress.step(f"{case} {kind.name}")

    def call(self, peer: CasePeer, tensors: CaseTensors, kind: Pass) -> Callable[[], object]:
        """The call that is timed: the forward, or the backward over a graph that is recorded here."""
        prepared = peer.prepare(tensors)
        if not kind.has_gradients:
            return prepared.forward
        dout = prepared.arrange(random_like(tensors.inputs[0].detach(), self.generator))
        with peer.session():
            out = prepared.forward()
        return lambda: torch.autograd.grad(out, prepared.leaves, dout, retain_graph=True)


def describe(row: CaseRow) -> str:
    """``zipf, causal bfloat16 d128 backward  ours 590.1  fa4 540.2  ratio 1.092  to dense 0.971``."""
    rates = "  ".join(f"{name} {rate:.1f}" for name, rate in row.tflops.items())
    ratios = [f"{text} {value:.3f}" for text, value in (("ratio", row.ratio), ("to dense", row.to_dense)) if value]
    return "  ".join([f"{row.case} {row.kind.name}", rates, *ratios])


def expected_of(tensors: CaseTensors, dout: torch.Tensor) -> list[Expected]:
    """Out, dq, dk, dv by the reference in fp32, with tolerances by what the inputs' dtype loses (softcap: 3 times)."""
    exact = _by_reference(tensors, dout, torch.float32)
    plain = _by_reference(tensors, dout, dout.dtype)
    factor = 3.0 if tensors.case.softcap else 2.0
    return [
        Expected(name, wanted, tolerance_of(wanted, low, factor))
        for name, wanted, low in zip((None, "dq", "dk", "dv"), exact, plain, strict=True)
    ]


def _by_reference(tensors: CaseTensors, dout: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    case, (q, k, v) = tensors.case, (x.detach().to(dtype).requires_grad_() for x in tensors.inputs)
    options: dict[str, Any] = case.masks | {"softcap": case.softcap, "learnable_sink": tensors.sink}
    options |= {"softmax_scale": case.d**-0.5, "compute_dtype": dtype}
    with torch.enable_grad():
        if case.ragged:
            longest = max(case.lengths)
            ragged = RaggedTensors(longest, longest, tensors.cu_seqlens, tensors.cu_seqlens)
            out, _ = reference_varlen.attention(q, k, v, ragged, **options)
        else:
            out, _ = reference.attention(q, k, v, **options)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.to(dtype))]


def _all_results(peer: CasePeer, tensors: CaseTensors, dout: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
    """Out, dq, dk and dv in the layout of the inputs."""

    def results() -> list[torch.Tensor]:
        prepared = peer.prepare(tensors)
        with torch.enable_grad(), peer.session():
            out = prepared.forward()
            gradients = torch.autograd.grad(out, prepared.leaves, prepared.arrange(dout))
        return [prepared.restore(x.detach()) for x in (out, *gradients)]

    return results


def _output(peer: CasePeer, tensors: CaseTensors) -> Callable[[], list[torch.Tensor]]:
    def output() -> list[torch.Tensor]:
        with torch.no_grad(), peer.session():
            prepared = peer.prepare(tensors)
            return [prepared.restore(prepared.forward())]

    return output
