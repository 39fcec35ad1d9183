"""``flashhopper accuracy fp8``: root mean square errors of FP8 attention against fp64, by distribution and variant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from flashhopper import flash_attn_fp8_func, flash_attn_func, quantize_fp8
from flashhopper.bench.environment import describe_machine
from flashhopper.bench.fp8 import fa3_call, first, per_head_e4m3
from flashhopper.config import KEYS_PER_SCALE, QUERIES_PER_SCALE
from flashhopper.heuristics_fp8 import fp8_row
from flashhopper.reference import attention
from flashhopper.reference_fp8 import (
    E4M3,
    WHOLE_SEQUENCE,
    Operands,
    emulate_fp8_forward,
    largest_number,
    transpose_values,
)

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Shape = tuple[int, int, int, int]


class Sampler(NamedTuple):
    """Normal and uniform numbers from one generator."""

    generator: torch.Generator

    def normal(self, shape: Shape) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.generator.device)

    def outliers(self, shape: Shape) -> torch.Tensor:
        """N(0, 1) + N(0, 100) · Bernoulli(0.001): the FlashAttention-3 paper's, sec. 4.3."""
        rare = torch.rand(shape, generator=self.generator, device=self.generator.device) < 0.001
        return self.normal(shape) + 10 * self.normal(shape) * rare


def normal(sample: Sampler, q: Shape, k: Shape) -> Tensors:
    return sample.normal(q), sample.normal(k), sample.normal(k)


def outliers(sample: Sampler, q: Shape, k: Shape) -> Tensors:
    return sample.outliers(q), sample.outliers(k), sample.outliers(k)


def sinks(sample: Sampler, q: Shape, k: Shape) -> Tensors:
    """All queries share a direction in which the first four keys are large; those keys' values are small. They take
    97 % of the weight at 4k keys and head_dim 128."""
    direction = sample.normal((1, 1, q[2], q[3]))
    queries, keys, values = sample.normal(q) + direction, sample.normal(k), sample.normal(k)
    keys[:, :4] += direction
    values[:, :4] *= 0.1
    return queries, keys, values


def with_mean(sample: Sampler, q: Shape, k: Shape) -> Tensors:
    return sample.normal(q), sample.normal(k), sample.normal(k) + 1


class Distribution(NamedTuple):
    name: str
    draw: Callable[[Sampler, Shape, Shape], Tensors]
    keys: int
    queries: int


def distributions(keys: int, long_keys: int) -> list[Distribution]:
    """(a) to (d) of the page on FP8; few queries see the long context."""
    return [
        Distribution("normal", normal, keys, keys),
        Distribution("outliers", outliers, keys, keys),
        Distribution("sinks", sinks, keys, keys),
        Distribution("mean 1", with_mean, keys, 256),
        Distribution("mean 1, long", with_mean, long_keys, 256),
    ]


def _per_tensor(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Tensors, Tensors]:
    scales = [(x.float().abs().amax() / largest_number(E4M3)).clamp_min(1e-30) for x in (q, k, v)]
    q8, k8, v8 = ((x.float() / scale).to(E4M3) for x, scale in zip((q, k, v), scales, strict=True))
    q_scale, k_scale, v_scale = (scale.expand(k.shape[0], k.shape[2]).contiguous() for scale in scales)
    return (q8, k8, v8), (q_scale, k_scale, v_scale)


def _per_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Tensors, Tensors]:
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (per_head_e4m3(x, k.shape[2]) for x in (q, k, v))
    return (q8, k8, v8), (q_scale, k_scale, v_scale)


def _raw_attention(tensors: Tensors, scales: Tensors) -> torch.Tensor:
    """Raw e4m3 with factors of (batch, head): the kernel's, or the emulator's where there is no GPU."""
    q, k, v = tensors
    if q.is_cuda:
        factors: dict[str, Any] = {f"{name}_descale": scale for name, scale in zip("qkv", scales, strict=True)}
        return first(flash_attn_func(q, k, v, **factors))
    q_scale, k_scale = (scale[..., None] for scale in scales[:2])
    v_scale = scales[2][..., None].expand(*scales[2].shape, v.shape[3])
    whole = WHOLE_SEQUENCE, WHOLE_SEQUENCE, k.shape[1]
    mean = torch.zeros_like(v_scale)
    return _emulated(Operands(q, k, transpose_values(v), q_scale, k_scale, v_scale, mean, *whole), fast=False)


def _ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fast: bool = False, **recipe: Any) -> torch.Tensor:
    if q.is_cuda:
        return first(flash_attn_fp8_func(q, k, v, fp8_accumulate="fast" if fast else "two_level", **recipe))
    q8, k8, v8 = quantize_fp8(q, k, v, **recipe)
    scales = q8.scale, k8.scale, v8.scale, torch.zeros_like(v8.scale) if v8.mean is None else v8.mean
    rows = QUERIES_PER_SCALE, KEYS_PER_SCALE, k.shape[1]
    operands = Operands(q8.data, k8.data, v8.data, *scales, *rows, is_centered=v8.mean is not None)
    return _emulated(operands, fast)


def _emulated(operands: Operands, fast: bool) -> torch.Tensor:
    """By the configuration that the kernel would have."""
    head_dim, head_dim_v = operands.q.shape[3], operands.v.shape[2]
    row = fp8_row(head_dim, head_dim_v, operands.seqlen_k)
    config = row.spec("bfloat16", False, fast, operands.is_centered, seqlen_k=operands.seqlen_k).config
    return emulate_fp8_forward(operands, softmax_scale=head_dim**-0.5, causal=False, config=config)[0]


VARIANTS: dict[str, Callable[..., torch.Tensor]] = {
    "per tensor": lambda q, k, v: _raw_attention(*_per_tensor(q, k, v)),
    "per head": lambda q, k, v: _raw_attention(*_per_head(q, k, v)),
    "block": lambda q, k, v: _ours(q, k, v, hadamard=False),
    "block + Hadamard": _ours,
    "block + Hadamard, v not centred": lambda q, k, v: _ours(q, k, v, center_v=False),
    "block + Hadamard, fast": lambda q, k, v: _ours(q, k, v, fast=True),
    "FA3 FP8": lambda q, k, v: first(fa3_call(q, k, v, False)()),
    "bf16": lambda q, k, v: flash_attn_func(q, k, v),
}


@dataclass
class AccuracyResults:
    """Rows ``{distribution, keys, queries, variant, rmse}``, RMSE a mean over seeds, and what could not run."""

    head: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "fp8_accuracy", **self.head, "skipped": self.skipped, "rows": self.rows}


class AccuracyOptions(NamedTuple):
    """Shapes and seeds of a run; ``device`` is cuda, or cpu for the emulator of the kernel's arithmetic."""

    device: str
    seed: int
    seeds: int = 8
    head_dim: int = 128
    heads: int = 4
    keys: int = 4096
    long_keys: int = 131072


def run_accuracy(options: AccuracyOptions, say: Callable[[str], None]) -> AccuracyResults:
    """Every variant on every distribution, over fresh inputs from ``seeds`` seeds."""
    chosen = options._asdict()
    chosen["computed_on"] = chosen.pop("device")
    results = AccuracyResults(describe_machine() | chosen)
    with torch.no_grad():
        for distribution in distributions(options.keys, options.long_keys):
            errors: dict[str, list[float]] = {}
            for number in range(options.seeds):
                for name, error in _errors_of(distribution, options, number, results).items():
                    errors.setdefault(name, []).append(error)
            for name, values in errors.items():
                row = {"distribution": distribution.name, "keys": distribution.keys, "queries": distribution.queries}
                results.rows.append(row | {"variant": name, "rmse": sum(values) / len(values)})
                say(f"{distribution.name}, {distribution.keys} keys, {name}: {results.rows[-1]['rmse']:.2e}")
    return results


def _errors_of(
    distribution: Distribution, options: AccuracyOptions, number: int, results: AccuracyResults
) -> dict[str, float]:
    """RMSE of each variant for one seed."""
    sample = Sampler(torch.Generator(options.device).manual_seed(options.seed + number))
    q_shape = 1, distribution.queries, options.heads, options.head_dim
    k_shape = 1, distribution.keys, options.heads, options.head_dim
    q, k, v = (x.to(torch.bfloat16) for x in distribution.draw(sample, q_shape, k_shape))
    scale = options.head_dim**-0.5
    ref, _ = attention(q.double(), k.double(), v.double(), softmax_scale=scale, causal=False)
    found = {}
    for name, variant in VARIANTS.items():
        try:
            found[name] = float((variant(q, k, v).double() - ref).square().mean().sqrt())
        except Exception as error:  # whatever an implementation raises is its result
            if number == 0:
                reason = f"{type(error).__name__}: {error}"
                results.skipped.append({"variant": name, "distribution": distribution.name, "reason": reason})
    return found
