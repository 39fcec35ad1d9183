"""``flashhopper bench fp8``: FP8 forwards over the grid of the 16-bit ones, with FA3's and our bf16 beside them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flashhopper import flash_attn_fp8_func, flash_attn_func, quantize_fp8
from flashhopper.bench.check import random_inputs
from flashhopper.bench.environment import describe_machine, matmul_tflops
from flashhopper.bench.grid import Cell
from flashhopper.bench.peers import PackagePeer, all_peers
from flashhopper.bench.timing import Candidate, Clock, Plan, measure, medians
from flashhopper.reference import attention
from flashhopper.reference_fp8 import E4M3, largest_number

COLUMNS = ("ours", "ours_fast", "ours_end_to_end", "fa3_fp8", "bf16")
CHECK_SEQLEN = 1024
# Of out's root mean square. Rounding to e4m3 is an error of 2.6 % (uniform below 2**-4 of the power of two); where keys
# weigh alike, those of Q and K move scores by 3.7 %, and with those of P and V that makes 5.2 %.
TOLERANCE = 0.065
CLOSING_SECONDS = 5.0
QUANTISER_SECONDS = 2.0  # for each head_dim

Tensors = Sequence[torch.Tensor]


@dataclass
class Fp8Results:
    """Rows ``{d, causal, s, b, h, …}`` with TFLOPS by column, what could not run and why, and failed checks; and GB/s
    of quantising q, k and v, ``{d, s, b, h, quantize, copy}``, beside a copy of them on the device."""

    machine: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    quantize: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    matmul: dict[str, float] = field(default_factory=dict)

    @property
    def errors(self) -> list[str]:
        """Failures of ours; a peer that is missing is not one."""
        return [f"{s['name']} {s['where']}: {s['reason']}" for s in self.skipped if not s["name"].startswith("fa3")]

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "fp8",
            **self.machine,
            "unit": "TFLOPS",
            "matmul_tflops": self.matmul,
            "skipped": self.skipped,
            "rows": self.rows,
            "quantize_gb_per_s": self.quantize,
        }


def bytes_moved(inputs: Tensors, written_bytes: int) -> int:
    """What has to be read and written at least: each element once, ``written_bytes`` of it."""
    return sum(x.numel() * (x.element_size() + written_bytes) for x in inputs)


def per_head_e4m3(x: torch.Tensor, heads_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 and FA3's factors ``(batch, heads_k)``: amax / 448 over all rows of the heads that share one."""
    batch, seqlen, heads, head_dim = x.shape
    grouped = x.float().view(batch, seqlen, heads_k, heads // heads_k * head_dim)
    scale = (grouped.abs().amax((1, 3)) / largest_number(E4M3)).clamp_min(1e-30)
    return (grouped / scale[:, None, :, None]).view(x.shape).to(E4M3), scale


def fa3_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Callable[[], object]:
    """FA3 on tensors with one scale a head, quantised here. Raises ModuleNotFoundError if it is not installed."""
    peer = all_peers()["fa3"]
    if not isinstance(peer, PackagePeer) or (reason := peer.available()) is not None:
        raise ModuleNotFoundError(f"FA3: {reason}")
    heads_k = k.shape[2]
    (q8, k8, v8), scales = zip(*(per_head_e4m3(x, heads_k) for x in (q, k, v)), strict=True)
    peer.options = {f"{name}_descale": scale for name, scale in zip("qkv", scales, strict=True)}
    return peer.call(q8, k8, v8, causal)


def make_call(column: str, inputs: Tensors, causal: bool) -> Callable[[], object]:
    """What is timed: quantising is part of ``ours_end_to_end`` alone."""
    q, k, v = inputs
    if column == "fa3_fp8":
        return fa3_call(q, k, v, causal)
    if column == "bf16":
        return lambda: flash_attn_func(q, k, v, causal=causal)
    if column == "ours_end_to_end":
        return lambda: flash_attn_fp8_func(q, k, v, causal=causal)
    quantised = quantize_fp8(q, k, v)
    accumulate: Any = "fast" if column == "ours_fast" else "two_level"
    return lambda: flash_attn_func(*quantised, causal=causal, fp8_accumulate=accumulate)


def first(result: object) -> torch.Tensor:
    """Out, of an implementation that may return LSE beside it."""
    out = result[0] if isinstance(result, tuple) else result
    assert isinstance(out, torch.Tensor)
    return out


def relative_error(column: str, cell: Cell, generator: torch.Generator) -> float:
    """Root mean square error of a short problem of the cell's kind against fp32, over that of the result."""
    small = Cell(cell.dtype, cell.d, cell.causal, CHECK_SEQLEN, 1, 2)
    q, k, v = random_inputs(small, generator)
    out = first(make_call(column, (q, k, v), cell.causal)())
    ref, _ = attention(q.float(), k.float(), v.float(), softmax_scale=cell.d**-0.5, causal=cell.causal)
    return float((out.float() - ref).square().mean().sqrt() / ref.square().mean().sqrt())


class Fp8Run:
    """Checks every column once per head_dim and mask, then times the cells within a budget."""

    def __init__(self, seed: int, clock: Clock, say: Callable[[str], None]) -> None:
        self.clock, self.say, self.rng = clock, say, random.Random(seed)
        self.generator = torch.Generator("cuda").manual_seed(seed)
        self.results = Fp8Results(describe_machine() | {"seed": seed})
        self.failed: set[tuple[str, int, bool]] = set()

    def run(self, cells: Sequence[Cell], budget_seconds: float) -> Fp8Results:
        started = self.clock.now()
        per_head_dim = {cell.d: cell for cell in cells}.values()
        closing = CLOSING_SECONDS + 1.5 * QUANTISER_SECONDS * len(per_head_dim)
        with torch.no_grad():
            for cell in {(cell.d, cell.causal): cell for cell in cells}.values():
                for column in COLUMNS:
                    self.check(column, cell)
            self.results.matmul["before"] = matmul_tflops(self.clock)
            for index, cell in enumerate(cells):
                left = budget_seconds - closing - (self.clock.now() - started)
                self.time(cell, left / (len(cells) - index))
            for cell in per_head_dim:
                self.time_quantising(cell)
            self.results.matmul["after"] = matmul_tflops(self.clock)
        return self.results

    def skip(self, column: str, where: object, reason: str) -> None:
        self.results.skipped.append({"name": column, "where": str(where), "reason": reason})
        self.say(f"{column}: {where}: {reason}")

    def check(self, column: str, cell: Cell) -> None:
        problem = None
        try:
            error = relative_error(column, cell, self.generator)
            if not error <= TOLERANCE:
                problem = f"relative error {error:.2e} is over {TOLERANCE}"
        except Exception as caught:  # whatever an implementation raises is its result
            problem = f"{type(caught).__name__}: {caught}"
        if problem is not None:
            self.failed.add((column, cell.d, cell.causal))
            self.skip(column, f"check d{cell.d} {cell.mask}", problem)

    def candidates(self, cell: Cell) -> list[Candidate]:
        """Those that can run the cell, each called once."""
        inputs, ready = random_inputs(cell, self.generator), []
        for column in COLUMNS:
            if (column, cell.d, cell.causal) in self.failed:
                continue
            try:
                candidate = Candidate(column, make_call(column, inputs, cell.causal))
                candidate.launch(1)
                self.clock.synchronize()
            except Exception as caught:
                self.skip(column, cell, f"{type(caught).__name__}: {caught}")
            else:
                ready.append(candidate)
        return ready

    def time(self, cell: Cell, seconds: float) -> None:
        candidates = self.candidates(cell)
        times = medians(measure(candidates, Plan.within(seconds), self.clock, self.rng)) if candidates else {}
        row = {"d": cell.d, "causal": cell.causal, "s": cell.s, "b": cell.b, "h": cell.h}
        rates = {name: round(cell.tflops(times[name]), 1) if name in times else None for name in COLUMNS}
        self.results.rows.append(row | rates)
        self.say(f"{cell}: " + ", ".join(f"{name} {rate}" for name, rate in rates.items()))

    def time_quantising(self, cell: Cell) -> None:
        inputs = random_inputs(cell, self.generator)
        copies = [torch.empty_like(x) for x in inputs]
        moved = {"quantize": bytes_moved(inputs, 1), "copy": bytes_moved(inputs, inputs[0].element_size())}
        calls: dict[str, Callable[[], object]] = {
            "quantize": lambda: quantize_fp8(*inputs),
            "copy": lambda: [copy.copy_(x) for copy, x in zip(copies, inputs, strict=True)],
        }
        candidates = [Candidate(name, call) for name, call in calls.items()]
        times = medians(measure(candidates, Plan.within(QUANTISER_SECONDS), self.clock, self.rng))
        rates = {name: round(moved[name] / times[name] / 1e6, 1) for name in calls}
        self.results.quantize.append({"d": cell.d, "s": cell.s, "b": cell.b, "h": cell.h} | rates)
        self.say(f"{cell}: quantising {rates['quantize']} GB/s, a copy {rates['copy']} GB/s")


def geometric_means(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of ours to FA3's FP8, fast to it, and end to end to our bf16 from 8k keys on; and the worst cell of the first."""
    found = {}
    for name, numerator, denominator, shortest in (
        ("ours / fa3_fp8", "ours", "fa3_fp8", 0),
        ("ours_fast / fa3_fp8", "ours_fast", "fa3_fp8", 0),
        ("ours_end_to_end / bf16, s >= 8k", "ours_end_to_end", "bf16", 8192),
    ):
        ratios = [r[numerator] / r[denominator] for r in rows if r[numerator] and r[denominator] and r["s"] >= shortest]
        if ratios:
            logs = torch.tensor(ratios, dtype=torch.float64).log()
            found[name] = float(logs.mean().exp())
            found[f"{name}, worst"] = min(ratios)
    return found
