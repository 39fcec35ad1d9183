"""``flashhopper bench launch``: what one call costs on the host once its kernel is compiled."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from flashhopper.bench.check import random_inputs, reason_of
from flashhopper.bench.environment import describe_machine
from flashhopper.bench.grid import Cell
from flashhopper.bench.passes import OURS
from flashhopper.bench.peers import Peer
from flashhopper.bench.timing import Candidate, Clock, host_microseconds

# Small enough that the device keeps up with the host: 300 calls stay far below the launch queue's depth.
LAUNCH_CELL = Cell("bfloat16", 128, False, 512, 1, 16)
CALLS = 300
REPETITIONS = 7
MODES: dict[str, tuple[bool, Callable[[], AbstractContextManager[object]]]] = {
    "no_grad": (False, torch.no_grad),
    "requires_grad": (True, torch.enable_grad),
}


@dataclass
class LaunchResults:
    machine: dict[str, Any]
    versions: dict[str, str | None]
    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)

    @property
    def errors(self) -> list[str]:
        return [f"{skip['where']}: {skip['reason']}" for skip in self.skipped if skip["implementation"] == OURS]

    def to_json(self) -> dict[str, Any]:
        shape = f"{LAUNCH_CELL}, {CALLS} calls, {REPETITIONS} repetitions"
        return {
            **self.machine,
            "versions": self.versions,
            "shape": shape,
            "rows": self.rows,
            "skipped": self.skipped,
            "errors": self.errors,
        }


def run_launch(peers: Sequence[Peer], seed: int, clock: Clock, device: str = "cuda") -> LaunchResults:
    """Best and median microseconds per call of each implementation, without and with gradients asked for."""
    results = LaunchResults(describe_machine(), {peer.name: peer.version() for peer in peers})
    generator = torch.Generator(device).manual_seed(seed)
    usable = []
    for peer in peers:
        reason = peer.available()
        if reason is None:
            usable.append(peer)
        else:
            results.skipped.append({"implementation": peer.name, "where": "everywhere", "reason": reason})
    for mode, (requires_grad, context) in MODES.items():
        inputs = [x.requires_grad_(requires_grad) for x in random_inputs(LAUNCH_CELL, generator)]
        with context():
            times = _measure_mode(usable, mode, inputs, clock, results)
        for name, values in times.items():
            best, median = round(min(values), 2), round(statistics.median(values), 2)
            results.rows.append({"name": name, "mode": mode, "best_us": best, "median_us": median})
    return results


def _measure_mode(
    peers: Sequence[Peer], mode: str, inputs: Sequence[torch.Tensor], clock: Clock, results: LaunchResults
) -> dict[str, list[float]]:
    q, k, v = inputs
    ready: list[Candidate] = []
    for peer in peers:
        try:
            candidate = peer.candidate(q, k, v, LAUNCH_CELL.causal)
            candidate.launch(20)  # compiles, fills every cache on the way, lets lazy imports happen
            clock.synchronize()
        except Exception as error:  # whatever a peer raises is its result
            results.skipped.append({"implementation": peer.name, "where": mode, "reason": reason_of(error)})
        else:
            ready.append(candidate)
    times: dict[str, list[float]] = {candidate.name: [] for candidate in ready}
    gc.collect()
    gc.disable()  # as timeit does: a collection inside one repetition is nobody's launch cost
    try:
        for _ in range(REPETITIONS):
            for candidate in ready:
                times[candidate.name].append(host_microseconds(candidate, CALLS, clock))
    finally:
        gc.enable()
    return times
