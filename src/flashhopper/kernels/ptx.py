"""Inline PTX and thin wrappers over single instructions, each with its section of the PTX ISA."""

from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def named_barrier_wait(barrier_id: Int32 | int, num_threads: int) -> None:
    """Arrive at a named barrier and wait until ``num_threads`` have (PTX ISA 9.7.13.1, barrier.sync)."""
    cute.arch.barrier(barrier_id=barrier_id, number_of_threads=num_threads)


def named_barrier_arrive(barrier_id: Int32 | int, num_threads: int) -> None:
    """Arrive at a named barrier without waiting (PTX ISA 9.7.13.1, barrier.arrive)."""
    cute.arch.barrier_arrive(barrier_id=barrier_id, number_of_threads=num_threads)


def fence_async_shared() -> None:
    """Order this thread's shared-memory writes before later reads by TMA (PTX ISA 9.7.13.4, fence.proxy.async)."""
    cute.arch.fence_proxy("async.shared", space="cta")


def bulk_store_commit() -> None:
    """Close the group of bulk stores this thread issued (PTX ISA 9.7.9.25, cp.async.bulk.commit_group)."""
    cute.arch.cp_async_bulk_commit_group()


def bulk_store_wait_read() -> None:
    """Wait until this thread's bulk stores have read shared memory (PTX ISA 9.7.9.25, wait_group.read 0)."""
    cute.arch.cp_async_bulk_wait_group(0, read=True)


def bulk_store_wait() -> None:
    """Wait until this thread's bulk stores are complete in global memory (PTX ISA 9.7.9.25, wait_group 0)."""
    cute.arch.cp_async_bulk_wait_group(0, read=False)


def atomic_increment(address: cute.Pointer) -> Int32:
    """Fetch and add 1, relaxed at GPU scope (PTX ISA 9.7.13.5, atom.relaxed.gpu.add)."""
    return cute.arch.atomic_add(address, Int32(1), sem="relaxed", scope="gpu")


def atomic_increment_acq_rel(address: cute.Pointer) -> Int32:
    """Fetch and add 1, acquire and release at GPU scope (PTX ISA 9.7.13.5, atom.acq_rel.gpu.add)."""
    return cute.arch.atomic_add(address, Int32(1), sem="acq_rel", scope="gpu")


def vote_any(predicate: Boolean) -> Boolean:
    """True in all lanes if it is true in one (PTX ISA 9.7.13.9, vote.sync.any)."""
    return cute.arch.vote_any_sync(predicate)


def vote_all(predicate: Boolean) -> Boolean:
    """True in all lanes if it is true in each (PTX ISA 9.7.13.9, vote.sync.all)."""
    return cute.arch.vote_all_sync(predicate)


@dsl_user_op
def pack_16bit(low: Float32, high: Float32, element: Any, *, loc: Any = None, ip: Any = None) -> Int32:
    """Two floats rounded to nearest even and packed (PTX ISA 9.7.9.22, cvt.rn.bf16x2.f32 and cvt.rn.f16x2.f32).

    Opaque to LLVM on purpose: it folds a phi of conversions into a conversion of a phi, which carries P across the
    loop in fp32, doubles its registers and makes ptxas serialise the WGMMAs.
    """
    kind = "bf16x2" if element is BFloat16 else "f16x2"
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [Float32(high).ir_value(loc=loc, ip=ip), Float32(low).ir_value(loc=loc, ip=ip)],
            f"cvt.rn.{kind}.f32 $0, $1, $2;",
            "=r,f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def reread_thread_index(*, loc: Any = None, ip: Any = None) -> Int32:
    """threadIdx.x, read anew where this stands (PTX ISA 10.1, %tid).

    Volatile, so that what is computed from it is not hoisted out of the tile loop, where registers are scarce.
    """
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [],
            "mov.u32 $0, %tid.x;",
            "=r",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )
