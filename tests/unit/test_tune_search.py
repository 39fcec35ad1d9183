"""What ``flashhopper tune`` searches: configurations by their text, neighbours of rows, classes of lengths."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tune_fakes import CLEAN, ROWS, backward_configs, forward_configs

from flashhopper.bench import BenchError
from flashhopper.bench.configs import DEFAULT, AnyConfig, config_text, parse_config
from flashhopper.bench.findings import length_classes
from flashhopper.bench.grid import Cell
from flashhopper.bench.passes import BACKWARD, FORWARD, Pass
from flashhopper.bench.search import is_feasible, neighbours
from flashhopper.bench.table_rows import AnyRow
from flashhopper.bench.tune import without_unfit
from flashhopper.config import BackwardConfig, ForwardConfig
from flashhopper.inspect_kernel import PtxasReport

DIMS = list(dict.fromkeys((row.head_dim, row.head_dim_v) for row in ROWS))


def kind_of(config: AnyConfig) -> Pass:
    return BACKWARD if isinstance(config, BackwardConfig) else FORWARD


def changed(base: AnyConfig, config: AnyConfig) -> set[str]:
    return {f.name for f in dataclasses.fields(base) if getattr(base, f.name) != getattr(config, f.name)}


@settings(deadline=None)
@given(st.one_of(forward_configs, backward_configs))
def test_a_configuration_is_read_back_from_its_text(config: AnyConfig) -> None:
    assert parse_config(config_text(config), kind_of(config)) == config


@settings(deadline=None)
@given(st.one_of(forward_configs, backward_configs), st.sampled_from(DIMS))
def test_neighbours_fit_the_card_and_come_once(base: AnyConfig, dims: tuple[int, int]) -> None:
    found = neighbours(base, *dims)
    assert found[0] == base
    assert len(set(found)) == len(found)
    assert len({config_text(config) for config in found}) == len(found)
    for config in found[1:]:
        config.check_feasible(*dims)


Q_FIELDS = {"num_q_stages", "prefetch_scores", "q_in_registers"}
CHOICES = [{"tile_m", "tile_n", "split", "warpgroup_order"}, Q_FIELDS]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{type(row).__name__}-{row.head_dim}-{row.causal}")
def test_neighbours_of_a_row_change_one_choice_or_make_room_with_a_second(row: AnyRow) -> None:
    base, dims = row.config, (row.head_dim, row.head_dim_v)
    found = neighbours(base, *dims)
    assert len(found) > 10
    for config in found[1:]:
        fields = changed(base, config)
        choices = [choice for choice in CHOICES if fields & choice]
        apart = len(choices) + len(fields.difference(*choices))
        assert 1 <= apart <= 2, config_text(config)
        if apart == 2:
            alone = [
                dataclasses.replace(base, **{n: getattr(config, n) for n in choice & fields}) for choice in choices
            ]
            alone += [dataclasses.replace(base, **{n: getattr(config, n)}) for n in fields.difference(*choices)]
            assert not all(is_feasible(one, *dims) for one in alone), config_text(config)
    stages = "num_stages" if isinstance(base, ForwardConfig) else "num_q_stages"
    for name, values in {"group_waves": (1, 2, 4, 8), stages: (2, 3, 4)}.items():
        for value in values:
            config = dataclasses.replace(base, **{name: value})
            assert (config in found) == is_feasible(config, *dims)


CLASSES = {
    64: [
        ("TILE_TABLE d64 full, keys up to 4k", [512, 1024, 2048]),
        ("TILE_TABLE d64 full", [16384]),
        ("TILE_TABLE d64 causal", [512, 1024, 2048, 16384]),
    ],
    128: [
        ("TILE_TABLE d128 full, keys up to 1k", [512, 1024]),
        ("TILE_TABLE d128 causal, keys up to 1k", [512, 1024]),
        ("TILE_TABLE d128 full", [2048, 16384]),
        ("TILE_TABLE d128 causal", [2048, 16384]),
    ],
}


@pytest.mark.parametrize("head_dim", list(CLASSES))
def test_lengths_fall_into_the_classes_of_the_table(head_dim: int) -> None:
    cells = [Cell.of("bfloat16", head_dim, causal, s) for causal in (False, True) for s in (512, 1024, 2048, 16384)]
    classes = length_classes(cells, FORWARD)
    found = [(str(one), [cell.s for cell in one.cells]) for one in classes]
    assert found == CLASSES[head_dim]
    assert all(one.base == one.row.config for one in classes)


def test_a_row_of_the_backward_may_be_in_two_classes() -> None:
    both = length_classes([Cell.of("bfloat16", 192, causal, 512, 128) for causal in (False, True)], BACKWARD)
    assert [(one.row.causal, one.causal) for one in both] == [(None, False), (None, True)]


def test_only_head_dims_with_a_row_of_their_own_are_searched() -> None:
    with pytest.raises(
        BenchError, match="no row of its own for d72; head dims of rows: 64 64, 96 96, 128 128, 192 128"
    ):
        length_classes([Cell.of("bfloat16", 72, False, 512)], FORWARD)


def test_configurations_are_left_out_by_name() -> None:
    (every,) = length_classes([Cell.of("bfloat16", 128, False, 4096)], FORWARD)
    names = list(every.configs)
    (some,) = length_classes(every.cells, FORWARD, skip=[names[3], names[7]])
    assert list(some.configs) == [*names[:3], *names[4:7], *names[8:]]
    for wrong in ("128x999", DEFAULT):
        with pytest.raises(BenchError, match=f"--skip names {wrong}; --dry-run lists"):
            length_classes(every.cells, FORWARD, skip=[names[3], wrong])


def test_kernels_that_no_row_may_have_are_left_out() -> None:
    (one,) = length_classes([Cell.of("bfloat16", 256, True, 512)], FORWARD)
    specs = list(one.specs.values())
    reports: dict[Any, PtxasReport | None] = dict.fromkeys(specs, CLEAN)
    reports[specs[0]] = reports[specs[1]] = CLEAN._replace(spill_bytes=8, stack_bytes=16)
    reports[specs[2]] = CLEAN._replace(remarks=("C7510 wgmma serialized",))
    reports[specs[3]] = None
    (kept,), dropped = without_unfit([one], reports.get)
    names = list(one.configs)
    assert [(entry["variant"], entry["reason"]) for entry in dropped] == [
        (names[1], "8 bytes spill, 16 bytes of stack"),
        (names[2], "C7510 wgmma serialized"),
        (names[3], "did not compile"),
    ]
    assert list(kept.configs) == [DEFAULT, *names[4:]]
