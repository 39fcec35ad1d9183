"""Explicit kernel configurations for the ablation and for picking tiles: made, parsed and checked without a GPU."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence

import torch

from flashhopper.bench import BenchError
from flashhopper.bench.grid import Cell
from flashhopper.bench.passes import BACKWARD, FORWARD, Pass
from flashhopper.config import (
    AnySpec,
    BackwardConfig,
    BackwardSpec,
    ConfigError,
    ForwardConfig,
    KernelSpec,
    PostprocessSpec,
    PreprocessSpec,
)
from flashhopper.heuristics import select_backward_spec, select_spec
from flashhopper.options import AttentionOptions
from flashhopper.problem import DTYPES, AttentionProblem, TensorFacts

AnyConfig = ForwardConfig | BackwardConfig
MainSpec = KernelSpec | BackwardSpec
Variants = Callable[[typing.Any], Mapping[str, AnyConfig]]  # from the pass's default to what to run, by name

DEFAULT = "default"
ALIASES = {
    "stages": "num_stages",
    "q_stages": "num_q_stages",
    "k_stages": "num_k_stages",
    "do_stages": "num_do_stages",
    "ds_stages": "num_ds_stages",
    "dq_stages": "num_dq_stages",
    "waves": "group_waves",
    "prefetch": "prefetch_scores",
    "q_regs": "q_in_registers",
    "o_parts": "num_o_parts",
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
        "tma_store=False": {"tma_store": False, "num_o_parts": 1},  # nothing is staged
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


def explicit_variants(configs: Mapping[str, AnyConfig]) -> Variants:
    """The default and ``configs``, whatever the default is."""
    return lambda base: {DEFAULT: base, **configs}


def config_type(kind: Pass) -> type[AnyConfig]:
    """Of the main kernel of a pass."""
    return BackwardConfig if kind is BACKWARD else ForwardConfig


def main_spec(kind: Pass, problem: AttentionProblem, config: AnyConfig | None = None) -> MainSpec:
    """The main kernel of a pass; ``config``, which must be of the pass, overrides the tables'."""
    if isinstance(config, BackwardConfig) or kind is BACKWARD:
        return select_backward_spec(problem, typing.cast(BackwardConfig | None, config))
    return select_spec(problem, config)


def companion_specs(kind: Pass, cells: Sequence[Cell]) -> list[AnySpec]:
    """The kernels that run beside the main one of a pass, whatever its configuration."""
    specs: list[AnySpec] = []
    for cell in cells if kind is BACKWARD else ():
        forward, main = (main_spec(one, problem_of(cell)) for one in (FORWARD, BACKWARD))
        before = PreprocessSpec(main.dtype, main.head_dim, main.head_dim_v, has_lse_grad=False)
        specs += [forward, before, PostprocessSpec(main.dtype, main.head_dim)]
    return list(dict.fromkeys(specs))


@dataclasses.dataclass(frozen=True)
class VariantPlan:
    """What to run: each cell's feasible configurations by name, their kernels, and why the others are left out."""

    cells: dict[Cell, dict[str, AnyConfig]]
    specs: list[MainSpec]
    infeasible: list[dict[str, str]]
    kind: Pass = FORWARD

    @classmethod
    def of(cls, cells: Sequence[Cell], variants: Variants, kind: Pass = FORWARD) -> VariantPlan:
        """Ask ``variants`` for each cell's configurations, starting from what the tables give there."""
        plan = cls({}, [], [], kind)
        for cell in cells:
            problem = problem_of(cell)
            kept = plan.cells.setdefault(cell, {})
            for name, config in variants(main_spec(kind, problem).config).items():
                try:  # before compiling: a wrong sum of registers hangs the card
                    spec = main_spec(kind, problem, config)
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
    dtype = {name: dtype for dtype, name in DTYPES.items()}[cell.dtype]

    def facts(d: int) -> TensorFacts:
        stride = (cell.s * cell.h * d, cell.h * d, d, 1)
        return TensorFacts((cell.b, cell.s, cell.h, d), stride, dtype, torch.device("cuda"))

    q, v = facts(cell.d), facts(cell.head_dim_v)
    return AttentionProblem(q, q, v, AttentionOptions(causal=cell.causal))


def parse_configs(text: str, kind: Pass = FORWARD) -> dict[str, AnyConfig]:
    """``"128x128:stages=2,softmax=lazy;128x176"``: configurations by their text, separated by semicolons."""
    texts = [part.strip() for part in text.split(";") if part.strip()]
    if not texts:
        raise BenchError("configs is empty; expected for example 128x128:stages=2,softmax=lazy;128x176")
    return {part: parse_config(part, kind) for part in texts}


def parse_config(text: str, kind: Pass = FORWARD) -> AnyConfig:
    """``TILE_MxTILE_N[:field=value,...]``; a field is a name of the pass's configuration or one of ``ALIASES``."""
    tile, _, rest = text.partition(":")
    sizes = tile.lower().split("x")
    if len(sizes) != 2 or not all(size.strip().isdigit() for size in sizes):
        raise BenchError(f"configuration {text!r}: expected TILE_MxTILE_N[:field=value,...], got the tile {tile!r}")
    fields: dict[str, typing.Any] = {}
    for assignment in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = assignment.partition("=")
        if not equals:
            raise BenchError(f"configuration {text!r}: expected field=value, got {assignment!r}")
        name = _field(config_type(kind), key.strip())
        fields[name] = _parse_field(config_type(kind), name, value.strip(), text)
    return config_type(kind)(int(sizes[0]), int(sizes[1]), **fields)


def config_text(config: AnyConfig) -> str:
    """What :func:`parse_config` reads as ``config``: the tile and the fields that are not their default."""
    of = type(config)
    names = {_field(of, alias): alias for alias in ALIASES}
    switches = {True: "on", False: "off"}
    fields = []
    for name, default in _defaults(of).items():
        value = getattr(config, name)
        if value != default:
            fields.append(f"{names.get(name, name)}={switches[value] if isinstance(value, bool) else value}")
    tile = f"{config.tile_m}x{config.tile_n}"
    return f"{tile}:{','.join(fields)}" if fields else tile


def _defaults(of: type[AnyConfig]) -> dict[str, typing.Any]:
    return {f.name: f.default for f in dataclasses.fields(of) if f.default is not dataclasses.MISSING}


def _field(of: type[AnyConfig], key: str) -> str:
    """A field by its name, which goes first, or by its short name."""
    return key if key in _defaults(of) else ALIASES.get(key, key)


def _parse_field(of: type[AnyConfig], name: str, value: str, text: str) -> int | bool | str:
    defaults = _defaults(of)
    if name not in defaults:
        aliases = [alias for alias, field in ALIASES.items() if field in defaults]
        raise BenchError(f"configuration {text!r}: no field {name!r}; there are {', '.join([*defaults, *aliases])}")
    if isinstance(defaults[name], bool):
        if value.lower() not in _SWITCHES:
            raise BenchError(f"configuration {text!r}: {name}={value!r}; accepted are on and off")
        return _SWITCHES[value.lower()]
    if isinstance(defaults[name], int):
        if not value.isdigit():
            raise BenchError(f"configuration {text!r}: {name}={value!r}; accepted is a whole number")
        return int(value)
    choices = _choices(name, of)
    if value not in choices:
        raise BenchError(f"configuration {text!r}: {name}={value!r}; accepted are {', '.join(choices)}")
    return value


def _choices(name: str, of: type[AnyConfig] = ForwardConfig) -> tuple[str, ...]:
    return typing.get_args(typing.get_type_hints(of)[name])
