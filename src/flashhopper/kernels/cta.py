"""What every role of one CTA of the forward kernel shares."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from flashhopper.config import KernelSpec
from flashhopper.kernels.block_range import BlockRange, key_blocks
from flashhopper.kernels.features import FeatureArgs
from flashhopper.kernels.pipeline import WARPS_PER_WARPGROUP, TmaRing
from flashhopper.kernels.ragged import Rows
from flashhopper.kernels.tile_scheduler import TileScheduler


class Lengths(NamedTuple):
    """Of the sequence at hand."""

    q: Any
    k: Any


class Cta:
    """The kernel's specialisation, its rings, its scheduler and the problem's extents."""

    def __init__(
        self,
        spec: KernelSpec,
        rings: tuple[TmaRing, TmaRing, TmaRing],
        scheduler: TileScheduler,
        extents: tuple[Int32, Int32, Int32],
        features: FeatureArgs,
    ):
        """``extents``: seqlen_q, seqlen_k and query heads per key head."""
        self.spec, self.scheduler, self.features = spec, scheduler, features
        self.q_ring, self.k_ring, self.v_ring = rings
        self.seqlen_q, self.seqlen_k, self.heads_per_kv_head = extents
        self.may_fail = spec.config.softmax == "lazy"
        self.window = features.key_window(spec.features)

    def lengths_of(self, queries: Rows | None, keys: Rows | None) -> Lengths:
        """Of a sequence of a ragged batch, else of every sequence."""
        if queries is None or keys is None:
            return Lengths(self.seqlen_q, self.seqlen_k)
        return Lengths(queries.length, keys.length)

    def key_blocks(self, first_row: Int32, num_rows: int, lengths: Lengths) -> BlockRange:
        """The key blocks that ``num_rows`` query rows from ``first_row`` visit."""
        return key_blocks(
            first_row,
            *lengths,
            num_rows=num_rows,
            tile_n=self.spec.config.tile_n,
            causal=self.spec.causal,
            window=self.window,
        )

    @cute.jit
    def initialise_barriers(self):
        """One warp initialises every mbarrier, the copy engine is told, and the CTA synchronises."""
        warps = WARPS_PER_WARPGROUP * self.spec.config.num_consumer_warpgroups
        if cute.arch.warp_idx() == 0:
            with cute.arch.elect_one():
                self.q_ring.initialise(warps)
                self.k_ring.initialise(warps)
                self.v_ring.initialise(warps)
                self.scheduler.mailbox.initialise(warps)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
