"""What a kernel has beside plain and causal attention: windows, and what is done to scores before the softmax."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from flashhopper.config import PLAIN, Features
from flashhopper.kernels.block_range import KeyWindow
from flashhopper.kernels.mask import ROWS_PER_THREAD
from flashhopper.kernels.programs import fake_tensor
from flashhopper.kernels.ragged import SequenceTable


class FeatureArgs(NamedTuple):
    """Their run-time values; None for what the kernel is not compiled with."""

    window: tuple[Int32, Int32, Int32] | None = None
    """Keys to the left and to the right, and keys per chunk."""
    softcap: Float32 | None = None
    """softmax_scale / softcap; the factor on the scores is then softcap · log2(e)."""
    alibi: Any = None
    """fp32 ``(batch, heads)``: -slope, in units of scores before their factor."""
    sink: Any = None
    """fp32 ``(heads,)``, natural units."""
    sequences: tuple[cute.Tensor, cute.Tensor] | None = None
    """See :class:`SequenceTable`."""
    score_unit: Float32 | None = None
    """With a score_mod: the factor that makes scores what it takes, natural units."""
    mod_tensors: Any = None
    """What users' functions read, a tuple."""

    def key_window(self, features: Features) -> KeyWindow | None:
        if self.window is None:
            return None
        left, right, chunk = self.window
        return KeyWindow(left, right, chunk if features.chunk else None)

    def sequence_table(self) -> Any:
        return None if self.sequences is None else SequenceTable(*self.sequences)


@cute.jit
def cap_scores(scores: cute.Tensor, softcap: Float32):
    """tanh of the scaled scores, in place; softcap itself is part of the softmax's factor. MUFU.TANH has an error of
    2**-11 (PTX ISA 9.7.3.22, tanh.approx)."""
    for i in cutlass.range_constexpr(cute.size(scores)):
        scores[i] = cute.math.tanh(scores[i] * softcap, fastmath=True)


def alibi_bias(slope: Float32, position: Int32, key: Any) -> Float32:
    """slope · abs(position - key) (Press et al. 2022, aligned to the bottom right)."""
    distance = cute.arch.fmax(Float32(position - key), Float32(key - position))
    return slope * distance


class ScoreModifier:
    """Softcap and ALiBi on the scores of one forward warpgroup, before masks and softmax."""

    def __init__(self, args: FeatureArgs, tile_n: int):
        self.softcap, self.alibi, self.tile_n = args.softcap, args.alibi, tile_n
        self.slope = cute.make_rmem_tensor((1,), Float32)
        self.positions = cute.make_rmem_tensor((ROWS_PER_THREAD,), Int32)  # of rows, minus this thread's column

    @cute.jit
    def set_rows(self, position: Int32, head: Int32, batch: Int32, lane: Int32):
        """For a thread whose rows stand at ``position`` and ``position + 8``."""
        if const_expr(self.alibi is not None):
            self.slope[0] = self.alibi[batch, head]
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                self.positions[r] = position + 8 * r - 2 * (lane % 4)

    @cute.jit
    def apply(self, rows_S: cute.Tensor, n_block: Int32):
        """The scores of key block ``n_block``, in place."""
        if const_expr(self.softcap is not None):
            cap_scores(cute.make_tensor(rows_S.iterator, cute.make_layout(cute.size(rows_S))), self.softcap)
        if const_expr(self.alibi is not None):
            first_key = n_block * self.tile_n
            for c in cutlass.range_constexpr(self.tile_n // 4):
                for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                    key = first_key + 8 * (c // 2) + c % 2
                    rows_S[r, c] = rows_S[r, c] + alibi_bias(self.slope[0], self.positions[r], key)


def fake_feature_args(features: Features) -> FeatureArgs | None:
    """Types of the run-time values, for the compiler; None without features."""
    if features == PLAIN:
        return None

    def ints() -> Any:
        return make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=4)

    slopes = make_fake_tensor(Float32, (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1), assumed_align=4)
    sinks = make_fake_compact_tensor(Float32, (cute.sym_int(),), assumed_align=4)
    return FeatureArgs(
        (Int32(1), Int32(1), Int32(1)) if features.window else None,
        Float32(1.0) if features.softcap else None,
        slopes if features.alibi else None,
        sinks if features.sink else None,
        (ints(), ints()) if features.ragged else None,
        Float32(1.0) if features.score_mod is not None else None,
        tuple(map(fake_tensor, features.mod_tensors)) or None,
    )
