"""``flashhopper bench launch``: what one call costs on the host once its kernel is compiled."""

from __future__ import annotations

import gc
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from flashhopper.bench.check import random_inputs, reason_of
from flashhopper.bench.environment import describe_machine
from flashhopper.bench.grid import Cell
from flashhopper.bench.passes import OURS
from flashhopper.bench.peers import Call, Peer
from flashhopper.bench.timing import Candidate, Clock, host_microseconds

# Small enough that the device keeps up with the host: 300 calls stay far below the launch queue's depth.
LAUNCH_CELL = Cell("bfloat16", 128, False, 512, 1, 16)
CALLS = 300
GRADIENT_CALLS = 100  # a backward is several launches
REPETITIONS = 7
# Ragged calls take these batches in turn: totals, numbers of sequences and longest ones change from call to call.
RAGGED_LENGTHS = ((64, 448), (256, 100, 92), (1, 2, 500), (128, 128, 128, 128), (511,))


class Mode(NamedTuple):
    """What is called again and again, on q, k and v of the launch cell."""

    prepare: Callable[[Peer, Sequence[torch.Tensor]], Call]
    requires_grad: bool
    calls: int = CALLS


def _forward(peer: Peer, inputs: Sequence[torch.Tensor]) -> Call:
    q, k, v = inputs
    return peer.prepare(q, k, v, LAUNCH_CELL.causal)


def _backward(peer: Peer, inputs: Sequence[torch.Tensor]) -> Call:
    q, k, v = inputs
    return peer.prepare_backward((q, k, v), torch.randn_like(q), LAUNCH_CELL.causal)


def _ragged_calls(peer: Peer, inputs: Sequence[torch.Tensor]) -> list[tuple[Call, list[torch.Tensor]]]:
    """A call for each batch of RAGGED_LENGTHS, and its tensors: leaves, if the inputs require gradients."""
    calls = []
    for lengths in RAGGED_LENGTHS:
        packed = [x.detach()[0, : sum(lengths)].requires_grad_(x.requires_grad) for x in inputs]
        ends = [0, *itertools.accumulate(lengths)]
        cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=packed[0].device)
        q, k, v = packed
        calls.append((peer.ragged_call(q, k, v, cu_seqlens, max(lengths)), packed))
    return calls


def _in_turn(calls: Sequence[Call]) -> Call:
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def _ragged(peer: Peer, inputs: Sequence[torch.Tensor]) -> Call:
    return _in_turn([call for call, _ in _ragged_calls(peer, inputs)])


def _ragged_backward(peer: Peer, inputs: Sequence[torch.Tensor]) -> Call:
    return _in_turn([_gradients_of(peer.output(call()), packed) for call, packed in _ragged_calls(peer, inputs)])


def _gradients_of(out: torch.Tensor, inputs: Sequence[torch.Tensor]) -> Call:
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


MODES = {
    "no_grad": Mode(_forward, requires_grad=False),
    "requires_grad": Mode(_forward, requires_grad=True),
    "backward": Mode(_backward, True, GRADIENT_CALLS),
    "varlen": Mode(_ragged, requires_grad=False),
    "varlen_requires_grad": Mode(_ragged, requires_grad=True),
    "varlen_backward": Mode(_ragged_backward, True, GRADIENT_CALLS),
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
        calls = f"{CALLS} calls ({GRADIENT_CALLS} of a backward), {REPETITIONS} repetitions"
        shape = f"{LAUNCH_CELL}, {calls}; varlen: lengths {RAGGED_LENGTHS} in turn"
        return {
            **self.machine,
            "versions": self.versions,
            "shape": shape,
            "rows": self.rows,
            "skipped": self.skipped,
            "errors": self.errors,
        }


def run_launch(peers: Sequence[Peer], seed: int, clock: Clock, device: str = "cuda") -> LaunchResults:
    """Best and median microseconds per call of each implementation in each mode."""
    results = LaunchResults(describe_machine(), {peer.name: peer.version() for peer in peers})
    generator = torch.Generator(device).manual_seed(seed)
    usable = []
    for peer in peers:
        reason = peer.available()
        if reason is None:
            usable.append(peer)
        else:
            results.skipped.append({"implementation": peer.name, "where": "everywhere", "reason": reason})
    for mode, (_, requires_grad, _) in MODES.items():
        inputs = [x.requires_grad_(requires_grad) for x in random_inputs(LAUNCH_CELL, generator)]
        with torch.set_grad_enabled(requires_grad):
            times = _measure_mode(usable, mode, inputs, clock, results)
        for name, values in times.items():
            best, median = round(min(values), 2), round(statistics.median(values), 2)
            results.rows.append({"name": name, "mode": mode, "best_us": best, "median_us": median})
    return results


def _measure_mode(
    peers: Sequence[Peer], mode: str, inputs: Sequence[torch.Tensor], clock: Clock, results: LaunchResults
) -> dict[str, list[float]]:
    prepare, _, calls = MODES[mode]
    ready: list[Candidate] = []
    for peer in peers:
        try:
            candidate = Candidate(peer.name, prepare(peer, inputs), peer.session)
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
                times[candidate.name].append(host_microseconds(candidate, calls, clock))
    finally:
        gc.enable()
    return times
