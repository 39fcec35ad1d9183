"""``score_mod`` and ``mask_mod`` in the backward: P from S, and P times the derivative of the score, in one pass."""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from flashhopper.kernels import ptx
from flashhopper.kernels.backward_cta import BackwardCta
from flashhopper.kernels.backward_scores import ScoreMath, flat, packed
from flashhopper.kernels.cta import Lengths
from flashhopper.kernels.features import alibi_bias
from flashhopper.kernels.programs import PairProgram, pausing
from flashhopper.kernels.values import minimum, select
from flashhopper.slopes import with_slope

WORDS = 4  # of two elements each, written at a time: 16 bytes


def in_fours(words: cute.Tensor) -> cute.Tensor:
    """Packed elements as ``(4, words / 4)``, the form of the exchange tile."""
    return cute.make_tensor(words.iterator, cute.make_layout((WORDS, cute.size(words) // WORDS)))


PAIRS = 2  # of query rows, between pauses


class BlockPlace(NamedTuple):
    """A block of scores: its key and query blocks, its query head and batch entry, its sequence's lengths."""

    n_block: Int32
    m_block: Int32
    head: Int32
    batch: Int32
    lengths: Lengths


class GradientMods:
    """The functions of a kernel, with whatever else its features do to scores."""

    def __init__(self, cta: BackwardCta, math: ScoreMath):
        self.cta, self.math, self.args = cta, math, cta.features
        self.tensors = cta.features.mod_tensors or ()

    def probabilities(
        self,
        acc_S: cute.Tensor,
        lse: cute.Tensor,
        place: BlockPlace,
        operand_P: cute.Tensor,
        factors: Any,
        pause: Callable[[], None],
    ) -> None:
        """S to P, packed into its operand; ``lse``, ``(2, pairs)``, is in shared memory. ``factors``,
        ``(4, words / 4)`` or None, gets what dS is computed with: P, times the factor on dS if the kernel has one.
        Hidden pairs have 0 in both, whatever their scores are. ``pause``: see :func:`pausing`."""
        features, config, math = self.cta.spec.features, self.cta.spec.config, self.math
        score_mod = features.score_mod and self.program(with_slope(features.score_mod), place)
        mask_mod = features.mask_mod and self.program(features.mask_mod, place)
        values, words_P = flat(acc_S), packed(operand_P)
        slope_of_alibi = None if self.args.alibi is None else self.args.alibi[place.batch, place.head]
        first_key, first_row = place.n_block * config.tile_n + math.key, place.m_block * config.tile_m + math.column
        offset = place.lengths.k - place.lengths.q
        last_row, last_key = place.lengths.q - 1 - first_row, place.lengths.k - 1 - first_key
        bounds = [self.seeing(first_key + 8 * i, offset) for i in range(2)]
        four, row_lse = cute.make_rmem_tensor((WORDS,), Int32), cute.make_rmem_tensor((2,), Float32)
        for j in pausing(math.pairs, PAIRS, pause):
            cute.autovec_copy(lse[None, j], row_lse)
            for i in range(2):
                pair, scaled = [], []
                for x in range(2):
                    query, key = first_row + (8 * j + x), first_key + 8 * i
                    score, factor = values[4 * j + 2 * i + x], None
                    if self.args.softcap is not None:
                        score = cute.math.tanh(score * self.args.softcap, fastmath=True)
                        factor = 1.0 - score * score
                    if slope_of_alibi is not None:
                        score = score + alibi_bias(slope_of_alibi, query + offset, key)
                    row_index = ((j, x), first_row + minimum(8 * j + x, last_row))
                    key_index = (i, first_key + minimum(8 * i, last_key))
                    if score_mod is not None:
                        score, *slopes = score_mod(row_index, key_index, score * self.args.score_unit)
                        for slope in slopes:
                            factor = slope if factor is None else factor * slope
                    visible = key < place.lengths.k
                    first, end = bounds[i]
                    if first is not None:
                        visible = visible & (query >= first)
                    if end is not None:
                        visible = visible & (query < end)
                    if mask_mod is not None:
                        visible = visible & mask_mod(row_index, key_index)[0]
                    p = cute.math.exp2(score * math.scale_log2 - row_lse[x], fastmath=True)
                    p = select(visible, p, Float32(0.0))
                    pair.append(p)
                    if factor is not None:  # which may be infinite where there is no probability
                        scaled.append(select(p != 0.0, p * factor, Float32(0.0)))
                word = 2 * j + i
                words_P[word] = ptx.pack_16bit(*pair, operand_P.element_type)
                if factors is not None:
                    four[word % WORDS] = words_P[word]
                    if scaled:
                        four[word % WORDS] = ptx.pack_16bit(*scaled, operand_P.element_type)
                    if word % WORDS == WORDS - 1:
                        cute.autovec_copy(four, factors[None, word // WORDS])

    def program(self, program: Any, place: BlockPlace) -> PairProgram:
        return PairProgram(program, self.tensors, place.head, place.batch)

    def seeing(self, key: Int32, offset: Int32) -> tuple[Any, Any]:
        """First and end of the query rows that see a key by position; None without a bound."""
        if self.cta.window is not None:
            first, end = self.cta.window.positions(key)
            return first - offset, end - offset
        return (key - offset, None) if self.cta.spec.causal else (None, None)
