"""Explicit kernel configurations for the ablation and for picking tiles: made, parsed and checked without a GPU."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Sequence

import torch

from flashhopper.bench import BenchError
from flashhopper.bench.grid import Cell
from flashhopper.config import ConfigError, ForwardConfig, KernelSpec
from flashhopper.heuristics import select_config, select_spec
from flashhopper.problem import DTYPES, AttentionOptions, AttentionProblem, TensorFacts

Variants = Callable[[ForwardConfig], dict[str, ForwardConfig]]  # from the default to what to run, by name

DEFAULT = "default"
ALIASES = {
    "stages": "num_stages",
    "q_stages": "num_q_stages",
    "q_regs": "q_in_registers",
    "share": "share_qo_smem",
    "order": "warpgroup_order",
    "overlap": "overlap_gemm_softmax",
    "split": "split_masked_loop",
    "realloc": "reallocate_registers",
    "store": "tma_store",
}
_SWITCHES = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


def ablations(base: ForwardConfig) -> dict[str, ForwardConfig]:
    """``base`` and its neighbours, each with one technique switched off or exchanged, by name.

    The lazy softmax lives in the loop without masks, so one masked loop is to be read against ``softmax=exact``.
    """
    split = {"split_masked_loop": False}
    changes: dict[str, dict[str, typing.Any]] = {
        "num_stages=1": {"num_stages": 1},
        "num_q_stages=1": {"num_q_stages": 1},
        "overlap_gemm_softmax=False": {"overlap_gemm_softmax": False},
        **({"split_masked_loop=False": split} if base.softmax == "exact" else {}),
        "softmax=exact, split_masked_loop=False": {**split, "softmax": "exact"},
        "reallocate_registers=False": {"reallocate_registers": False},
        "tma_store=False": {"tma_store": False, "share_qo_smem": False},  # nothing is staged, so nothing is shared
        f"q_in_registers={not base.q_in_registers}": {"q_in_registers": not base.q_in_registers},
    }
    for name in ("softmax", "warpgroup_order", "scheduler"):
        for choice in _choices(name):
            changes[f"{name}={choice}"] = {name: choice}
    variants = {DEFAULT: base}
    for name, change in changes.items():
        config = dataclasses.replace(base, **change)
        if config not in variants.values():
            variants[name] = config
    return variants


def explicit_variants(configs: dict[str, ForwardConfig]) -> Variants:
    """The default and ``configs``, whatever the default is."""
    return lambda base: {DEFAULT: base, **configs}


@dataclasses.dataclass(frozen=True)
class VariantPlan:
    """What to run: each cell's feasible configurations by name, their kernels, and why the others are left out."""

    cells: dict[Cell, dict[str, ForwardConfig]]
    specs: list[KernelSpec]
    infeasible: list[dict[str, str]]

    @classmethod
    def of(cls, cells: Sequence[Cell], variants: Variants) -> VariantPlan:
        """Ask ``variants`` for each cell's configurations, starting from what ``select_config`` picks there."""
        plan = cls({}, [], [])
        for cell in cells:
            problem = problem_of(cell)
            kept = plan.cells.setdefault(cell, {})
            for name, config in variants(select_config(problem)).items():
                try:  # before compiling: a wrong sum of registers hangs the card
                    spec = select_spec(problem, config)
                except ConfigError as error:
                    reason = str(error).removeprefix(f"{config}: ")
                    plan.infeasible.append({"variant": name, "where": str(cell), "reason": reason})
                else:
                    kept[name] = config
                    if spec not in plan.specs:
                        plan.specs.append(spec)
        return plan


def problem_of(cell: Cell) -> AttentionProblem:
    """The cell as a problem on a GPU, without tensors, so that it can be made on any machine."""
    shape = (cell.b, cell.s, cell.h, cell.d)
    stride = (cell.s * cell.h * cell.d, cell.h * cell.d, cell.d, 1)
    dtype = {name: dtype for dtype, name in DTYPES.items()}[cell.dtype]
    facts = TensorFacts(shape, stride, dtype, torch.device("cuda"))
    return AttentionProblem(facts, facts, facts, AttentionOptions(causal=cell.causal))


def parse_configs(text: str) -> dict[str, ForwardConfig]:
    """``"128x128:stages=2,softmax=lazy;128x176"``: configurations by their text, separated by semicolons."""
    texts = [part.strip() for part in text.split(";") if part.strip()]
    if not texts:
        raise BenchError("configs is empty; expected for example 128x128:stages=2,softmax=lazy;128x176")
    return {part: parse_config(part) for part in texts}


def parse_config(text: str) -> ForwardConfig:
    """``TILE_MxTILE_N[:field=value,...]``; a field is a name of :class:`ForwardConfig` or one of ``ALIASES``."""
    tile, _, rest = text.partition(":")
    sizes = tile.lower().split("x")
    if len(sizes) != 2 or not all(size.strip().isdigit() for size in sizes):
        raise BenchError(f"configuration {text!r}: expected TILE_MxTILE_N[:field=value,...], got the tile {tile!r}")
    fields: dict[str, typing.Any] = {}
    for assignment in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = assignment.partition("=")
        name = ALIASES.get(key.strip(), key.strip())
        if not equals:
            raise BenchError(f"configuration {text!r}: expected field=value, got {assignment!r}")
        fields[name] = _parse_field(name, value.strip(), text)
    return ForwardConfig(int(sizes[0]), int(sizes[1]), **fields)


def _parse_field(name: str, value: str, text: str) -> int | bool | str:
    defaults = {f.name: f.default for f in dataclasses.fields(ForwardConfig) if f.default is not dataclasses.MISSING}
    if name not in defaults:
        raise BenchError(f"configuration {text!r}: no field {name!r}; there are {', '.join([*defaults, *ALIASES])}")
    if isinstance(defaults[name], bool):
        if value.lower() not in _SWITCHES:
            raise BenchError(f"configuration {text!r}: {name}={value!r}; accepted are on and off")
        return _SWITCHES[value.lower()]
    if isinstance(defaults[name], int):
        if not value.isdigit():
            raise BenchError(f"configuration {text!r}: {name}={value!r}; accepted is a whole number")
        return int(value)
    choices = _choices(name)
    if value not in choices:
        raise BenchError(f"configuration {text!r}: {name}={value!r}; accepted are {', '.join(choices)}")
    return value


def _choices(name: str) -> tuple[str, ...]:
    return typing.get_args(typing.get_type_hints(ForwardConfig)[name])
