"""Named barriers that order the warpgroups, so that one's softmax runs under another's GEMMs."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, const_expr

from flashhopper.config import WARPGROUP_THREADS
from flashhopper.kernels import ptx
from flashhopper.kernels.smem import NamedBarrier

SLOTS = 2  # of the mailbox, at most


def turn_barrier(warpgroup: Any, slot: Any, base: int = NamedBarrier.TURN) -> Any:
    """The barrier that gives a warpgroup its turn: in the forward 1 to 4 for the mailbox's slot 0, 9 to 12 for slot 1;
    in the backward 1 and 2 for tiles with K's stage 0, 9 and 10 for those with stage 1.

    One per slot, since a warpgroup may be a whole item ahead of the next one: the turn it passes must not complete the
    barrier of the item before. It cannot be two ahead: a slot is used again only when every warpgroup released it.
    """
    return base + warpgroup + (NamedBarrier.TURN_SLOT_1 - NamedBarrier.TURN) * slot


class TurnTaking:
    """``ping_pong``: every block's GEMMs are issued in turn. ``relay``: the turn is passed when S is there, not when it
    is issued, so that one warpgroup has the tensor cores to itself, but for P·V of others. ``stagger``: only the first
    GEMM of a tile waits, for the one of the warpgroup before. ``free``: nobody waits.
    """

    def __init__(self, order: str, num_warpgroups: int, index: Int32, base: int = NamedBarrier.TURN):
        """``base``: the number of the first warpgroup's barrier."""
        self.every_block = order in ("ping_pong", "relay") and num_warpgroups > 1
        self.until_ready = order == "relay"
        self.stagger = order == "stagger" and num_warpgroups > 1
        self.last, self.index = num_warpgroups - 1, index
        self.base = base
        self.mine, self.next = turn_barrier(index, 0, base), turn_barrier((index + 1) % num_warpgroups, 0, base)

    @cute.jit
    def start(self):
        """The first warpgroup begins: the last one passes it the turn."""
        if const_expr(self.every_block):
            if self.index == self.last:
                ptx.named_barrier_arrive(self.base, 2 * WARPGROUP_THREADS)

    @cute.jit
    def await_block(self):
        if const_expr(self.every_block):
            ptx.named_barrier_wait(self.mine, 2 * WARPGROUP_THREADS)

    @cute.jit
    def pass_block(self):
        if const_expr(self.every_block):
            ptx.named_barrier_arrive(self.next, 2 * WARPGROUP_THREADS)

    def pass_issued(self):
        """A block's GEMMs are issued."""
        if not self.until_ready:
            self.pass_block()

    def pass_ready(self):
        """A block's S is there."""
        if self.until_ready:
            self.pass_block()

    @cute.jit
    def await_tile(self, slot: Int32):
        """``slot``: the item's in the mailbox; in the backward K's stage."""
        if const_expr(self.stagger):
            if self.index > 0:
                ptx.named_barrier_wait(turn_barrier(self.index, slot, self.base), 2 * WARPGROUP_THREADS)

    @cute.jit
    def pass_tile(self, slot: Int32):
        if const_expr(self.stagger):
            if self.index < self.last:
                ptx.named_barrier_arrive(turn_barrier(self.index + 1, slot, self.base), 2 * WARPGROUP_THREADS)
