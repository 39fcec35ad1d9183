"""Ragged batches: sequences one after another in one tensor, as TMA and the tile schedulers see them."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64

from flashhopper.kernels import ptx
from flashhopper.kernels.values import ceil_div, minimum

# A tensor map has one bound per dimension, a ragged tensor one end per sequence. The rows are therefore spread over
# three dimensions: index BOUND - length + r of the first is outside from r = length on, and the other two, at fixed
# coordinates, take the address to the sequence: (BOUND - length + r) · stride + BOUND · (2^34 - stride) + (start +
# length) · stride is (start + r) · stride bytes modulo 2^64. (Triton's descriptors of ragged tensors use the same.)
BOUND = 2**30
WRAP_BYTES = 2**34
RECORD_WORDS = 8
WARP_LANES = 32
PAST_TILES = 2**31 - 1


def own_block(start: Any, sequence: Any, rows: Any) -> Any:
    """Number of the first block of ``rows`` rows of a sequence that begins at row ``start``, where every sequence has
    blocks of its own: there are ``total // rows + sequences``. Runs on plain ints too."""
    return start // rows + sequence


class Rows(NamedTuple):
    """The rows of one sequence in a tensor of packed sequences."""

    start: Any
    length: Any


def ragged_view(m: cute.Tensor, element_bytes: int, rows_mode: int) -> cute.Tensor:
    """``m`` ``(1, total, heads, head_dim)`` for TMA: (rows, head_dim, heads, …), or (head_dim, rows, heads, …)."""
    _, total, heads, head_dim = m.shape
    _, row_stride, head_stride, _ = m.stride
    back = cute.assume(Int64(WRAP_BYTES // element_bytes) - row_stride, divby=16 // element_bytes)
    shape, stride = [BOUND, head_dim], [row_stride, 1]
    if rows_mode == 1:
        shape, stride = shape[::-1], stride[::-1]
    layout = cute.make_layout((*shape, heads, BOUND + 1, total + 1), stride=(*stride, head_stride, back, row_stride))
    return cute.make_tensor(m.iterator, layout)


def head_rows(gX: cute.Tensor, head: Int32, batch: Int32, rows: Rows | None, rows_mode: int = 0) -> cute.Tensor:
    """The (rows, columns) of one head in TMA's coordinates: of a batch entry, or of a sequence."""
    if rows is None:
        return gX[None, None, head, batch]
    sequence = gX[None, None, head, BOUND, rows.start + rows.length]
    offset = tuple(BOUND - rows.length if mode == rows_mode else 0 for mode in (0, 1))
    return cute.domain_offset(offset, sequence)


class OwnBlocks:
    """Which rows are in a block, where every sequence of a ragged batch has blocks of its own: :func:`own_block`."""

    def __init__(self, cu_seqlens: cute.Tensor, lengths: cute.Tensor, total: Int32, rows: int):
        """``cu_seqlens`` int32 ``(sequences + 1,)``, ``lengths`` int32 ``(sequences,)``: rows that count."""
        self.cu_seqlens, self.lengths, self.total, self.rows = cu_seqlens, lengths, total, rows

    @cute.jit
    def find(self, block: Int32):
        """The block's sequence, its first row in the packed tensor, and the end of its sequence: no row of the block if
        that is not larger."""
        low, size = Int32(0), cute.size(self.lengths)
        while size > 1:
            half = size // 2
            is_later = own_block(self.cu_seqlens[low + half], low + half, self.rows) > block
            low = low if is_later else low + half
            size = half if is_later else size - half
        start = self.cu_seqlens[low]
        first = start + (block - own_block(start, low, self.rows)) * self.rows
        return low, first, minimum(start + self.lengths[low], self.total)


class Sequence(NamedTuple):
    """A sequence of a ragged batch. ``rows`` are those of the side that is cut into tiles."""

    batch: Any
    rows: Rows
    others: Rows  # length -1: the rows are no sequence's, and all that is asked for is zeros
    first_tile: Any


class SequenceTable:
    """What the schedule kernel wrote: records of sequences in the order they are worked on, and their first tiles."""

    def __init__(self, records: cute.Tensor, first_tiles: cute.Tensor):
        """``records``: int32 ``(sequences · 8,)``: batch index, start and length of the rows, start and length of the
        other side's. ``first_tiles``: int32 ``(sequences + 1,)``, the last is the number of tiles."""
        self.records, self.first_tiles = records, first_tiles
        self.count = cute.size(first_tiles) - 1

    def num_tiles(self) -> Int32:
        return self.first_tiles[self.count]

    @cute.jit
    def sample(self, lane: Int32):
        """The first tiles of 32 sequences that every search begins with, one a lane: in a register they take none of
        the time between two tiles."""
        place, first_tile = lane * ceil_div(self.count, WARP_LANES), Int32(PAST_TILES)
        if place < self.count:
            first_tile = self.first_tiles[place]
        return first_tile

    @cute.jit
    def find(self, tile: Int32, lane: Int32, sample: Int32):
        """The sequence with this tile. A whole warp calls this: it looks at 32 places at a time, first at those of
        :meth:`sample`."""
        first_tiles = self.first_tiles
        step = ceil_div(self.count, WARP_LANES)
        low = (cute.arch.popc(ptx.ballot(sample <= tile)) - 1) * step
        size = minimum(step, self.count - low)
        while size > 1:
            step = ceil_div(size, WARP_LANES)
            is_later = True
            if lane * step < size:
                is_later = first_tiles[low + lane * step] > tile
            place = (cute.arch.popc(ptx.ballot(not is_later)) - 1) * step
            low, size = low + place, minimum(step, size - place)
        first_tile, word = first_tiles[low], self.records[low * RECORD_WORDS + lane % RECORD_WORDS]
        batch, start, length, start_others, length_others = (cute.arch.shuffle_sync(word, i) for i in range(5))
        return Sequence(batch, Rows(start, length), Rows(start_others, length_others), first_tile)
