"""Interleaved timing under sustained load.

A Hopper card runs into its power limit within a second and then lowers its clocks, so that a kernel measured first and
cold looks 5-15 % faster than the same kernel measured later. Candidates are therefore warmed up together and sampled in
rounds, one sample of each per round, and compared by medians.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

SIZING_LAUNCHES = 3


class Clock(Protocol):
    """Where time comes from: marks on the device's queue, and the host's clock in seconds."""

    def mark(self) -> Any: ...
    def elapsed_ms(self, start: Any, end: Any) -> float: ...
    def synchronize(self) -> None: ...
    def now(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class CudaClock:
    """CUDA events on the current stream."""

    event: Any = torch.cuda.Event  # untyped in some versions of torch

    def mark(self) -> Any:
        event = self.event(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end))

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclass(frozen=True)
class Candidate:
    """A named launch; ``session`` is entered around each run of launches (SDPA's choice of backend needs one)."""

    name: str
    call: Callable[[], object]
    session: Callable[[], AbstractContextManager[object]] = nullcontext

    def launch(self, times: int) -> None:
        call = self.call
        with self.session():
            for _ in range(times):
                call()


@dataclass(frozen=True)
class Plan:
    """How long one cell is measured. ``seconds`` covers the rounds; at least ``min_rounds`` run whatever they take."""

    sample_ms: float = 15.0
    warm_up_seconds: float = 1.0
    seconds: float = 3.0
    min_rounds: int = 5
    max_rounds: int = 25

    @classmethod
    def within(cls, seconds: float) -> Plan:
        """A plan that fills ``seconds``: up to one second of warm-up, the rest rounds."""
        warm_up = min(cls.warm_up_seconds, 0.35 * max(seconds, 0.0))
        return cls(warm_up_seconds=warm_up, seconds=max(0.0, seconds - warm_up))

    def launches(self, milliseconds: float) -> int:
        """Launches that fill one sample, for a kernel that takes ``milliseconds``."""
        return max(1, round(self.sample_ms / max(milliseconds, 1e-4)))


def time_launches(candidate: Candidate, launches: int, clock: Clock, lead_in: int = 0) -> float:
    """Milliseconds per launch of ``launches`` in a row, after ``lead_in`` that are not counted."""
    candidate.launch(lead_in)
    start = clock.mark()
    candidate.launch(launches)
    end = clock.mark()
    clock.synchronize()
    return clock.elapsed_ms(start, end) / launches


def measure(candidates: Sequence[Candidate], plan: Plan, clock: Clock, rng: random.Random) -> dict[str, list[float]]:
    """Milliseconds per launch, one sample per candidate and round.

    Each round visits the candidates in another order: power control reacts within tens of milliseconds, so whoever ran
    after the coolest kernel more often than others would be flattered, see :func:`balanced_orders`. For the same reason
    a sample starts with launches that are not counted. The host queues a whole round before it waits, so that the card
    never idles between samples.
    """
    launches = {c.name: plan.launches(time_launches(c, SIZING_LAUNCHES, clock, lead_in=1)) for c in candidates}
    started = clock.now()
    while clock.now() - started < plan.warm_up_seconds:
        for candidate in candidates:
            candidate.launch(launches[candidate.name])
        clock.synchronize()

    samples: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    started = clock.now()
    for done, order in enumerate(itertools.islice(balanced_orders(len(candidates), rng), plan.max_rounds)):
        if done >= plan.min_rounds and clock.now() - started >= plan.seconds:
            break
        for name, milliseconds in _round([candidates[i] for i in order], launches, clock).items():
            samples[name].append(milliseconds)
    return samples


def balanced_orders(count: int, rng: random.Random) -> Iterator[list[int]]:
    """Orders of ``count`` things without end, such that each runs right after each other one equally often: once in
    ``count`` orders if that is even, else twice in 2 · ``count``, after which other orders follow (Williams,
    "Experimental designs balanced for the estimation of residual effects of treatments", 1949)."""
    if count == 0:
        return
    first = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(count)]  # 0, 1, -1, 2, -2, …
    while True:
        names = rng.sample(range(count), count)
        orders = [[names[(place + step) % count] for place in first] for step in range(count)]
        if count % 2:
            orders += [order[::-1] for order in orders]
        rng.shuffle(orders)
        yield from orders


def _round(order: Sequence[Candidate], launches: dict[str, int], clock: Clock) -> dict[str, float]:
    marks = {}
    for candidate in order:
        count = launches[candidate.name]
        candidate.launch(max(1, count // 4))
        start = clock.mark()
        candidate.launch(count)
        marks[candidate.name] = (start, clock.mark())
    clock.synchronize()
    return {name: clock.elapsed_ms(*pair) / launches[name] for name, pair in marks.items()}


def medians(samples: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in samples.items()}


def cold_burst(
    candidates: Sequence[Candidate], clock: Clock, cool_seconds: float, launches: int = 10
) -> dict[str, float]:
    """Milliseconds per launch of the first launches after a pause: what a card shows before it throttles."""
    times = {}
    for candidate in candidates:
        clock.synchronize()
        clock.sleep(cool_seconds)
        times[candidate.name] = time_launches(candidate, launches, clock)
    return times


def host_microseconds(candidate: Candidate, calls: int, clock: Clock) -> float:
    """Host time per call of ``calls`` in a row: nothing waits for the device until they have all been queued."""
    clock.synchronize()
    with candidate.session():
        call = candidate.call
        started = clock.now()
        for _ in range(calls):
            call()
        elapsed = clock.now() - started
    clock.synchronize()
    return elapsed / calls * 1e6
