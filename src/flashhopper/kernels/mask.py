"""Element masks on the score accumulators of one warpgroup."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from flashhopper.kernels import ptx
from flashhopper.kernels.block_range import KeyWindow
from flashhopper.kernels.values import minimum

ROWS_PER_THREAD = 2  # rows lane / 4 and lane / 4 + 8 of a warp's 16 (PTX ISA 9.7.15.5.1, accumulator of wgmma m64nN)


def rows_view(acc: cute.Tensor) -> cute.Tensor:
    """A (row, column) view of an m64nN accumulator: 2 rows a thread, columns 8 j + 2 (lane % 4) + {0, 1}."""
    columns = cute.make_layout((2, cute.size(acc) // 4), stride=(1, 4))
    return cute.make_tensor(acc.iterator, cute.make_layout((2, columns.shape), stride=(2, columns.stride)))


class KeyMask:
    """Hides the keys past the end of the sequence and, if causal, past the diagonal aligned to the bottom right, or
    outside a window around it."""

    def __init__(self, tile_n: int, causal: bool, window: KeyWindow | None):
        self.tile_n, self.causal, self.window = tile_n, causal, window
        # Visible keys of each row, minus this thread's column.
        self.end_key, self.first_key = (cute.make_rmem_tensor((ROWS_PER_THREAD,), Int32) for _ in range(2))

    @property
    def hides_positions(self) -> bool:
        """Whether keys may be hidden before the sequence ends."""
        return self.causal or self.window is not None

    @cute.jit
    def set_rows(self, row: Int32, lane: Int32, seqlen_q: Int32, seqlen_k: Int32):
        """For a thread whose rows of the query sequence are ``row`` and ``row + 8``."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            end = seqlen_k
            if const_expr(self.causal):
                end = minimum(seqlen_k, row + 8 * r + seqlen_k - seqlen_q + 1)
            if const_expr(self.window is not None):
                first, window_end = self.window.keys(row + 8 * r + seqlen_k - seqlen_q)
                end = minimum(seqlen_k, window_end)
                self.first_key[r] = first - 2 * (lane % 4)
            self.end_key[r] = end - 2 * (lane % 4)

    @cute.jit
    def apply(self, rows_S: cute.Tensor, n_block: Int32):
        """Set the scores of hidden keys of block ``n_block`` to -inf."""
        # Columns outside, rows inside: where both rows share a comparison it is used at once, not kept in a register.
        first_key = n_block * self.tile_n
        for c in cutlass.range_constexpr(self.tile_n // 4):
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                column = 8 * (c // 2) + c % 2
                visible = column < self.end_key[r] - first_key
                if const_expr(self.window is not None):
                    visible = visible & (column >= self.first_key[r] - first_key)
                rows_S[r, c] = rows_S[r, c] if visible else -Float32.inf

    def cuts_last_block(self, seqlen_k: Int32):
        """Whether some key of the block visited first may be hidden; without a mask only a ragged end does that."""
        if self.hides_positions:
            return Boolean(True)
        return (seqlen_k % self.tile_n != 0) | (seqlen_k == 0)

    def sees_no_key(self, r: int, lane: Int32):
        """Whether row ``r`` of this thread has no visible key at all. With a window rows far enough past the last query
        have none either."""
        sees_none = self.end_key[r] + 2 * (lane % 4) <= 0
        if self.window is not None:
            sees_none = sees_none | (self.end_key[r] <= self.first_key[r])
        return sees_none

    @cute.jit
    def clear_rows_without_keys(self, rows_O: cute.Tensor, lane: Int32):
        """Zero the rows of O that see no key: their P is 0, but 0 · V is NaN where V is not finite."""
        if ptx.vote_any(self.sees_no_key(0, lane)):  # a query in row 0 sees no more than one in row 1
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                if self.sees_no_key(r, lane):
                    rows_O[r, None].fill(0.0)
