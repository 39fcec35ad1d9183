"""The configurations that ``flashhopper tune`` tries: the neighbours of a row of the tile tables. Arithmetic alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flashhopper.bench.configs import DEFAULT, AnyConfig, Variants, config_text
from flashhopper.config import BackwardConfig, ConfigError, ForwardConfig

Change = dict[str, Any]  # fields and their values

FORWARD_ROWS = (64, 128, 192, 256)
KEY_STEPS = range(-64, 65, 16)  # from the row's tile_n; 16 keys are the step of a 16-bit WGMMA
WAVES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Axis:
    """One choice of a configuration: fields that only make sense together are changed together."""

    changes: Sequence[Change]
    frees_memory: bool = False
    """Whether it can make room for another change: it is then also searched behind one that does not fit alone."""


def forward_axes(base: ForwardConfig) -> list[Axis]:
    """Tile, stages, what becomes of Q and O, turns of the warpgroups, groups of heads, items, overlap."""
    keys = [base.tile_n + step for step in KEY_STEPS]
    return [
        Axis([{"tile_m": tile_m, "tile_n": tile_n} for tile_m in FORWARD_ROWS for tile_n in keys]),
        Axis(_values("num_stages", range(2, 7)), frees_memory=True),  # 1 was 22 to 29 % slower at head_dim 128
        Axis([_of_q(*chosen) for chosen in Q_CHOICES], frees_memory=True),
        Axis(_values("num_o_parts", (1, 2, 4)), frees_memory=True),
        Axis(_values("warpgroup_order", ("free", "stagger", "ping_pong", "relay"))),
        Axis(_values("group_waves", WAVES)),
        Axis(_values("items_by_shuffle", (True, False))),
        Axis(_values("overlap_gemm_softmax", (True, False))),
    ]


# Buffers of Q, the next tile's first scores before this one's O, Q in registers.
Q_CHOICES = ((1, False, False), (1, False, True), (2, False, False), (2, True, False), (2, False, True))


def _of_q(num_q_stages: int, prefetch: bool, in_registers: bool) -> Change:
    return {"num_q_stages": num_q_stages, "prefetch_scores": prefetch, "q_in_registers": in_registers}


def backward_axes() -> list[Axis]:
    """Tile and split, the stages of each ring, columns of dQ, pairs, registers, turns, groups of heads."""
    tiles: list[Change] = [{"tile_m": tile_m, "tile_n": 128, "split": "keys"} for tile_m in (64, 128)]
    by_operands = {"tile_n": 64, "split": "operands", "warpgroup_order": "free"}
    tiles += [{"tile_m": tile_m, **by_operands} for tile_m in (64, 128)]
    rings = {"num_q_stages": 4, "num_do_stages": 4, "num_ds_stages": 3, "num_dq_stages": 2, "num_k_stages": 2}
    return [
        Axis(tiles),
        *(Axis(_values(name, range(1, most + 1)), frees_memory=True) for name, most in rings.items()),
        Axis(_values("dq_columns", (32, 64, 96, 128)), frees_memory=True),
        Axis(_values("paired", (False, True)), frees_memory=True),
        Axis(_values("wide_consumers", (False, True)), frees_memory=True),
        Axis(_values("warpgroup_order", ("free", "stagger"))),
        Axis(_values("group_waves", WAVES)),
    ]


def _values(name: str, values: Sequence[Any]) -> list[Change]:
    return [{name: value} for value in values]


def neighbours(base: AnyConfig, head_dim: int, head_dim_v: int) -> list[AnyConfig]:
    """``base`` first, then the feasible configurations that differ in one choice, and where that one does not fit the
    card, those that make room for it with a second. Each once, in a fixed order."""
    axes = backward_axes() if isinstance(base, BackwardConfig) else forward_axes(base)
    found: dict[AnyConfig, None] = {base: None}
    for axis in axes:
        for change in axis.changes:
            alone = dataclasses.replace(base, **change)
            for config in [alone] if is_feasible(alone, head_dim, head_dim_v) else _with_room(alone, axis, axes):
                if is_feasible(config, head_dim, head_dim_v):
                    found[config] = None
    return list(found)


def _with_room(config: AnyConfig, axis: Axis, axes: Sequence[Axis]) -> Iterator[AnyConfig]:
    for other in axes:
        if other is not axis and other.frees_memory:
            for change in other.changes:
                yield dataclasses.replace(config, **change)


def is_feasible(config: AnyConfig, head_dim: int, head_dim_v: int) -> bool:
    try:
        config.check_feasible(head_dim, head_dim_v)
    except ConfigError:
        return False
    return True


def search_variants(head_dim: int, head_dim_v: int) -> Variants:
    """The neighbours of whatever the default is, by the text that ``bench tiles --configs`` takes."""

    def variants(base: AnyConfig) -> dict[str, AnyConfig]:
        _, *others = neighbours(base, head_dim, head_dim_v)
        return {DEFAULT: base, **{config_text(config): config for config in others}}

    return variants
