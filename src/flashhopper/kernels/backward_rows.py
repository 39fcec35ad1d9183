"""The 64 query rows that one CTA of the kernels before and after the main backward kernel works on."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_fake_compact_tensor

from flashhopper.config import ROWS_PER_WARPGROUP
from flashhopper.kernels.backward_grid import ROW_PADDING, padded_row
from flashhopper.kernels.ragged import SequenceTable
from flashhopper.kernels.values import ceil_div, divide

BLOCKS_PER_TILE = ROW_PADDING // ROWS_PER_WARPGROUP  # of a ragged batch, whose schedule has tiles of ROW_PADDING rows


class RowBlock(NamedTuple):
    """64 rows of a head, in the tensors and in the workspaces."""

    batch: Any
    head: Any
    start: Any  # of the sequence, in packed tensors
    seqlen: Any
    row: Any  # the block's first, in the sequence
    work_head: Any  # (batch, head) as one index of the dQ accumulator
    work_block: Any  # its row block

    @property
    def work_row(self) -> Any:
        """The block's first row in the workspaces."""
        return self.work_block * ROWS_PER_WARPGROUP


def dense_block(cta: Int32, row_blocks: Int32, num_heads: Int32, seqlen: Int32) -> RowBlock:
    """CTA after CTA: row blocks, heads, batch entries."""
    head_index, row_block = divide(cta, row_blocks)
    batch, head = divide(head_index, num_heads)
    return RowBlock(batch, head, 0, seqlen, row_block * ROWS_PER_WARPGROUP, head_index, row_block)


def ragged_ctas(first_tiles: cute.Tensor, total_rows: Int32, num_heads: Int32) -> Int32:
    """As many CTAs as a ragged batch may need: how many it does is known to the device alone."""
    tiles = total_rows // ROW_PADDING + cute.size(first_tiles) - 1
    return tiles * num_heads * BLOCKS_PER_TILE


@cute.jit
def ragged_block(table: SequenceTable, cta: Int32, lane: Int32):
    """The block of a CTA whose tile exists, and whether its rows are a sequence's."""
    sequence = table.find(cta // BLOCKS_PER_TILE, lane, table.sample(lane))
    rows = sequence.rows
    head, tile = divide(cta // BLOCKS_PER_TILE - sequence.first_tile, ceil_div(rows.length, ROW_PADDING))
    row_block = BLOCKS_PER_TILE * tile + cta % BLOCKS_PER_TILE
    work_block = padded_row(rows.start, sequence.batch) // ROWS_PER_WARPGROUP + row_block
    block = RowBlock(Int32(0), head, rows.start, rows.length, row_block * ROWS_PER_WARPGROUP, head, work_block)
    return block, sequence.others.length >= 0


def fake_sequences(is_ragged: bool) -> Any:
    """Types of records and first tiles, for the compiler, or None."""
    if not is_ragged:
        return None
    return tuple(make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=4) for _ in range(2))
