"""Configurations of our own kernels, checked and sampled side by side: what ablation, tiles and tune are made of."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch

from flashhopper.bench.check import Check, check_cell, reason_of
from flashhopper.bench.configs import AnyConfig
from flashhopper.bench.grid import Cell
from flashhopper.bench.hang_guard import hang_guard
from flashhopper.bench.passes import Pass
from flashhopper.bench.peers import Call, GradientCall, Peer
from flashhopper.bench.run import Progress
from flashhopper.bench.timing import Candidate, Clock, Plan, measure
from flashhopper.bench.variants import VariantResults
from flashhopper.bench.work import Work, work_of
from flashhopper.config import BackwardConfig
from flashhopper.launch import forward
from flashhopper.launch_backward import backward
from flashhopper.options import AttentionOptions


class ConfigPeer(Peer):
    """Our own kernel in an explicit configuration: of the forward, or of the backward after the default forward."""

    def __init__(self, name: str, config: AnyConfig) -> None:
        super().__init__(name)
        self.config = config

    def available(self) -> str | None:
        return None

    def version(self) -> str | None:
        return None

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
        options = AttentionOptions(causal=causal)
        config = None if isinstance(self.config, BackwardConfig) else self.config
        return lambda: forward(q, k, v, options, config)

    def prepare_backward(
        self, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], dout: torch.Tensor, causal: bool
    ) -> GradientCall:
        """Without autograd: the launches alone."""
        if not isinstance(self.config, BackwardConfig):
            raise TypeError(f"{self.name} is a configuration of the forward, not of the backward")
        config, options = self.config, AttentionOptions(causal=causal)
        q, k, v = (x.detach() for x in inputs)
        out, lse = forward(q, k, v, options)
        return lambda: backward(dout, q, k, v, out, lse, options, config=config)[:3]


class Sampler:
    """Checks and times configurations of one pass, with inputs of its own; what fails is noted in ``results``."""

    def __init__(
        self,
        kind: Pass,
        seed: int,
        clock: Clock,
        progress: Progress,
        results: VariantResults,
        device: str = "cuda",
    ) -> None:
        self.kind = kind
        self.clock = clock
        self.progress = progress
        self.results = results
        self.rng = random.Random(seed)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.checked: set[tuple[Cell, AnyConfig]] = set()

    def check(self, cell: Cell, configs: dict[str, AnyConfig]) -> None:
        """Run each configuration once on a small shape; those that raise or err are taken out of ``configs``."""
        small = check_cell(cell)
        todo = {name: config for name, config in configs.items() if (small, config) not in self.checked}
        checks: list[Check] = []
        work = work_of(self.kind, small, self.generator)
        for name, config in todo.items():
            with hang_guard(name):
                checks += work.check([ConfigPeer(name, config)])
        failed = {check.name: check for check in checks if not check.ok}
        self.checked.update((small, config) for name, config in todo.items() if name not in failed)
        for name, check in failed.items():
            reason = check.reason or f"error {check.error:.2e} is over the tolerance {check.tolerance:.2e}"
            where = f"check {check.tensor} {small}" if check.tensor else f"check {small}"
            self.results.skip(name, where, reason, error=True)
            self.progress.say(f"{name}: {where}: {reason}")
            del configs[name]
        self.progress.step(f"compile and check {cell}")

    def samples(
        self, cell: Cell, configs: Mapping[str, AnyConfig], plan: Plan, peers: Sequence[Peer] = ()
    ) -> dict[str, list[float]]:
        """Milliseconds per launch, one sample per round, of those that run: configurations, then peers."""
        work = work_of(self.kind, cell, self.generator)
        candidates = []
        for peer in (*(ConfigPeer(name, config) for name, config in configs.items()), *peers):
            candidate = self._ready(work, peer, is_ours=peer.name in configs)
            if candidate is not None:
                candidates.append(candidate)
        return measure(candidates, plan, self.clock, self.rng) if candidates else {}

    def _ready(self, work: Work, peer: Peer, is_ours: bool) -> Candidate | None:
        """Called once, so that whatever happens at a first call has happened."""
        try:
            with hang_guard(peer.name) if is_ours else nullcontext():  # a peer may compile for minutes
                candidate = work.candidate(peer)
                candidate.launch(1)
                self.clock.synchronize()
        except Exception as error:  # whatever an implementation raises is its result
            self.results.skip(peer.name, str(work.cell), reason_of(error), error=is_ours)
            return None
        return candidate
