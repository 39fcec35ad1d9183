"""Consumers that split the operands: both have the tile's 64 keys, one S and dV, the other dP and dK."""

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from flashhopper.config import WARPGROUP_THREADS
from flashhopper.kernels import ptx
from flashhopper.kernels.backward_cta import NUM_CONSUMERS, BackwardCta
from flashhopper.kernels.backward_mma import (
    BackwardConsumer,
    BackwardMmas,
    BackwardTiles,
    GradientOutputs,
    GradientPlace,
    TilePlace,
    transposed,
)
from flashhopper.kernels.backward_scores import packed
from flashhopper.kernels.backward_smem import BackwardBarrier
from flashhopper.kernels.gemm import gemm
from flashhopper.kernels.pipeline import RingState


class ValueConsumer(BackwardConsumer):
    """S, P and dV of the tile's 64 keys; hands P to the :class:`KeyConsumer`."""

    def __init__(
        self,
        cta: BackwardCta,
        mmas: BackwardMmas,
        tiles: BackwardTiles,
        outputs: GradientOutputs,
        scale_log2: Float32,
    ):
        super().__init__(cta, mmas, tiles, outputs, scale_log2, key_group=Int32(0))
        self.desc_K, self.desc_Q = self.a_operand(tiles.sK), self.b_operand(tiles.sQ)
        self.desc_dOt = mmas.mma_dV.make_fragment_B(self.thr_dV.partition_B(transposed(tiles.sdO)))
        self.acc_S, self.acc_dV = self.scores(), self.accumulator(mmas.mma_dV, cta.spec.head_dim_v)
        self.rP, self.rF = self.probabilities_operand(), self.probabilities_operand()

    @cute.jit
    def release_values(self, v_state: RingState):
        """V is the other consumer's."""

    def clear(self) -> None:
        self.acc_dV.fill(0.0)

    @cute.jit
    def write(self, place: GradientPlace):
        self.write_gradient(self.acc_dV, self.outputs.mdV, place, Float32(1.0))

    @cute.jit
    def step(self, place: TilePlace, state, number: Int32):
        """One query block."""
        rings = self.cta.rings
        rings.Q.wait(state.q)
        stage_K = self.desc_K[None, None, None, place.k_state.stage]
        warpgroup.fence()
        gemm(self.mmas.mma_S, self.acc_S, stage_K, self.desc_Q[None, None, None, state.q.stage], True)
        lse = self.load_lse(state.q.stage)
        warpgroup.wait_group(0)
        if const_expr(self.mods is not None):
            # What is exchanged is written as it comes: at head_dim 256 no registers are left to collect it.
            ptx.named_barrier_wait(BackwardBarrier.P_EMPTY, NUM_CONSUMERS * WARPGROUP_THREADS)
            self.to_probabilities(place, state, number, self.acc_S, lse, self.rP, self.exchanged_P)
        else:
            self.to_probabilities(place, state, number, self.acc_S, lse, self.rP, self.rF)
            ptx.named_barrier_wait(BackwardBarrier.P_EMPTY, NUM_CONSUMERS * WARPGROUP_THREADS)
            exchanged = self.rP if const_expr(self.cta.features.softcap is None) else self.rF
            self.copy_words(packed(exchanged), self.exchanged_P)
        self.release(rings.Q, state.q)  # now that all of LSE has been used: see KeyConsumer
        ptx.named_barrier_arrive(BackwardBarrier.P_FULL, NUM_CONSUMERS * WARPGROUP_THREADS)
        rings.dO.wait(state.do)
        warpgroup.fence()
        gemm(self.mmas.mma_dV, self.acc_dV, self.rP, self.desc_dOt[None, None, None, state.do.stage], False)
        warpgroup.wait_group(0)
        self.release(rings.dO, state.do)
        return state.next(place.tile.num_blocks)


class KeyConsumer(BackwardConsumer):
    """dP, dS and dK of the tile's 64 keys; dS also goes to the dQ warpgroup."""

    def __init__(
        self,
        cta: BackwardCta,
        mmas: BackwardMmas,
        tiles: BackwardTiles,
        outputs: GradientOutputs,
        scale_log2: Float32,
    ):
        super().__init__(cta, mmas, tiles, outputs, scale_log2, key_group=Int32(0))
        self.desc_V, self.desc_dO = self.a_operand(tiles.sV), self.b_operand(tiles.sdO)
        self.desc_Qt = mmas.mma_dK.make_fragment_B(self.thr_dK.partition_B(transposed(tiles.sQ)))
        self.acc_dP, self.acc_dK = self.scores(), self.accumulator(mmas.mma_dK, cta.spec.head_dim)
        self.rP, self.rdS = self.probabilities_operand(), self.probabilities_operand()
        self.write_dS, self.source_dS, self.target_dS = self.score_writer(self.acc_dP, self.rdS)

    def start(self) -> None:
        """The exchange tile of P is free."""
        ptx.named_barrier_arrive(BackwardBarrier.P_EMPTY, NUM_CONSUMERS * WARPGROUP_THREADS)

    def clear(self) -> None:
        self.acc_dK.fill(0.0)

    @cute.jit
    def write(self, place: GradientPlace):
        self.write_gradient(self.acc_dK, self.outputs.mdK, place, self.outputs.softmax_scale)

    @cute.jit
    def step(self, place: TilePlace, state, number: Int32):
        """One query block."""
        rings = self.cta.rings
        rings.V.wait(place.v_state)
        rings.dO.wait(state.do)
        warpgroup.fence()
        gemm(
            self.mmas.mma_S,
            self.acc_dP,
            self.desc_V[None, None, None, 0],
            self.desc_dO[None, None, None, state.do.stage],
            True,
        )
        ptx.named_barrier_wait(BackwardBarrier.P_FULL, NUM_CONSUMERS * WARPGROUP_THREADS)
        self.copy_words(self.exchanged_P, packed(self.rP))
        ptx.named_barrier_arrive(BackwardBarrier.P_EMPTY, NUM_CONSUMERS * WARPGROUP_THREADS)
        warpgroup.wait_group(0)
        delta = self.math.sDelta[None, None, state.do.stage]  # read one by one: there are no registers left for all
        self.to_score_gradients(place, state, self.acc_dP, delta, packed(self.rP), self.rdS)
        rings.Q.wait(state.q)
        warpgroup.fence()
        gemm(self.mmas.mma_dK, self.acc_dK, self.rdS, self.desc_Qt[None, None, None, state.q.stage], False)
        # Not before delta has been used. The arrival does not wait for loads under way, and nothing else orders them
        # before the bulk copy that it permits (another proxy: PTX ISA 8.6): with one stage it overwrote what they were
        # about to read.
        self.release(rings.dO, state.do)
        self.send_score_gradients(state)
        warpgroup.wait_group(0)
        self.release(rings.Q, state.q)
        return state.next(place.tile.num_blocks)
