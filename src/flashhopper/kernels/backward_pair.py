"""Two CTAs of a cluster that work on a tile together, a key block each: what they tell each other.

dS of every step goes to the other CTA, so that each has that of the tile's 128 keys and computes half of dQ's columns.
Both take the same steps; neither leaves before the other is done with its shared memory.
"""

from typing import ClassVar

import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects.nvvm import MemScopeKind

from flashhopper.config import WARPGROUP_THREADS
from flashhopper.kernels import ptx
from flashhopper.kernels.backward_smem import BackwardBarrier
from flashhopper.kernels.pipeline import RingState, TmaRing

NUM_CTAS = 2


class PairRing(TmaRing):
    """A ring whose stages, in both CTAs, are read by both: the stage and the other CTA's copy of it."""

    def initialise(self, consumer_warps: int, filling_warps: int = 1) -> None:
        super().initialise(NUM_CTAS * consumer_warps, filling_warps)

    @cute.jit
    def release(self, state: RingState, lane: Int32):
        """Consumer warp: done reading its own stage and its copy of the other's. Two lanes tell a CTA each. What is
        read, WGMMAs have read, which have been waited for: the arrival has nothing to order."""
        if lane < NUM_CTAS:
            cute.arch.mbarrier_arrive(self.empty + state.stage, lane)


class Pair:
    """One CTA's view of the pair. The first, of rank 0, claims tiles for both."""

    CLAIM_BYTES: ClassVar[int] = 4

    def __init__(
        self, sdS: cute.Tensor, other_dS: cute.Tensor, full: cute.Pointer, claims: TmaRing, claimed: cute.Pointer
    ):
        """``other_dS``: as ``sdS`` (tile_m, tile_n, stages), with an mbarrier of ``full`` per stage. ``claims`` guards
        the word ``claimed`` of the second CTA: its full barrier is there, its empty one in the first."""
        self.sdS, self.other_dS, self.full, self.claims, self.claimed = sdS, other_dS, full, claims, claimed
        self.rank, _, _ = cute.arch.block_in_cluster_idx()
        rows, keys, self.num_stages = (cute.size(sdS, mode=[mode]) for mode in range(3))
        self.stage_bytes = rows * keys * sdS.element_type.width // 8

    def initialise(self) -> None:
        """By one thread, before :meth:`synchronise`."""
        for stage in range(self.num_stages):
            cute.arch.mbarrier_init(self.full + stage, 1)
        self.claims.initialise(1)

    @cute.jit
    def synchronise(self):
        """All threads of both CTAs (PTX ISA 9.7.13.3, barrier.cluster)."""
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def leave(self):
        """All threads, last of all: shared memory outlives what the other CTA does to it."""
        self.synchronise()

    @cute.jit
    def send(self, state: RingState, thread: Int32):
        """The warpgroup that has written a stage of dS, each thread with a fence after: to the other CTA, which has
        released its copy of the stage, or there would have been no writing."""
        ptx.named_barrier_wait(BackwardBarrier.EXCHANGE, WARPGROUP_THREADS)
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + state.stage, self.stage_bytes)
            source, target = (x[None, None, state.stage].iterator.toint() for x in (self.sdS, self.other_dS))
            full = (self.full + state.stage).toint()
            ptx.bulk_copy_to_cta(target, source, self.stage_bytes, full, self.rank ^ 1)

    @cute.jit
    def wait(self, state: RingState):
        """Until the other CTA's dS of the step is there."""
        cute.arch.mbarrier_wait(self.full + state.stage, state.phase)

    @cute.jit
    def tell(self, tile: Int32, state: RingState, lane: Int32):
        """The first CTA's producer warp: a claimed tile, or that none is left."""
        self.claims.wait_empty(state)
        if lane == 0:
            cute.arch.store_async_dsmem(self.claimed, tile, self.claims.full, 1)

    @cute.jit
    def hear(self, state: RingState, lane: Int32):
        """The second CTA's producer warp: what the first tells."""
        self.claims.arm(state, lane)
        self.claims.wait(state)
        tile = cute.make_tensor(self.claimed, cute.make_layout(1))[0]
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(self.claims.empty, 0, scope=MemScopeKind.CLUSTER)  # after the word has been read
        return tile
