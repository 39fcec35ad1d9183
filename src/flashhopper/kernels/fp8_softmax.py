"""Online softmax for FP8: scores come with a scale of their block, and P with an offset in its exponent.

e4m3 has 2⁻⁹ as its smallest number and 448 as its largest: with P = 2**offset where the score is the reference, P fills
that range. The offset is part of the reference, row_max, and so cancels in O and in LSE.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from flashhopper.config import Softmax
from flashhopper.kernels import ptx
from flashhopper.kernels.mask import ROWS_PER_THREAD
from flashhopper.kernels.softmax import MAX_REFERENCE, ExactSoftmax

# Log2 of P at the reference. The exact maximum leaves less than one power of two to 448; the lazy reference may be
# passed, up to 248, the first e4m3 number whose bits reveal it to one addition. 2⁶ cost 7 % in moved references.
OFFSET = {"exact": 8.0, "lazy": 4.0}
REVEALS_248 = 0x08080808  # added to four e4m3 bytes at once, sets the highest bit of each that is 248 or more, or NaN
HIGH_BITS = -0x7F7F7F80  # 0x80808080
SMALLEST_SCALE = 1e-30  # of scores: with 0 a hidden score's -inf would become NaN


class Fp8ExactSoftmax(ExactSoftmax):
    """The running row maximum is the reference in every block."""

    offset = OFFSET["exact"]

    def __init__(self, softmax_scale_log2: Float32):
        super().__init__(softmax_scale_log2, MAX_REFERENCE["float8_e4m3fn"])
        # Of the item: q's scale · softmax scale; of the block: that times k's.
        self.item_scale, self.block_scale = (cute.make_rmem_tensor((1,), Float32) for _ in range(2))
        # By what the reference has moved since O was last flushed to shared memory.
        self.flushed_scale = cute.make_rmem_tensor((ROWS_PER_THREAD,), Float32)

    def begin_item(self, q_scale: Float32) -> None:
        self.flushed_scale.fill(1.0)
        self.item_scale[0] = q_scale * self.scale

    @cute.jit
    def begin_block(self, k_scale: Float32):
        """Scores of the block are multiplied by this. NaN stays NaN."""
        scale = self.item_scale[0] * k_scale
        self.block_scale[0] = Float32(SMALLEST_SCALE) if scale < SMALLEST_SCALE else scale

    @cute.jit
    def exact_step(self, rows_S: cute.Tensor):
        """Turn scores into P, update reference and sum, and leave O's rescale factor in ``scores_scale``."""
        scale = self.block_scale[0]
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            s = rows_S[r, None].load()
            block_max = s.reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
            for lanes in (1, 2):
                block_max = cute.arch.fmax(block_max, cute.arch.shuffle_sync_bfly(block_max, offset=lanes))
            new_max = cute.arch.fmax(self.row_max[r], block_max * scale - self.offset)
            self.scores_scale[r] = cute.arch.exp2(self.row_max[r] - new_max)
            p = cute.math.exp2(s * scale - new_max, fastmath=True)
            self.row_sum[r] = self.row_sum[r] * self.scores_scale[r] + p.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            self.row_max[r] = new_max
            self.flushed_scale[r] = self.flushed_scale[r] * self.scores_scale[r]
            rows_S[r, None].store(p)


class Fp8LazySoftmax(Fp8ExactSoftmax):
    """Unmasked blocks keep the reference that the exact blocks before them found, until a P reaches 248.

    That shows in P's bytes, before P is used: the block's maximum then becomes the reference. A jump that fp32 cannot
    hold leaves a sum that is not finite, and the tile is redone with exact steps.
    """

    is_lazy = True
    offset = OFFSET["lazy"]

    @cute.jit
    def unmasked_step(self, rows_S: cute.Tensor):
        """P of a block by the reference there is. O needs no rescaling."""
        scale = self.block_scale[0]
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            p = cute.math.exp2(rows_S[r, None].load() * scale - self.row_max[r], fastmath=True)
            self.row_sum[r] = self.row_sum[r] + p.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            rows_S[r, None].store(p)
        return Boolean(False)

    @cute.jit
    def is_passed(self, packed_P: cute.Tensor):
        """Whether some P of the warp, packed by fours, is too large for the reference."""
        seen = Int32(0)
        for i in cutlass.range_constexpr(cute.size(packed_P)):
            seen = seen | (packed_P[i] + REVEALS_248)
        return ptx.vote_any((seen & HIGH_BITS) != 0)

    @cute.jit
    def move_reference(self, rows_S: cute.Tensor, rows_O: cute.Tensor):
        """Make the block's maximum, which P tells, the reference of P, sum and O."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            p = rows_S[r, None].load()
            largest = p.reduce(cute.ReductionOp.MAX, Float32(0.0), 0)
            for lanes in (1, 2):
                largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=lanes))
            new_max = self.row_max[r] + cute.arch.fmax(
                cute.math.log2(largest, fastmath=True) - self.offset, Float32(0.0)
            )
            factor = cute.arch.exp2(self.row_max[r] - new_max)
            rows_S[r, None].store(p * factor)
            rows_O[r, None].store(rows_O[r, None].load() * factor)
            self.row_sum[r] = self.row_sum[r] * factor
            self.flushed_scale[r] = self.flushed_scale[r] * factor
            self.row_max[r] = new_max


def make_fp8_softmax(policy: Softmax, softmax_scale_log2: Float32) -> Fp8ExactSoftmax:
    """The softmax policy that ``ForwardConfig.softmax`` names."""
    return {"exact": Fp8ExactSoftmax, "lazy": Fp8LazySoftmax}[policy](softmax_scale_log2)
