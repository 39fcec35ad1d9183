"""Full/empty mbarriers: a ring of shared-memory stages that TMA fills and warpgroups consume."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flashhopper.kernels.values import DynamicValues

WARPS_PER_WARPGROUP = 4


class RingState(DynamicValues):
    """Stage and phase parity of one side of a ring; they advance as one value."""

    dynamic = ("stage", "phase")
    static = ("num_stages",)

    def __init__(self, stage: Int32, phase: Int32, num_stages: int):
        self.stage, self.phase, self.num_stages = stage, phase, num_stages

    @classmethod
    def start(cls, num_stages: int) -> "RingState":
        return cls(Int32(0), Int32(0), num_stages)

    @cute.jit
    def next(self):
        """The state of the following stage; the phase flips when the ring wraps."""
        stage, phase = self.stage, self.phase ^ 1
        if const_expr(self.num_stages > 1):
            stage = self.stage + 1
            wraps = stage == self.num_stages
            phase = self.phase ^ 1 if wraps else self.phase
            stage = Int32(0) if wraps else stage
        return RingState(stage, phase, self.num_stages)


class TmaRing:
    """Stages with a *full* mbarrier (armed with a byte count, completed by TMA) and an *empty* one (released by warps).

    Protocol: the producer acquires, copies and thereby commits; every consumer warp waits and releases
    (PTX ISA 9.7.13.15, mbarrier).
    """

    def __init__(self, barriers: cute.Pointer, num_stages: int, stage_bytes: int):
        """``barriers`` points at ``2 * num_stages`` 64-bit words of shared memory: full, then empty."""
        self.full, self.empty = barriers, barriers + num_stages
        self.num_stages, self.stage_bytes = num_stages, stage_bytes

    def initialise(self, consumer_warps: int, filling_warps: int = 1) -> None:
        """By one thread, before the CTA synchronises. ``filling_warps``: more than the producer's 1 if warps write."""
        for stage in range(self.num_stages):
            cute.arch.mbarrier_init(self.full + stage, filling_warps)
            cute.arch.mbarrier_init(self.empty + stage, consumer_warps)

    @cute.jit
    def wait_empty(self, state: RingState):
        """Producer: wait until every consumer warp has released the stage."""
        cute.arch.mbarrier_wait(self.empty + state.stage, state.phase ^ 1)

    @cute.jit
    def arm(self, state: RingState, lane: Int32):
        """Producer warp, the stage being empty: announce its bytes. Returns the barrier that TMA completes."""
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + state.stage, self.stage_bytes)
        cute.arch.sync_warp()
        return self.full + state.stage

    @cute.jit
    def acquire(self, state: RingState, lane: Int32):
        """Producer warp: wait until the stage is empty and arm it. Returns the barrier that TMA completes."""
        self.wait_empty(state)
        return self.arm(state, lane)

    @cute.jit
    def commit(self, state: RingState, lane: Int32):
        """A warp that filled its part of the stage itself, with a fence before if the reader is asynchronous."""
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(self.full + state.stage)

    @cute.jit
    def wait(self, state: RingState):
        """Consumer: wait until the stage is full."""
        cute.arch.mbarrier_wait(self.full + state.stage, state.phase)

    @cute.jit
    def release(self, state: RingState, lane: Int32):
        """Consumer warp: done reading the stage."""
        if lane == 0:
            cute.arch.mbarrier_arrive(self.empty + state.stage)

    @cute.jit
    def drain(self, state: RingState):
        """Producer, before exit: wait until consumers released every stage, so that no arrival meets a dead CTA."""
        for _ in cutlass.range_constexpr(self.num_stages):
            cute.arch.mbarrier_wait(self.empty + state.stage, state.phase ^ 1)
            state = state.next()
