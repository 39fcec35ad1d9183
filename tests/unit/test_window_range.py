"""Windows and chunks: which blocks are visited and which of them are whole, on plain ints, pair by pair."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from int32 import Int32

from flashhopper.config import ROWS_PER_WARPGROUP
from flashhopper.heuristics import BACKWARD_TABLE, TILE_TABLE
from flashhopper.kernels.block_range import UNBOUNDED, BlockRange, KeyWindow, hides_all, key_blocks, query_blocks
from flashhopper.reference import visible_keys

TILES = sorted({(row.config.tile_m, row.config.tile_n) for row in TILE_TABLE})
BACKWARD_TILES = sorted({(row.config.tile_m, row.config.tile_n) for row in BACKWARD_TABLE})

LONGEST = UNBOUNDED - 1024  # up to the end of the last tile, a position and a side of a window add up to 32 bits


class Masks(NamedTuple):
    """As a user says them; -1 is without bound, a chunk of 0 none."""

    left: int
    right: int
    chunk: int

    @property
    def window(self) -> KeyWindow:
        """As the kernels have them."""
        sides = (UNBOUNDED if side < 0 else side for side in (self.left, self.right))
        return KeyWindow(*sides, self.chunk or None)

    def seen(self, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
        """``(seqlen_q, seqlen_k)``: whether the query row sees the key, by the reference's masks."""
        masks = {"window_size": (self.left, self.right), "attention_chunk": self.chunk}
        starts, ends, _ = visible_keys(seqlen_q, seqlen_k, **masks)
        keys = torch.arange(seqlen_k)
        return (keys >= starts[:, None]) & (keys < ends[:, None])


def masks(longest: int) -> st.SearchStrategy[Masks]:
    side = st.one_of(st.just(-1), st.integers(0, longest))
    return st.builds(Masks, side, side, st.one_of(st.just(0), st.integers(1, longest)))


def check_key_range(seen: torch.Tensor, blocks: BlockRange, tile_n: int) -> torch.Tensor:
    """How often each pair of the rows ``seen (rows, keys)`` counts; hidden pairs do not count in masked blocks."""
    first, start = blocks.first, blocks.first + blocks.num_left
    whole = range(start, start + blocks.num_unmasked)
    assert min(first, blocks.num_left, blocks.num_unmasked) >= 0
    assert blocks.num_right >= 1, "a masked block comes first"
    assert blocks.end == whole.stop + blocks.num_right
    for n_block in whole:
        keys = seen[:, n_block * tile_n : (n_block + 1) * tile_n]
        assert keys.shape[1] == tile_n, "a block without mask reaches past the last key"
        assert bool(keys.all()), "a block without mask has a hidden pair"
    if blocks.num_blocks > 1:
        for n_block in range(first, blocks.end):
            assert bool(seen[:, n_block * tile_n : (n_block + 1) * tile_n].any()), "a block is loaded for nothing"
    visited_first = seen[:, whole.stop * tile_n : blocks.end * tile_n].any(dim=1)
    assert torch.equal(visited_first, seen.any(dim=1)), "a row sees its first key in a block that takes no maximum"
    n_block = torch.arange(seen.shape[1]) // tile_n
    is_whole = (n_block >= whole.start) & (n_block < whole.stop)
    return ((n_block >= first) & (n_block < blocks.end) & (seen | is_whole)).int()


def check_forward(seqlen_q: int, seqlen_k: int, tile_m: int, num_rows: int, tile_n: int, chosen: Masks) -> None:
    """All tiles of a sequence, each cut into warpgroups of ``num_rows`` rows: every visible pair exactly once."""
    seen, visits = chosen.seen(seqlen_q, seqlen_k), []
    shape = {"tile_n": tile_n, "causal": False, "window": chosen.window}
    for tile_row in range(0, seqlen_q, tile_m):
        tile = key_blocks(tile_row, seqlen_q, seqlen_k, num_rows=tile_m, **shape)
        check_key_range(seen[tile_row : tile_row + tile_m], tile, tile_n)
        for row in range(tile_row, min(tile_row + tile_m, seqlen_q), num_rows):
            blocks = key_blocks(row, seqlen_q, seqlen_k, num_rows=num_rows, **shape)
            rows = seen[row : row + num_rows]
            if bool(rows.any()):
                assert tile.first <= blocks.first
                assert blocks.end <= tile.end, "a warpgroup waits for a block that the tile does not load"
            visits.append(check_key_range(rows, blocks, tile_n))
    assert torch.equal(torch.cat(visits), seen.int())


def check_backward(seqlen_q: int, seqlen_k: int, tile_m: int, tile_n: int, chosen: Masks) -> None:
    """All key blocks of a sequence: every visible pair exactly once, whole blocks whole, none for nothing."""
    seen, visits = chosen.seen(seqlen_q, seqlen_k), torch.zeros(seqlen_q, seqlen_k, dtype=torch.int32)
    for n_block in range(-(-seqlen_k // tile_n)):
        keys = slice(n_block * tile_n, (n_block + 1) * tile_n)
        blocks = query_blocks(
            n_block, seqlen_q, seqlen_k, tile_m=tile_m, tile_n=tile_n, causal=False, window=chosen.window
        )
        whole = range(blocks.first + blocks.num_masked, blocks.first + blocks.num_masked + blocks.num_whole)
        assert min(blocks) >= 0
        assert blocks.num_masked + blocks.num_whole <= blocks.num_blocks
        for m_block in range(blocks.first, blocks.first + blocks.num_blocks):
            rows = slice(m_block * tile_m, (m_block + 1) * tile_m)
            pairs = seen[rows, keys]
            assert len(pairs) > 0, "a block of queries past the last"
            if m_block in whole:
                assert pairs.shape[1] == tile_n, "a key block without mask reaches past the last key"
                assert bool(pairs.all()), "a block without mask has a hidden pair"
            assert bool(pairs.any()), "a block is loaded for nothing"
            visits[rows, keys] += pairs
    assert torch.equal(visits, seen.int())


@settings(deadline=None, max_examples=400)
@given(
    lengths=st.tuples(st.integers(1, 40), st.integers(0, 40)),
    num_rows=st.integers(1, 6),
    warpgroups=st.integers(1, 3),
    tile_n=st.integers(1, 9),
    chosen=masks(45),
)
@example(lengths=(40, 1), num_rows=4, warpgroups=2, tile_n=4, chosen=Masks(0, 0, 0))  # tiles without any key
@example(
    lengths=(9, 30), num_rows=3, warpgroups=1, tile_n=8, chosen=Masks(-1, -1, 7)
)  # chunks cut blocks on both sides
def test_forward(lengths: tuple[int, int], num_rows: int, warpgroups: int, tile_n: int, chosen: Masks) -> None:
    check_forward(*lengths, warpgroups * num_rows, num_rows, tile_n, chosen)


@settings(deadline=None, max_examples=400)
@given(
    lengths=st.tuples(st.integers(0, 40), st.integers(1, 40)),
    tile_m=st.integers(1, 9),
    tile_n=st.integers(1, 9),
    chosen=masks(45),
)
def test_backward(lengths: tuple[int, int], tile_m: int, tile_n: int, chosen: Masks) -> None:
    check_backward(*lengths, tile_m, tile_n, chosen)


def near(tile: int) -> st.SearchStrategy[int]:
    """Up to three tiles: anything, or within 1 of a multiple."""
    close = st.builds(lambda n, off: max(n * tile + off, 1), st.integers(0, 3), st.integers(-1, 1))
    return st.one_of(close, st.integers(1, 3 * tile))


@given(
    lengths=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    first_row=st.integers(0, 320),
    first_key=st.integers(0, 320),
    tile=st.tuples(st.sampled_from([1, 64, 128]), st.sampled_from([1, 64])),
    chosen=st.one_of(st.none(), masks(300)),
)
def test_hidden_from_all(
    lengths: tuple[int, int], first_row: int, first_key: int, tile: tuple[int, int], chosen: Masks | None
) -> None:
    """Rows and keys that exist: the mask hides all of them, or somebody sees one. None: the causal mask."""
    (seqlen_q, seqlen_k), (num_rows, num_keys) = lengths, tile
    seen = (chosen or Masks(-1, 0, 0)).seen(seqlen_q, seqlen_k)
    block = seen[first_row : first_row + num_rows, first_key : first_key + num_keys]
    window = None if chosen is None else chosen.window
    hidden = hides_all(first_key, num_keys, first_row + seqlen_k - seqlen_q, num_rows, window)
    assert not (hidden and bool(block.any()))
    if block.shape == (num_rows, num_keys):  # else it may be the ends of the sequences that hide what there is
        assert hidden == (not bool(block.any()))


@pytest.mark.parametrize("tile_m, tile_n", TILES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_forward_tiles_of_the_table(tile_m: int, tile_n: int, data: st.DataObject) -> None:
    lengths = data.draw(near(tile_m)), data.draw(near(tile_n))
    check_forward(*lengths, tile_m, ROWS_PER_WARPGROUP, tile_n, data.draw(masks(4 * tile_n)))


@pytest.mark.parametrize("tile_m, tile_n", BACKWARD_TILES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_backward_tiles_of_the_table(tile_m: int, tile_n: int, data: st.DataObject) -> None:
    lengths = data.draw(near(tile_m)), data.draw(near(tile_n))
    check_backward(*lengths, tile_m, tile_n, data.draw(masks(4 * tile_n)))


@settings(deadline=None)
@given(
    lengths=st.tuples(st.integers(1, LONGEST), st.integers(1, LONGEST)),
    at=st.floats(0, 1),
    tile=st.sampled_from(TILES),
    backward_tile=st.sampled_from(BACKWARD_TILES),
    chosen=masks(UNBOUNDED),
)
@example(lengths=(LONGEST, 1), at=0.0, tile=TILES[0], backward_tile=BACKWARD_TILES[0], chosen=Masks(-1, -1, UNBOUNDED))
@example(lengths=(1, LONGEST), at=1.0, tile=TILES[0], backward_tile=BACKWARD_TILES[0], chosen=Masks(-1, -1, UNBOUNDED))
def test_nothing_leaves_32_bits(
    lengths: tuple[int, int], at: float, tile: tuple[int, int], backward_tile: tuple[int, int], chosen: Masks
) -> None:
    """Of the longest sequences, with sides as large as they come."""
    seqlen_q, seqlen_k = (Int32(n) for n in lengths)
    window = KeyWindow(*(Int32(side) for side in chosen.window[:2]), Int32(chosen.chunk) if chosen.chunk else None)
    tile_m, tile_n = tile
    row = Int32(int(at * (lengths[0] - 1)) // tile_m * tile_m)
    blocks = key_blocks(row, seqlen_q, seqlen_k, num_rows=tile_m, tile_n=tile_n, causal=False, window=window)
    assert 0 <= blocks.first < blocks.end
    tile_m, tile_n = backward_tile
    n_block = Int32(int(at * (lengths[1] - 1)) // tile_n)
    ranges = query_blocks(n_block, seqlen_q, seqlen_k, tile_m=tile_m, tile_n=tile_n, causal=False, window=window)
    assert 0 <= ranges.first <= ranges.first + ranges.num_blocks


@settings(deadline=None, max_examples=300)
@given(
    lengths=st.tuples(st.integers(1, 400), st.integers(1, 400)),
    tile=st.one_of(st.sampled_from(BACKWARD_TILES), st.tuples(st.integers(1, 9), st.integers(1, 9))),
    chosen=st.one_of(st.none(), masks(400)),
    causal=st.booleans(),
)
def test_a_query_block_is_met_by_its_key_blocks_from_the_last_down(
    lengths: tuple[int, int], tile: tuple[int, int], chosen: Masks | None, causal: bool
) -> None:
    """What the deterministic backward counts: the key blocks that add to a query block begin with the last of
    ``key_blocks`` and follow each other without a gap; else one of them would wait for ever."""
    (seqlen_q, seqlen_k), (tile_m, tile_n) = lengths, tile
    mask: dict[str, Any] = {"causal": causal and chosen is None, "window": None if chosen is None else chosen.window}
    ranges = [
        query_blocks(n, seqlen_q, seqlen_k, tile_m=tile_m, tile_n=tile_n, **mask) for n in range(-(-seqlen_k // tile_n))
    ]
    for m_block in range(-(-seqlen_q // tile_m)):
        adding = [n for n, blocks in enumerate(ranges) if blocks.first <= m_block < blocks.first + blocks.num_blocks]
        last = key_blocks(m_block * tile_m, seqlen_q, seqlen_k, num_rows=tile_m, tile_n=tile_n, **mask).end - 1
        assert [last - n for n in reversed(adding)] == list(range(len(adding)))
