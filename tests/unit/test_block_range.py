"""Which key blocks are visited, on plain ints, against the visible pairs one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from int32 import Int32

from flashhopper.config import ROWS_PER_WARPGROUP
from flashhopper.heuristics import BACKWARD_TABLE, TILE_TABLE
from flashhopper.kernels.block_range import BlockRange, key_blocks, query_blocks
from flashhopper.problem import MAX_EXTENT

TILES = sorted({(row.config.tile_m, row.config.tile_n) for row in TILE_TABLE})
BACKWARD_TILES = sorted({(row.config.tile_m, row.config.tile_n) for row in BACKWARD_TABLE})


def visible_pairs(seqlen_q: int, seqlen_k: int, causal: bool) -> torch.Tensor:
    """``(seqlen_q, seqlen_k)``: whether the query row sees the key."""
    rows, keys = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
    return keys <= rows + seqlen_k - seqlen_q if causal else torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)


def may_be_unmasked(seen: torch.Tensor, num_blocks: int, count: int, tile_n: int) -> bool:
    """Whether the first ``count`` of ``num_blocks`` blocks need no mask for rows that see ``seen (rows, keys)``.

    Each row sees them whole, and one block at least is left in which every row that sees a key at all sees one.
    """
    whole = count * tile_n <= seen.shape[1] and bool(seen[:, : count * tile_n].all())
    rest = seen[:, count * tile_n :].any(dim=1)
    return whole and count < num_blocks and torch.equal(rest, seen.any(dim=1))


def check_rows(seen: torch.Tensor, blocks: BlockRange, tile_n: int) -> torch.Tensor:
    """How often each pair of the existing rows ``seen (rows, keys)`` counts in the range; hidden pairs do not count
    where the block is masked."""

    num_blocks, num_unmasked, first, num_left = blocks
    assert (first, num_left) == (0, 0)
    if len(seen) == 0:  # past the end of the sequence
        assert blocks == (1, 0, 0, 0)
    else:
        assert num_blocks == 1 or bool(seen[:, (num_blocks - 1) * tile_n :].any()), "the last block has no use"
        assert may_be_unmasked(seen, num_blocks, num_unmasked, tile_n)
        assert not may_be_unmasked(seen, num_blocks, num_unmasked + 1, tile_n), "one block more needs no mask"
    n_block = torch.arange(seen.shape[1]) // tile_n
    return ((n_block < num_blocks) & (seen | (n_block < num_unmasked))).int()


def check_sequence(seqlen_q: int, seqlen_k: int, tile_m: int, num_rows: int, tile_n: int, causal: bool) -> None:
    """All tiles of a sequence, each cut into warpgroups of ``num_rows`` rows."""
    seen = visible_pairs(seqlen_q, seqlen_k, causal)
    visits = []
    for tile_row in range(0, seqlen_q, tile_m):
        tile = key_blocks(tile_row, seqlen_q, seqlen_k, num_rows=tile_m, tile_n=tile_n, causal=causal)
        for row in range(tile_row, tile_row + tile_m, num_rows):
            blocks = key_blocks(row, seqlen_q, seqlen_k, num_rows=num_rows, tile_n=tile_n, causal=causal)
            assert blocks.num_blocks <= tile.num_blocks  # what the producer loads
            visits.append(check_rows(seen[row : row + num_rows], blocks, tile_n))
        check_rows(seen[tile_row : tile_row + tile_m], tile, tile_n)
    assert torch.equal(torch.cat(visits), seen.int())


@settings(deadline=None)
@given(
    seqlen_q=st.integers(1, 40),
    seqlen_k=st.integers(1, 40),
    num_rows=st.integers(1, 6),
    warpgroups=st.integers(1, 3),
    tile_n=st.integers(1, 9),
    causal=st.booleans(),
)
@example(seqlen_q=40, seqlen_k=1, num_rows=4, warpgroups=2, tile_n=4, causal=True)  # tiles without any key
@example(seqlen_q=1, seqlen_k=40, num_rows=4, warpgroups=3, tile_n=4, causal=True)  # warpgroups without any row
def test_every_visible_pair_is_visited_once(
    seqlen_q: int, seqlen_k: int, num_rows: int, warpgroups: int, tile_n: int, causal: bool
) -> None:
    check_sequence(seqlen_q, seqlen_k, warpgroups * num_rows, num_rows, tile_n, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile_m, tile_n", TILES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_tiles_of_the_table(tile_m: int, tile_n: int, causal: bool, data: st.DataObject) -> None:
    def length(tile: int) -> st.SearchStrategy[int]:
        near = st.builds(lambda n, off: max(n * tile + off, 1), st.integers(0, 3), st.integers(-1, 1))
        return st.one_of(near, st.integers(1, 3 * tile))

    seqlen_q, seqlen_k = data.draw(length(tile_m)), data.draw(length(tile_n))
    check_sequence(seqlen_q, seqlen_k, tile_m, ROWS_PER_WARPGROUP, tile_n, causal)


@given(
    lengths=st.tuples(st.integers(1, MAX_EXTENT), st.integers(1, MAX_EXTENT)),
    row=st.floats(0, 1),
    tile=st.sampled_from(TILES),
    causal=st.booleans(),
)
@example(lengths=(MAX_EXTENT, MAX_EXTENT), row=1.0, tile=TILES[-1], causal=True)
@example(lengths=(MAX_EXTENT, 1), row=1.0, tile=TILES[-1], causal=True)
def test_32_bits_are_enough(lengths: tuple[int, int], row: float, tile: tuple[int, int], causal: bool) -> None:
    seqlen_q, seqlen_k = lengths
    tile_m, tile_n = tile
    first_row = int(row * (seqlen_q - 1)) // tile_m * tile_m
    blocks = key_blocks(
        Int32(first_row), Int32(seqlen_q), Int32(seqlen_k), num_rows=tile_m, tile_n=tile_n, causal=causal
    )
    assert blocks == key_blocks(first_row, seqlen_q, seqlen_k, num_rows=tile_m, tile_n=tile_n, causal=causal)
    assert 0 <= blocks.num_unmasked < blocks.num_blocks <= -(-seqlen_k // tile_n)


def check_key_tiles(seqlen_q: int, seqlen_k: int, tile_m: int, tile_n: int, causal: bool) -> None:
    """Every key tile of a sequence: visible pairs counted once, blocks without one left out, masks where needed."""
    num_m_blocks = -(-seqlen_q // tile_m)
    seen = visible_pairs(seqlen_q, seqlen_k, causal)
    for n_block in range(-(-seqlen_k // tile_n)):
        keys = slice(n_block * tile_n, (n_block + 1) * tile_n)
        first, num_masked, num_blocks, num_whole = query_blocks(
            n_block, seqlen_q, seqlen_k, tile_m=tile_m, tile_n=tile_n, causal=causal
        )
        assert 0 <= num_masked <= num_blocks == num_masked + num_whole
        assert first + num_blocks == num_m_blocks
        for m_block in range(num_m_blocks):
            rows = slice(m_block * tile_m, (m_block + 1) * tile_m)
            assert (first <= m_block) == bool(seen[rows, keys].any())
            if m_block >= first:
                # Rows past the end hide nothing: their probabilities are 0 anyway. Keys past the end must be masked.
                sees_all = keys.stop <= seqlen_k and bool(seen[rows, keys].all())
                assert (m_block >= first + num_masked) == sees_all


@settings(deadline=None)
@given(
    seqlen_q=st.integers(1, 40),
    seqlen_k=st.integers(1, 40),
    tile_m=st.integers(1, 9),
    tile_n=st.integers(1, 9),
    causal=st.booleans(),
)
@example(seqlen_q=1, seqlen_k=40, tile_m=4, tile_n=4, causal=True)
@example(seqlen_q=40, seqlen_k=1, tile_m=4, tile_n=4, causal=True)
def test_every_key_tile_meets_the_queries_that_see_it(
    seqlen_q: int, seqlen_k: int, tile_m: int, tile_n: int, causal: bool
) -> None:
    check_key_tiles(seqlen_q, seqlen_k, tile_m, tile_n, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile_m, tile_n", BACKWARD_TILES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_tiles_of_the_backward_table(tile_m: int, tile_n: int, causal: bool, data: st.DataObject) -> None:
    lengths = st.one_of(st.integers(1, 300), st.sampled_from([63, 64, 65, 127, 128, 129, 256, 257]))
    check_key_tiles(data.draw(lengths), data.draw(lengths), tile_m, tile_n, causal)


@given(
    lengths=st.tuples(st.integers(1, MAX_EXTENT), st.integers(1, MAX_EXTENT)),
    key=st.floats(0, 1),
    tile=st.sampled_from(BACKWARD_TILES),
    causal=st.booleans(),
)
@example(lengths=(MAX_EXTENT, MAX_EXTENT), key=1.0, tile=BACKWARD_TILES[-1], causal=True)
@example(lengths=(1, MAX_EXTENT), key=0.0, tile=BACKWARD_TILES[-1], causal=True)
def test_32_bits_are_enough_for_query_blocks(
    lengths: tuple[int, int], key: float, tile: tuple[int, int], causal: bool
) -> None:
    seqlen_q, seqlen_k = lengths
    tile_m, tile_n = tile
    n_block = int(key * (seqlen_k - 1)) // tile_n
    sizes = {"tile_m": tile_m, "tile_n": tile_n, "causal": causal}
    narrow = query_blocks(Int32(n_block), Int32(seqlen_q), Int32(seqlen_k), **sizes)
    assert narrow == query_blocks(n_block, seqlen_q, seqlen_k, **sizes)
    assert 0 <= narrow.num_masked <= narrow.num_blocks <= -(-seqlen_q // tile_m)
