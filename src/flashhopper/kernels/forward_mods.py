"""``score_mod`` and ``mask_mod`` on the scores of one forward warpgroup."""

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from flashhopper.config import Features
from flashhopper.kernels.cta import Lengths
from flashhopper.kernels.features import FeatureArgs
from flashhopper.kernels.mask import ROWS_PER_THREAD
from flashhopper.kernels.programs import PairProgram, pausing
from flashhopper.kernels.values import maximum, minimum, select

COLUMNS = 8  # of two scores each, between pauses


class ScoreMods:
    """The functions of a kernel, applied to blocks of scores in place."""

    ROW, HEAD, BATCH, LAST_KEY = 0, ROWS_PER_THREAD, ROWS_PER_THREAD + 1, ROWS_PER_THREAD + 2

    def __init__(self, features: Features, args: FeatureArgs, tile_n: int):
        self.features, self.unit, self.tile_n = features, args.score_unit, tile_n
        self.tensors = args.mod_tensors or ()
        self.place = cute.make_rmem_tensor((ROWS_PER_THREAD + 3,), Int32)

    def set_rows(self, row: Int32, head: Int32, batch: Int32, lengths: Lengths) -> None:
        """For a thread whose rows of the query sequence are ``row`` and ``row + 8``. Rows and keys past the end, whose
        scores nobody uses, are given as the last ones, so that functions get no index that does not exist."""
        for r in range(ROWS_PER_THREAD):
            self.place[self.ROW + r] = maximum(minimum(row + 8 * r, lengths.q - 1), 0)
        self.place[self.HEAD], self.place[self.BATCH] = head, batch
        self.place[self.LAST_KEY] = maximum(lengths.k - 1, 0)

    def apply(self, rows_S: cute.Tensor, n_block: Int32, lane: Int32, pause: Callable[[], None]) -> None:
        """The scores of key block ``n_block``; -inf for what mask_mod hides. ``pause``: see :func:`pausing`."""
        place = self.place
        programs = [
            None if program is None else PairProgram(program, self.tensors, place[self.HEAD], place[self.BATCH])
            for program in (self.features.score_mod, self.features.mask_mod)
        ]
        score_mod, mask_mod = programs
        first_key = n_block * self.tile_n + 2 * (lane % 4)
        last_column = place[self.LAST_KEY] - first_key
        rows = [(r, place[self.ROW + r]) for r in range(ROWS_PER_THREAD)]
        for c in pausing(self.tile_n // 4, COLUMNS, pause):
            key = (c, first_key + minimum(8 * (c // 2) + c % 2, last_column))
            for r, row in enumerate(rows):
                score: Any = rows_S[r, c]
                if score_mod is not None:
                    (score,) = score_mod(row, key, score * self.unit)
                if mask_mod is not None:
                    (visible,) = mask_mod(row, key)
                    score = select(visible, score, Float32(-Float32.inf))
                rows_S[r, c] = score
