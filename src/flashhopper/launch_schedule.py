"""The order in which a ragged batch's sequences are worked on: the kernel that lists them, before the others."""

from __future__ import annotations

import torch

from flashhopper import current
from flashhopper.compiler import get_kernel
from flashhopper.config import ScheduleSpec
from flashhopper.problem import RaggedFacts, RaggedTensors

RECORD_WORDS = 8  # as kernels/ragged.py has it; that loads cutlass
MAX_TILES = 2**31 - 2**16  # tile numbers are 32-bit, and each CTA may claim a few past the end


class Schedule:
    """Launches the schedule kernel for one side of a ragged batch, which is cut into tiles of ``tile_rows`` rows."""

    def __init__(self, ragged: RaggedFacts, *, by_keys: bool, tile_rows: int, heads: int):
        self.by_keys, self.tile_rows, self.heads = by_keys, tile_rows, heads
        used_q, used_k = ragged.seqused_q is not None, ragged.seqused_k is not None
        self.kernel = get_kernel(ScheduleSpec(used_k, used_q) if by_keys else ScheduleSpec(used_q, used_k))

    def max_tiles(self, total_rows: int, batch: int) -> int:
        """ValueError if there may be too many."""
        tiles = (total_rows // self.tile_rows + 2 * batch) * self.heads
        if tiles > MAX_TILES:
            raise ValueError(f"{total_rows} rows in {batch} sequences are more than {MAX_TILES} tiles")
        return tiles

    def __call__(self, ragged: RaggedTensors, total_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Records and first tiles of the sequences, see ``kernels/ragged.py``."""
        rows, others = (ragged.cu_seqlens_q, ragged.seqused_q), (ragged.cu_seqlens_k, ragged.seqused_k)
        if self.by_keys:
            rows, others = others, rows
        batch = rows[0].shape[0] - 1
        self.max_tiles(total_rows, batch)
        records = current.empty_strided((2 * batch * RECORD_WORDS,), (1,), torch.int32)
        first_tiles = current.empty_strided((2 * batch + 1,), (1,), torch.int32)
        sizes = total_rows, self.tile_rows, self.heads
        self.kernel(rows[0], others[0], rows[1], others[1], records, first_tiles, *sizes)
        return records, first_tiles
