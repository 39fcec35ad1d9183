"""The order of the tiles, on plain ints: each once, longest first where it matters, and what shares L2 together."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from int32 import Int32

from flashhopper.config import ForwardConfig, KernelSpec
from flashhopper.kernel_list import forward_specs
from flashhopper.kernels.block_range import key_blocks
from flashhopper.kernels.tile_scheduler import L2_KV_BYTES, TileCoord, TileGrid

SPECS = [spec for spec in forward_specs() if spec.dtype == "bfloat16"]
NUM_SMS = 132


def coords(grid: TileGrid) -> list[TileCoord]:
    return [grid.coord(tile) for tile in range(grid.num_tiles)]


def groups(grid: TileGrid) -> list[list[TileCoord]]:
    """The tiles of each group of heads, in the order of work."""
    tiles, size = coords(grid), grid.group * grid.num_m_blocks
    return [tiles[start : start + size] for start in range(0, len(tiles), size)]


@given(
    num_m_blocks=st.integers(1, 9),
    num_heads=st.integers(1, 7),
    batch=st.integers(1, 5),
    group=st.integers(1, 40),
    causal=st.booleans(),
)
def test_each_tile_once_and_the_longest_first(
    num_m_blocks: int, num_heads: int, batch: int, group: int, causal: bool
) -> None:
    total = num_heads * batch
    group = min(group, total)
    grid = TileGrid(num_m_blocks, num_heads, total, group, causal)
    tiles = coords(grid)
    assert len(tiles) == num_m_blocks * num_heads * batch
    assert set(tiles) == {TileCoord(*c) for c in product(range(num_m_blocks), range(num_heads), range(batch))}
    for index, members in enumerate(groups(grid)):
        heads = {head + num_heads * batch_entry for _, head, batch_entry in members}
        assert heads == set(range(index * group, min((index + 1) * group, total)))
        rows = [m_block for m_block, _, _ in members]
        assert rows == sorted(rows, reverse=causal)


PROBLEMS = {
    "seqlen_q": st.integers(1, 1500),
    "seqlen_k": st.one_of(st.integers(1, 1500), st.integers(1, 60_000)),
    "heads_k": st.integers(1, 4),
    "ratio": st.sampled_from([1, 2, 3, 6, 8]),
    "batch": st.integers(1, 3),
}


def make_grid(
    spec: KernelSpec, seqlen_q: int, seqlen_k: int, heads_k: int, ratio: int, batch: int, num_ctas: int = NUM_SMS
) -> TileGrid:
    return TileGrid.create((seqlen_q, heads_k * ratio, batch), (seqlen_k, heads_k, batch), spec, num_ctas)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@settings(max_examples=40, deadline=None)
@given(**PROBLEMS)
def test_grids_of_problems(
    spec: KernelSpec, seqlen_q: int, seqlen_k: int, heads_k: int, ratio: int, batch: int
) -> None:
    grid = make_grid(spec, seqlen_q, seqlen_k, heads_k, ratio, batch)
    assert grid.num_m_blocks == -(-seqlen_q // spec.config.tile_m)
    assert grid.num_heads_total == heads_k * ratio * batch
    assert 1 <= grid.group <= grid.num_heads_total
    assert len(set(coords(grid))) == grid.num_tiles
    config, bytes_of_head = spec.config, 2 * (spec.head_dim + spec.head_dim_v) * seqlen_k
    work = [
        key_blocks(
            m_block * config.tile_m,
            seqlen_q,
            seqlen_k,
            num_rows=config.tile_m,
            tile_n=config.tile_n,
            causal=spec.causal,
        ).num_blocks
        for m_block in range(grid.num_m_blocks)
    ]
    for members in groups(grid):
        lengths = [work[m_block] for m_block, _, _ in members]
        assert lengths == sorted(lengths, reverse=True)
        key_heads = {(batch_entry, head // ratio) for _, head, batch_entry in members}
        # K and V fit in L2; one key head may be cut between two groups, and one is worked on whatever its size.
        assert (len(key_heads) - 1) * bytes_of_head <= L2_KV_BYTES or len(key_heads) <= 2


def test_heads_that_share_keys_and_values_run_together() -> None:
    """16 query heads on 2 key heads: the first wave of CTAs works on tiles of few key heads."""
    spec = SPECS[0]
    grid = make_grid(spec, 4096, 4096, heads_k=2, ratio=8, batch=16)
    key_heads = {(batch, head // 8) for _, head, batch in coords(grid)[:NUM_SMS]}
    assert len(key_heads) * 8 * grid.num_m_blocks >= NUM_SMS
    assert (len(key_heads) - 2) * 8 * grid.num_m_blocks <= spec.config.group_waves * NUM_SMS


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_causal_launch_ends_with_its_shortest_tiles(spec: KernelSpec) -> None:
    """The last tiles of each group are those of the first rows, which see fewest keys."""
    grid = make_grid(replace(spec, causal=True), 2000, 2000, heads_k=4, ratio=1, batch=2)
    for members in groups(grid):
        heads = len({(head, batch) for _, head, batch in members})
        assert {m_block for m_block, _, _ in members[-heads:]} == {0}
        assert {m_block for m_block, _, _ in members[:heads]} == {grid.num_m_blocks - 1}


@pytest.mark.parametrize("heads, seqlen_k", [(2**14, 1), (2**15, 2), (2**17, 8), (8, 2**30)])
def test_groups_are_computed_in_32_bits(heads: int, seqlen_k: int) -> None:
    """Many query heads on one key head whose keys are few: 131,072 such key heads fit in L2."""
    spec = KernelSpec("bfloat16", 64, 64, False, ForwardConfig(128, 128))
    shape_q, shape_k = tuple(map(Int32, (1, heads, 1))), tuple(map(Int32, (seqlen_k, 1, 1)))
    grid = TileGrid.create(shape_q, shape_k, spec, Int32(132))
    assert 1 <= grid.group <= heads
    assert grid.num_tiles == heads
    assert grid.coord(heads - 1) == (0, heads - 1, 0)


@given(num_n_blocks=st.integers(1, 9), num_heads=st.integers(1, 7), batch=st.integers(1, 5), group=st.integers(1, 40))
def test_key_tiles_of_a_head_are_claimed_in_falling_order(
    num_n_blocks: int, num_heads: int, batch: int, group: int
) -> None:
    """The deterministic backward: a key block waits for the later ones of its head, which others hold already."""
    total = num_heads * batch
    seen: dict[tuple[int, int], int] = {}
    for n_block, head, batch_entry in coords(TileGrid(num_n_blocks, num_heads, total, min(group, total), True)):
        assert n_block == seen.get((head, batch_entry), num_n_blocks) - 1
        seen[head, batch_entry] = n_block
    assert set(seen.values()) == {0}


@given(
    seqlens=st.tuples(st.integers(1, 20_000), st.one_of(st.integers(1, 20_000), st.integers(1, 2**30))),
    heads_k=st.one_of(st.integers(1, 40), st.integers(1, 4096)),
    ratio=st.integers(1, 16),
    spec=st.sampled_from(SPECS),
    num_ctas=st.integers(1, 132),
)
def test_one_group_of_heads_is_found_without_a_division(
    seqlens: tuple[int, int], heads_k: int, ratio: int, spec: KernelSpec, num_ctas: int
) -> None:
    (seqlen_q, seqlen_k), heads = seqlens, heads_k * ratio
    grid = TileGrid.create((seqlen_q, heads, 1), (seqlen_k, heads_k, 1), spec, num_ctas)
    assert TileGrid.is_one_group((seqlen_q, heads), (seqlen_k, heads_k), spec, num_ctas) == (grid.group == heads)
