"""Online softmax in base 2 over the key blocks of one warpgroup, with an exact and a lazy row maximum.

Scores reach this module raw. ``softmax_scale_log2`` = softmax_scale · log2(e) is folded into the FMA in front of exp2,
and the reference that is subtracted lives in the same base-2 units, rounded once: below MAX_REFERENCE it cancels.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from flashhopper.config import Dtype, ForwardConfig
from flashhopper.kernels import ptx
from flashhopper.kernels.mask import ROWS_PER_THREAD, KeyMask

LOG2_E = 1.4426950408889634
NO_REFERENCE = -3.0e38  # "no key seen yet": finite, so that (-inf) - (-inf) cannot arise
MOVE_ABOVE = 2.0**30  # a partial row sum above this moves the lazy reference
# Beyond this reference its own rounding, half a spacing, is more than P's dtype can hold: the row becomes NaN.
MAX_REFERENCE = {"bfloat16": 2.0**31, "float16": 2.0**28, "float8_e4m3fn": 2.0**24}
TRUSTED_SUM = (2.0**-60, 2.0**100)  # a final lazy row sum outside proves nothing: the tile is redone


class ExactSoftmax:
    """The ordinary online softmax: the running row maximum is the reference in every block."""

    is_lazy = False

    def __init__(self, softmax_scale_log2: Float32, max_reference: float):
        self.scale, self.max_reference = softmax_scale_log2, max_reference
        state = [cute.make_rmem_tensor((ROWS_PER_THREAD,), Float32) for _ in range(3)]
        self.row_max, self.row_sum, self.scores_scale = state

    def reset(self) -> None:
        self.row_max.fill(NO_REFERENCE)
        self.row_sum.fill(0.0)

    @cute.jit
    def exact_step(self, rows_S: cute.Tensor):
        """Turn scores into P, update maximum and sum, and leave O's rescale factor in ``scores_scale``."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            s = rows_S[r, None].load()
            block_max = s.reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
            for lanes in (1, 2):  # fmax compiles to one FMNMX, warp_reduction_max to a comparison and a select
                block_max = cute.arch.fmax(block_max, cute.arch.shuffle_sync_bfly(block_max, offset=lanes))
            new_max = cute.arch.fmax(self.row_max[r], block_max * self.scale)
            self.scores_scale[r] = cute.arch.exp2(self.row_max[r] - new_max)
            p = cute.math.exp2(s * self.scale - new_max, fastmath=True)
            self.row_sum[r] = self.row_sum[r] * self.scores_scale[r] + p.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            self.row_max[r] = new_max
            rows_S[r, None].store(p)

    @cute.jit
    def unmasked_step(self, rows_S: cute.Tensor):
        """One block that no mask cuts. Returns whether O must be rescaled by ``scores_scale``."""
        self.exact_step(rows_S)
        return Boolean(True)

    @cute.jit
    def scale_rows(self, rows_O: cute.Tensor):
        """Multiply the rows of O by ``scores_scale``."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            rows_O[r, None].store(rows_O[r, None].load() * self.scores_scale[r])

    @cute.jit
    def clear_rows_without_weight(self, rows_O: cute.Tensor):
        """After :meth:`finalize`: zero the rows of O whose weights are all 0. 0 · V is NaN where V is not finite."""
        if ptx.vote_any((self.scores_scale[0] == 0.0) | (self.scores_scale[1] == 0.0)):
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                if self.scores_scale[r] == 0.0:
                    rows_O[r, None].fill(0.0)

    @cute.jit
    def finalize(self, rows_lse: cute.Tensor, mask: KeyMask, lane: Int32, sink: Float32 | None):
        """Leave 1 / sum in ``scores_scale``, the natural-log LSE in ``rows_lse``; returns whether sums are trusted.

        ``sink``: a logit in base 2 that takes part in the sum and has no value, or None.
        """
        trusted = Boolean(True)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            total = cute.arch.warp_reduction_sum(self.row_sum[r], threads_in_group=4)
            reference = self.row_max[r]
            if cute.arch.fmax(reference, -reference) >= self.max_reference and reference != NO_REFERENCE:
                total = Float32(float("nan"))
            if const_expr(self.is_lazy):
                in_range = (total > TRUSTED_SUM[0]) & (total < TRUSTED_SUM[1])
                trusted = trusted & (in_range | mask.sees_no_key(r, lane))
            factor = Float32(1.0)
            if const_expr(sink is not None):
                reference = cute.arch.fmax(self.row_max[r], sink)
                factor = cute.arch.exp2(self.row_max[r] - reference)
                total = total * factor + cute.arch.exp2(sink - reference)
            self.scores_scale[r] = cute.arch.rcp_approx(total) * factor if total != 0.0 else Float32(0.0)
            rows_lse[r] = (reference + cute.math.log2(total, fastmath=True)) * (1.0 / LOG2_E)
        return trusted

    @cute.jit
    def is_finite(self, acc_O: cute.Tensor):
        """Whether no element of the accumulator is Inf or NaN."""
        flat_O = cute.make_tensor(acc_O.iterator, cute.make_layout(cute.size(acc_O)))
        zero = cute.make_rmem_tensor((4,), Float32)  # 0 · x is 0 unless x is Inf or NaN; 4 chains for latency
        zero.fill(0.0)
        for i in cutlass.range_constexpr(cute.size(acc_O)):
            zero[i % 4] = zero[i % 4] + flat_O[i] * 0.0
        return (zero[0] + zero[1]) + (zero[2] + zero[3]) == 0.0


class LazySoftmax(ExactSoftmax):
    """Softmax is invariant to the reference: unmasked blocks keep the one that the exact blocks before them found.

    That leaves out maximum, shuffles and rescaling of O. Sums above 2**30 move the reference. What that cannot cover (a
    jump of more than 2**97 inside one block, sums that vanish) shows in the final sum or in a non-finite O: the tile is
    then redone with exact steps. docs/lazy-softmax.md has the argument.
    """

    is_lazy = True

    def __init__(self, softmax_scale_log2: Float32, max_reference: float, exp2_on_fma: int = 0):
        """``exp2_on_fma``: of each 8 exponentials, so many as a polynomial."""
        super().__init__(softmax_scale_log2, max_reference)
        self.exp2_on_fma = exp2_on_fma

    @cute.jit
    def unmasked_step(self, rows_S: cute.Tensor):
        moves = ptx.vote_any(cute.arch.fmax(self.row_sum[0], self.row_sum[1]) > MOVE_ABOVE)
        if moves:
            self.move_reference()
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            p = self.exp2(rows_S[r, None].load() * self.scale - self.row_max[r])
            self.row_sum[r] = self.row_sum[r] + p.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            rows_S[r, None].store(p)
        return moves

    def exp2(self, x: cute.TensorSSA) -> cute.TensorSSA:
        """Of a row's scores, in base 2 and relative to its reference."""
        if self.exp2_on_fma == 0:
            return cute.math.exp2(x, fastmath=True)
        values = cute.make_rmem_tensor(x.shape, Float32)
        values.store(x)
        for i in range(cute.size(values)):
            # Spread evenly: 0 of 8, then every multiple of 8 / exp2_on_fma.
            on_fma = i * self.exp2_on_fma % 8 < self.exp2_on_fma
            values[i] = ptx.exp2_polynomial(values[i]) if on_fma else cute.math.exp2(values[i], fastmath=True)
        return values.load()

    @cute.jit
    def move_reference(self):
        """Raise the reference by log2 of the row sum. A sum too large to trust becomes NaN, for good."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            total = cute.arch.warp_reduction_sum(self.row_sum[r], threads_in_group=4)
            new_max = self.row_max[r] + cute.math.log2(cute.arch.fmax(total, Float32(1.0)), fastmath=True)
            self.scores_scale[r] = cute.arch.exp2(self.row_max[r] - new_max)
            moved = self.row_sum[r] * self.scores_scale[r]
            # A factor of 0 (the new reference was rounded up by more than exp2 can scale) would lose the row unseen.
            holds = (total < TRUSTED_SUM[1]) & (self.scores_scale[r] > 0.0)
            self.row_sum[r] = moved if holds else Float32(float("nan"))
            self.row_max[r] = new_max


def make_softmax(config: ForwardConfig, dtype: Dtype, softmax_scale_log2: Float32) -> ExactSoftmax:
    """The softmax policy that ``config.softmax`` names."""
    if config.softmax == "lazy":
        return LazySoftmax(softmax_scale_log2, MAX_REFERENCE[dtype], config.exp2_on_fma)
    return ExactSoftmax(softmax_scale_log2, MAX_REFERENCE[dtype])
