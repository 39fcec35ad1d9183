"""dK and dV out: from accumulators straight to global memory, 16 bytes a thread.

Not through shared memory: a tile's results would need K's and V's bytes, which the next tile's loads want, and a
barrier between all warpgroups.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from flashhopper.kernels import ptx
from flashhopper.kernels.backward_scores import flat

WORDS = 4  # 32-bit words in 16 bytes, and lanes of a quad
COLUMNS = 8  # 16-bit elements in 16 bytes


@cute.jit
def transpose_quad(words: cute.Tensor, lane: Int32):
    """Exchange 4 words between the 4 lanes of a quad: lane q's word j becomes lane j's word q. Two butterfly steps."""
    for distance in (1, 2):
        is_upper = lane & distance != 0
        for i in cutlass.range_constexpr(WORDS):
            if cutlass.const_expr(i & distance == 0):
                low, high = words[i], words[i + distance]
                received = cute.arch.shuffle_sync_bfly(low if is_upper else high, offset=distance)
                words[i] = received if is_upper else low
                words[i + distance] = high if is_upper else received


@cute.jit
def write_rows(acc: cute.Tensor, gX: cute.Tensor, rows: tuple[Int32, Int32], scale: Float32, element: Any, lane: Int32):
    """A thread's two rows of a 64-row accumulator to ``gX`` (rows, columns). ``rows``: the first of the two, 8 before
    the other, and the end; what lies past it is dropped.

    A lane of a quad holds columns 8 j + 2 (lane % 4) + {0, 1} of a row. For 4 neighbouring j the quad exchanges its
    words, so that each lane has the 8 columns of one j.
    """
    values = flat(acc)
    groups = cute.size(acc) // 4  # of 8 columns
    words = cute.make_rmem_tensor((WORDS,), Int32)
    first_row, end_row = rows
    for i in cutlass.range_constexpr(2):
        row = first_row + 8 * i
        gRow = gX[row, None]
        for group in cutlass.range_constexpr(0, groups, WORDS):
            for j in cutlass.range_constexpr(WORDS):
                at = 4 * (group + j) + 2 * i
                words[j] = ptx.pack_16bit(values[at] * scale, values[at + 1] * scale, element)
            transpose_quad(words, lane)
            column = COLUMNS * (group + lane % 4)
            if row < end_row and column < gX.shape[1]:
                target = cute.recast_ptr(cute.domain_offset((column,), gRow).iterator.align(16), dtype=Int32)
                cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(WORDS)))
