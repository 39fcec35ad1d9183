"""Consumers that split the keys: all four products of one warpgroup's 64 keys."""

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from flashhopper.config import ROWS_PER_WARPGROUP
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
from flashhopper.kernels.block_range import hides_all
from flashhopper.kernels.gemm import gemm
from flashhopper.kernels.turns import TurnTaking


class KeysConsumer(BackwardConsumer):
    """All four products of one warpgroup's 64 keys."""

    def __init__(
        self,
        cta: BackwardCta,
        mmas: BackwardMmas,
        tiles: BackwardTiles,
        outputs: GradientOutputs,
        scale_log2: Float32,
        consumer: Int32,
    ):
        """``consumer`` counts the consumer warpgroups."""
        super().__init__(cta, mmas, tiles, outputs, scale_log2, key_group=consumer)
        spec = cta.spec
        self.desc_K, self.desc_V = self.a_operand(tiles.sK), self.a_operand(tiles.sV)
        self.desc_Q, self.desc_dO = self.b_operand(tiles.sQ), self.b_operand(tiles.sdO)
        self.desc_Qt = mmas.mma_dK.make_fragment_B(self.thr_dK.partition_B(transposed(tiles.sQ)))
        self.desc_dOt = mmas.mma_dV.make_fragment_B(self.thr_dV.partition_B(transposed(tiles.sdO)))
        # S and dP take turns in the same registers: a WGMMA that starts from zero keeps its accumulator alive before.
        self.acc_S = self.scores()
        self.acc_dK = self.accumulator(mmas.mma_dK, spec.head_dim)
        self.acc_dV = self.accumulator(mmas.mma_dV, spec.head_dim_v)
        self.rP, self.rdS = self.probabilities_operand(), self.probabilities_operand()
        self.write_dS, self.source_dS, self.target_dS = self.score_writer(self.acc_S, self.rdS)
        self.turns = TurnTaking(spec.config.warpgroup_order, NUM_CONSUMERS, consumer, BackwardBarrier.TURN)

    def clear(self) -> None:
        self.acc_dK.fill(0.0)
        self.acc_dV.fill(0.0)

    @cute.jit
    def write(self, place: GradientPlace):
        self.write_gradient(self.acc_dV, self.outputs.mdV, place, Float32(1.0))
        self.write_gradient(self.acc_dK, self.outputs.mdK, place, self.outputs.softmax_scale)

    def sees_nothing(self, place: TilePlace, step: Int32):
        """Whether the mask hides all of this warpgroup's keys from the query block of a step."""
        config = self.cta.spec.config
        first_key = place.n_block * config.tile_n + ROWS_PER_WARPGROUP * self.key_group
        position = self.cta.m_block(place.tile, step) * config.tile_m + place.lengths.k - place.lengths.q
        return hides_all(first_key, ROWS_PER_WARPGROUP, position, config.tile_m, self.cta.window)

    @cute.jit
    def skip(self, place: TilePlace, state, number: Int32):
        """A step in which these keys are not seen: nothing but zeros for the dQ warpgroup."""
        self.cta.rings.Q.wait(state.q)
        slot = place.k_state.stage
        if number == 0:
            self.turns.await_tile(slot)
            self.turns.pass_tile(slot)
        self.release(self.cta.rings.Q, state.q)
        # Even if no step needs it: a tile further, with the other stage of K, its next phase would pass for this one.
        self.cta.rings.V.wait(place.v_state)
        self.cta.rings.dO.wait(state.do)
        self.release(self.cta.rings.dO, state.do)
        self.rdS.fill(0.0)
        self.send_score_gradients(state)
        return state.next(place.tile.num_blocks)

    @cute.jit
    def compute_probabilities(self, place: TilePlace, state, number: Int32):
        """Sᵀ = K Qᵀ and P of a step, in turn with the other consumer if the order asks for it."""
        self.cta.rings.Q.wait(state.q)
        slot = place.k_state.stage
        if number == 0:
            self.turns.await_tile(slot)
        stage_K = self.desc_K[None, None, None, slot]
        warpgroup.fence()
        gemm(self.mmas.mma_S, self.acc_S, stage_K, self.desc_Q[None, None, None, state.q.stage], True)
        lse = self.load_lse(state.q.stage)
        warpgroup.wait_group(0)
        if number == 0:
            self.turns.pass_tile(slot)
        self.to_probabilities(place, state, number, self.acc_S, lse, self.rP, self.factors(self.rdS))

    @cute.jit
    def step(self, place: TilePlace, state, number: Int32):
        """One query block: dS is computed under dV += Pᵀ dO, and sent under dK += dSᵀ Q. Everything else runs under the
        products of the other warpgroups."""
        rings = self.cta.rings
        stage_Q, stage_dO = state.q.stage, state.do.stage
        following = state.next(place.tile.num_blocks)
        self.compute_probabilities(place, state, number)
        rings.V.wait(place.v_state)
        rings.dO.wait(state.do)
        warpgroup.fence()
        gemm(
            self.mmas.mma_S,
            self.acc_S,
            self.desc_V[None, None, None, 0],
            self.desc_dO[None, None, None, stage_dO],
            True,
        )
        gemm(self.mmas.mma_dV, self.acc_dV, self.rP, self.desc_dOt[None, None, None, stage_dO], False)
        delta = self.math.load_rows(self.math.sDelta, stage_dO)
        warpgroup.wait_group(1)
        words_P = packed(self.rdS if const_expr(self.cta.scales_gradients) else self.rP)
        self.to_score_gradients(place, state, self.acc_S, delta, words_P, self.rdS)
        warpgroup.fence()
        gemm(self.mmas.mma_dK, self.acc_dK, self.rdS, self.desc_Qt[None, None, None, stage_Q], False)
        self.send_score_gradients(state)
        warpgroup.wait_group(1)
        self.release(rings.dO, state.do)
        warpgroup.wait_group(0)
        self.release(rings.Q, state.q)
        return following
