"""What every role of one CTA of the forward kernel shares."""

import cutlass.cute as cute
from cutlass import Int32

from flashhopper.config import KernelSpec
from flashhopper.kernels.block_range import BlockRange, key_blocks
from flashhopper.kernels.pipeline import WARPS_PER_WARPGROUP, TmaRing
from flashhopper.kernels.tile_scheduler import TileScheduler


class Cta:
    """The kernel's specialisation, its rings, its scheduler and the problem's extents."""

    def __init__(
        self,
        spec: KernelSpec,
        rings: tuple[TmaRing, TmaRing, TmaRing],
        scheduler: TileScheduler,
        extents: tuple[Int32, Int32, Int32],
    ):
        """``extents``: seqlen_q, seqlen_k and query heads per key head."""
        self.spec, self.scheduler = spec, scheduler
        self.q_ring, self.k_ring, self.v_ring = rings
        self.seqlen_q, self.seqlen_k, self.heads_per_kv_head = extents
        self.may_fail = spec.config.softmax == "lazy"

    def key_blocks(self, first_row: Int32, num_rows: int) -> BlockRange:
        """The key blocks that ``num_rows`` query rows from ``first_row`` visit."""
        return key_blocks(
            first_row,
            self.seqlen_q,
            self.seqlen_k,
            num_rows=num_rows,
            tile_n=self.spec.config.tile_n,
            causal=self.spec.causal,
        )

    @cute.jit
    def initialise_barriers(self):
        """One warp initialises every mbarrier, the copy engine is told, and the CTA synchronises."""
        groups = self.spec.config.num_consumer_warpgroups
        warps = WARPS_PER_WARPGROUP * groups
        if cute.arch.warp_idx() == 0:
            with cute.arch.elect_one():
                self.q_ring.initialise(groups if self.spec.config.share_qo_smem else warps)
                self.k_ring.initialise(warps)
                self.v_ring.initialise(warps)
                self.scheduler.mailbox.initialise(warps)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
