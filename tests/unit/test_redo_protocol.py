"""Redone tiles and turns of the warpgroups, played through on :mod:`cta_model`: whatever the speeds and the pattern of
failures, each tile ends with one trusted run, in at most two, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from cta_model import Machine

from flashhopper.config import Features, ForwardConfig, KernelSpec
from flashhopper.kernel_list import forward_specs
from flashhopper.kernels.block_range import UNBOUNDED
from flashhopper.kernels.smem import NamedBarrier
from flashhopper.kernels.turns import SLOTS, turn_barrier

TABLE = [spec for spec in forward_specs() if spec.dtype == "bfloat16"]


def variants() -> Iterator[tuple[str, KernelSpec]]:
    """The table's pipelines under each scheduler and softmax, and the smallest there is."""
    smallest = ForwardConfig(64, 128, num_stages=1)
    largest = ForwardConfig(256, 64, num_stages=2, warpgroup_order="relay")
    ahead = ForwardConfig(128, 64, num_stages=2, num_q_stages=2, prefetch_scores=True, warpgroup_order="relay")
    others = (smallest, largest, ahead, replace(ahead, warpgroup_order="ping_pong"))
    bases = [*TABLE, *(KernelSpec("bfloat16", 64, 64, True, config) for config in others)]
    for index, base in enumerate(bases):
        for scheduler in ("single", "static", "dynamic"):
            for softmax in ("exact", "lazy"):
                config = replace(base.config, scheduler=scheduler, softmax=softmax)
                yield f"{index}-{base.name}-{scheduler}-{softmax}", replace(base, config=config)


def test_named_barriers_are_distinct() -> None:
    """Per consumer warpgroup: a turn for each slot and the epilogue's; 0 is the CTA's, 15 the last there is."""
    warpgroups = range(4)
    turns = [turn_barrier(warpgroup, slot) for warpgroup in warpgroups for slot in range(SLOTS)]
    numbers = [*turns, *(NamedBarrier.EPILOGUE + warpgroup for warpgroup in warpgroups)]
    assert sorted(map(int, numbers)) == list(range(1, 13))


VARIANTS = dict(variants())
WINDOWS = {
    f"{index}-{spec.name}": spec
    for chunk in (False, True)
    for index, spec in enumerate(forward_specs(Features(window=True, chunk=chunk)))
    if spec.dtype == "bfloat16"
}


@pytest.mark.parametrize("failing", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", VARIANTS)
def test_each_tile_ends_with_a_trusted_run(
    name: str, failing: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, spec = Random(seed), VARIANTS[name]
    for _ in range(8):
        tile_m, tile_n = spec.config.tile_m, spec.config.tile_n
        extents = (random.randint(1, 5 * tile_m), random.randint(1, 4 * tile_n), random.randint(1, 3), 1)
        with monkeypatch.context() as patches:
            machine = Machine(spec, extents, random, failing)
            machine.install(patches)
            machine.run()
            check(machine)


@pytest.mark.parametrize("failing", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_leave_blocks_out_on_both_sides(
    name: str, failing: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one warpgroup of a tile does not see at either end of its range it releases all the same."""
    random, spec = Random(seed), WINDOWS[name]
    for _ in range(8):
        tile_m, tile_n = spec.config.tile_m, spec.config.tile_n
        extents = (random.randint(1, 5 * tile_m), random.randint(1, 8 * tile_n), random.randint(1, 3), 1)
        left, right = (random.choice([0, random.randint(0, 3 * tile_n), UNBOUNDED]) for _ in range(2))
        window = (left, right, random.randint(1, 4 * tile_n))
        with monkeypatch.context() as patches:
            machine = Machine(spec, extents, random, failing, window)
            machine.install(patches)
            machine.run()
            check(machine)


def own_tiles(machine: Machine) -> list[int]:
    """The numbers of the tiles that this CTA must have worked on."""
    num_tiles, num_ctas = machine.grid.num_tiles, machine.num_ctas
    if machine.spec.config.scheduler != "dynamic":
        return list(range(machine.index, num_tiles, num_ctas))
    others = (set(range(num_ctas)) - {machine.index}).union(machine.other_claims)
    return [tile for tile in range(num_tiles) if tile not in others]


def check(machine: Machine) -> None:
    fresh = [run.tile for run in machine.runs if not run.exact]
    assert fresh == [machine.grid.coord(tile) for tile in own_tiles(machine)]  # each once, in order
    failed = [run.tile for run in machine.runs if not (run.exact or run.trusted)]
    assert [run.tile for run in machine.runs if run.exact] == failed  # each failed tile once more, and no other
    assert machine.workspace[2] == len(failed)
    if machine.failing == 0 or not machine.cta.may_fail:
        assert not failed
    elif machine.failing == 1:
        assert failed == fresh
    if machine.spec.config.scheduler == "dynamic":
        assert machine.workspace[1] == (0 if machine.is_last or machine.num_ctas == 1 else 1)
        assert (machine.workspace[0] == 0) == (machine.workspace[1] == 0)
