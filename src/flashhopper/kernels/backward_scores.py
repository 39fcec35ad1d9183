"""Probabilities and score gradients of the backward on one warpgroup's accumulators: 64 keys × tile_m query rows.

Scores are transposed: a thread holds keys lane / 4 and lane / 4 + 8 of its warp's 16, and query rows
8 j + 2 (lane % 4) + {0, 1} (PTX ISA 9.7.15.5.1, accumulator of wgmma m64nN), which is element i0 + 2 i1 + 4 j.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flashhopper.kernels import ptx
from flashhopper.kernels.backward_cta import BackwardCta
from flashhopper.kernels.cta import Lengths
from flashhopper.kernels.features import alibi_bias, cap_scores


def flat(fragment: cute.Tensor) -> cute.Tensor:
    """A register tensor as one row of elements."""
    return cute.make_tensor(fragment.iterator, cute.make_layout(cute.size(fragment)))


def packed(fragment: cute.Tensor) -> cute.Tensor:
    """A register tensor of 16-bit elements as words of two."""
    words = cute.make_layout(cute.size(fragment) // 2)
    return cute.make_tensor(cute.recast_ptr(fragment.iterator, dtype=Int32), words)


@cute.jit
def pack(acc: cute.Tensor, operand: cute.Tensor):
    """Accumulator to register operand: the order is the same for 16-bit types."""
    values, words = flat(acc), packed(operand)
    for i in cutlass.range_constexpr(cute.size(words)):
        words[i] = ptx.pack_16bit(values[2 * i], values[2 * i + 1], operand.element_type)


class ScoreMath:
    """P from S and the rows' LSE; dS from P, dP and the rows' delta (FlashAttention-2, algorithm 2)."""

    def __init__(
        self, cta: BackwardCta, rows: tuple[cute.Tensor, cute.Tensor], scale_log2: Float32, key: Int32, lane: Int32
    ):
        """``rows``: LSE and delta, (tile_m, stages); ``key``: this thread's first in the tile."""
        self.cta, self.scale_log2 = cta, scale_log2
        self.key, self.column = key, 2 * (lane % 4)
        self.pairs = cta.spec.config.tile_m // 8
        self.sLSE, self.sDelta = (self._pairs(x, lane) for x in rows)

    def _pairs(self, sX: cute.Tensor, lane: Int32) -> cute.Tensor:
        """(2, pair, stage): the values of this thread's query rows."""
        tile_m, stages = sX.shape
        layout = cute.make_layout((2, 4, tile_m // 8, stages), stride=(1, 2, 8, tile_m))
        return cute.make_tensor(sX.iterator, layout)[None, lane % 4, None, None]

    @cute.jit
    def load_rows(self, pairs: cute.Tensor, stage: Int32):
        """The LSE or delta of this thread's query rows: while the scores' product runs, its operands' registers are
        free, and the loads' latency is hidden."""
        rows = cute.make_rmem_tensor((2, self.pairs), Float32)
        for j in cutlass.range_constexpr(self.pairs):
            cute.autovec_copy(pairs[None, j, stage], rows[None, j])
        return rows

    @cute.jit
    def cap(self, acc_S: cute.Tensor, operand_F: cute.Tensor):
        """Softcap: S to tanh(S · softcap) in place, and the factor on dS, 1 - tanh², packed."""
        values, words = flat(acc_S), packed(operand_F)
        cap_scores(values, self.cta.features.softcap)
        for i in cutlass.range_constexpr(cute.size(words)):
            low, high = values[2 * i], values[2 * i + 1]
            words[i] = ptx.pack_16bit(1.0 - low * low, 1.0 - high * high, operand_F.element_type)

    @cute.jit
    def cap_gradients(self, operand_F: cute.Tensor, operand_P: cute.Tensor):
        """The factor to P · factor, with which dS is computed, in place."""
        factors, words_P, element = packed(operand_F), packed(operand_P), operand_P.element_type
        for i in cutlass.range_constexpr(cute.size(factors)):
            low, high = (
                ptx.unpack_16bit(words_P[i], is_high, element) * ptx.unpack_16bit(factors[i], is_high, element)
                for is_high in (False, True)
            )
            factors[i] = ptx.pack_16bit(low, high, element)

    @cute.jit
    def add_bias(self, acc_S: cute.Tensor, n_block: Int32, m_block: Int32, lengths: Lengths, slope: Float32):
        """ALiBi on S, in place."""
        values, config = flat(acc_S), self.cta.spec.config
        key = n_block * config.tile_n + self.key
        position = m_block * config.tile_m + self.column + (lengths.k - lengths.q)
        for j in cutlass.range_constexpr(self.pairs):
            for i in cutlass.range_constexpr(2):
                for x in cutlass.range_constexpr(2):
                    index = 4 * j + 2 * i + x
                    values[index] = values[index] + alibi_bias(slope, position + (8 * j + x), key + 8 * i)

    @cute.jit
    def probabilities(self, acc_S: cute.Tensor, lse: cute.Tensor):
        """S to P = exp2(S · scale_log2 - LSE) in place. Rows without keys and past the end have an LSE of +inf."""
        values = flat(acc_S)
        for j in cutlass.range_constexpr(self.pairs):
            for x in cutlass.range_constexpr(4):
                exponent = values[4 * j + x] * self.scale_log2 - lse[x % 2, j]
                values[4 * j + x] = cute.math.exp2(exponent, fastmath=True)

    @cute.jit
    def hide(self, acc_S: cute.Tensor, n_block: Int32, m_block: Int32, lengths: Lengths):
        """In a masked block: zero the probabilities of keys past the end and, if causal or in a window, of keys that
        the query does not see."""
        values, config = flat(acc_S), self.cta.spec.config
        key = n_block * config.tile_n + self.key
        query = m_block * config.tile_m + self.column
        offset = lengths.k - lengths.q
        first_query = key - offset  # which sees this key
        for i in cutlass.range_constexpr(2):
            first_seeing, end_seeing = first_query, first_query
            if const_expr(self.cta.window is not None):
                first_position, end_position = self.cta.window.positions(key + 8 * i)
                first_seeing, end_seeing = first_position - offset, end_position - offset
            for j in cutlass.range_constexpr(self.pairs):
                for x in cutlass.range_constexpr(2):
                    visible = key + 8 * i < lengths.k
                    if const_expr(self.cta.window is not None):
                        row = query + (8 * j + x)
                        visible = visible & (row >= first_seeing) & (row < end_seeing)
                    if const_expr(self.cta.spec.causal):
                        visible = visible & (query + (8 * j + x) >= first_query + 8 * i)
                    index = 4 * j + 2 * i + x
                    values[index] = values[index] if visible else Float32(0.0)

    @cute.jit
    def hide_gradients(self, acc_dP: cute.Tensor, words_P: cute.Tensor, element: Any):
        """In a masked block: dP of pairs without probability, where a hidden key's V may be Inf or NaN."""
        values = flat(acc_dP)
        for i in cutlass.range_constexpr(cute.size(values)):
            p = ptx.unpack_16bit(words_P[i // 2], i % 2 == 1, element)
            values[i] = values[i] if p != 0.0 else Float32(0.0)

    @cute.jit
    def gradients(self, acc_dP: cute.Tensor, words_P: cute.Tensor, element: Any, delta: cute.Tensor):
        """dP to dS = P · (dP - delta) in place; P comes packed, as the second product reads it. ``delta`` (2, pairs)
        is in registers or in shared memory."""
        values, rows = flat(acc_dP), cute.make_rmem_tensor((2,), Float32)
        for j in cutlass.range_constexpr(self.pairs):
            cute.autovec_copy(delta[None, j], rows)
            for x in cutlass.range_constexpr(4):
                p = ptx.unpack_16bit(words_P[2 * j + x // 2], x % 2 == 1, element)
                values[4 * j + x] = p * (values[4 * j + x] - rows[x % 2])
