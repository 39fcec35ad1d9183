"""Inline PTX and thin wrappers over single instructions, each with its section of the PTX ISA."""

import struct
from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float8E5M2, Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

EXP2_CUBIC = (0.69328292, 0.24221063, 0.05500869)  # 2**f - 1 in powers of f from the first, |f| <= 0.5


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


def draw_ticket(address: cute.Pointer) -> Int32:
    """By lane 0: fetch and add 1, relaxed at GPU scope, without waiting for the answer before it is used (PTX ISA
    9.7.13.5, atom.relaxed.gpu.inc)."""
    return _increment_below_not_lane(Int64(address.toint()))


def atomic_increment_acq_rel(address: cute.Pointer) -> Int32:
    """Fetch and add 1, acquire and release at GPU scope (PTX ISA 9.7.13.5, atom.acq_rel.gpu.add)."""
    return cute.arch.atomic_add(address, Int32(1), sem="acq_rel", scope="gpu")


def vote_any(predicate: Boolean) -> Boolean:
    """True in all lanes if it is true in one (PTX ISA 9.7.13.9, vote.sync.any)."""
    return cute.arch.vote_any_sync(predicate)


def vote_all(predicate: Boolean) -> Boolean:
    """True in all lanes if it is true in each (PTX ISA 9.7.13.9, vote.sync.all)."""
    return cute.arch.vote_all_sync(predicate)


def ballot(predicate: Boolean) -> Int32:
    """A bit per lane in which it is true (PTX ISA 9.7.13.9, vote.sync.ballot)."""
    return cute.arch.vote_ballot_sync(predicate)


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
def pack_8bit(values: tuple[Float32, ...], element: Any, *, loc: Any = None, ip: Any = None) -> Int32:
    """Four floats rounded to nearest even, saturated at ±448 or, in e5m2, ±57344, and packed, the first in the lowest
    byte; NaN is 0x7f (PTX ISA 9.7.9.22, cvt.rn.satfinite.e4m3x2.f32 and cvt.rn.satfinite.e5m2x2.f32). Opaque to LLVM
    for the same reason."""
    kind = "e5m2x2" if element is Float8E5M2 else "e4m3x2"
    text = (
        f"{{.reg .b16 lo, hi; cvt.rn.satfinite.{kind}.f32 lo, $2, $1; "
        f"cvt.rn.satfinite.{kind}.f32 hi, $4, $3; mov.b32 $0, {{lo, hi}};}}"
    )
    operands = [Float32(value).ir_value(loc=loc, ip=ip) for value in values]
    return Int32(_asm(T.i32(), operands, text, "=r,f,f,f,f", False, loc, ip))


@dsl_user_op
def float_bits(value: Float32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The bits of a float (PTX ISA 9.7.9.1, mov.b32)."""
    return Int32(_asm(T.i32(), [Float32(value).ir_value(loc=loc, ip=ip)], "mov.b32 $0, $1;", "=r,f", False, loc, ip))


@dsl_user_op
def bits_float(bits: Int32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The float with these bits (PTX ISA 9.7.9.1, mov.b32)."""
    return Float32(_asm(T.f32(), [Int32(bits).ir_value(loc=loc, ip=ip)], "mov.b32 $0, $1;", "=f,r", False, loc, ip))


def exp2_text() -> str:
    """The instructions of :func:`exp2_polynomial`: $0 of $1."""
    linear, square, cubic = (f"0f{struct.unpack('>I', struct.pack('>f', value))[0]:08X}" for value in EXP2_CUBIC)
    return f"""{{ .reg .f32 x, t, n, f, p; .reg .b32 e;
        max.NaN.f32 x, $1, 0fC2FE0000; min.NaN.f32 x, x, 0f43000000;
        add.rn.f32 t, x, 0f4B400000; sub.rn.f32 n, t, 0f4B400000; sub.rn.f32 f, x, n;
        fma.rn.f32 p, f, {cubic}, {square}; fma.rn.f32 p, p, f, {linear}; fma.rn.f32 p, p, f, 0f3F800000;
        mov.b32 e, t; shl.b32 e, e, 23; add.s32 e, e, 0x3F800000; mov.b32 n, e; mul.rn.f32 $0, p, n; }}"""


@dsl_user_op
def exp2_polynomial(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """2**x on the FMA units, with a relative error of 1e-4 (PTX ISA 9.7.3, floating-point instructions).

    Adding 0x1.8p23 rounds x to an integer, which becomes an exponent, and a cubic (minimax, with 1 at 0) covers the
    rest, -0.5 to 0.5. Below -126.5 it is 0, above 127.5 Inf; NaN stays NaN.
    """
    return Float32(_asm(T.f32(), [Float32(x).ir_value(loc=loc, ip=ip)], exp2_text(), "=f,f", False, loc, ip))


def _asm(result: Any, operands: list[Any], text: str, constraints: str, volatile: bool, loc: Any, ip: Any) -> Any:
    """One inline assembly statement; ``volatile`` keeps it where it stands."""
    return llvm.inline_asm(
        result,
        operands,
        text,
        constraints,
        has_side_effects=volatile,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def add_here(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """a + b, where this stands (PTX ISA 9.7.3.6, add.f32). Volatile: LLVM does not sink it past the next WGMMA."""
    operands = [Float32(a).ir_value(loc=loc, ip=ip), Float32(b).ir_value(loc=loc, ip=ip)]
    return Float32(_asm(T.f32(), operands, "add.f32 $0, $1, $2;", "=f,f,f", True, loc, ip))


@dsl_user_op
def add_rounded(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """a + b of both as they are: an addition without a rounding modifier ptxas may fuse with the product that is one of
    them, which then is not rounded (PTX ISA 9.7.3.6, add.rn.f32)."""
    operands = [Float32(a).ir_value(loc=loc, ip=ip), Float32(b).ir_value(loc=loc, ip=ip)]
    return Float32(_asm(T.f32(), operands, "add.rn.f32 $0, $1, $2;", "=f,f,f", False, loc, ip))


@dsl_user_op
def unpack_16bit(packed: Int32, high: bool, element: Any, *, loc: Any = None, ip: Any = None) -> Float32:
    """One half of what :func:`pack_16bit` packed, as a float (PTX ISA 9.7.9.22, cvt.f32.f16; a bfloat16 is the upper
    half of a float)."""
    if element is BFloat16:
        text = "and.b32 $0, $1, 0xffff0000;" if high else "shl.b32 $0, $1, 16;"
    else:
        half = "hi" if high else "lo"
        text = f"{{.reg .b16 lo, hi; mov.b32 {{lo, hi}}, $1; cvt.f32.f16 $0, {half};}}"
    return Float32(_asm(T.f32(), [Int32(packed).ir_value(loc=loc, ip=ip)], text, "=f,r", False, loc, ip))


@dsl_user_op
def extreme_16bit(a: Int32, b: Int32, largest: bool, element: Any, *, loc: Any = None, ip: Any = None) -> Int32:
    """The larger or the smaller one of two numbers, of two packed pairs (PTX ISA 9.7.4.6 and 9.7.4.7, min and max)."""
    kind = "bf16x2" if element is BFloat16 else "f16x2"
    operands = [Int32(x).ir_value(loc=loc, ip=ip) for x in (a, b)]
    text = f"{'max' if largest else 'min'}.{kind} $0, $1, $2;"
    return Int32(_asm(T.i32(), operands, text, "=r,r,r", False, loc, ip))


@dsl_user_op
def bulk_load(smem: Int32, gmem: Int64, num_bytes: int, barrier: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Copy bytes to shared memory, counted by an mbarrier; by one thread (PTX ISA 9.7.9.25.4.1, cp.async.bulk)."""
    operands = [Int32(smem).ir_value(loc=loc, ip=ip), Int64(gmem).ir_value(loc=loc, ip=ip)]
    operands += [Int32(num_bytes).ir_value(loc=loc, ip=ip), Int32(barrier).ir_value(loc=loc, ip=ip)]
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    _asm(None, operands, text, "r,l,r,r", True, loc, ip)


@dsl_user_op
def bulk_add_f32(gmem: Int64, smem: Int32, num_bytes: int, *, loc: Any = None, ip: Any = None) -> None:
    """Add fp32 values of shared memory to global ones; by one thread (PTX ISA 9.7.9.25.4.2, cp.reduce.async.bulk)."""
    operands = [Int64(gmem).ir_value(loc=loc, ip=ip), Int32(smem).ir_value(loc=loc, ip=ip)]
    operands.append(Int32(num_bytes).ir_value(loc=loc, ip=ip))
    text = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;"
    _asm(None, operands, text, "l,r,r", True, loc, ip)


@dsl_user_op
def bulk_copy_to_cta(
    target: Int32, source: Int32, num_bytes: int, barrier: Int32, cta: Int32, *, loc: Any = None, ip: Any = None
) -> None:
    """Copy bytes of shared memory to CTA ``cta`` of the cluster, counted by an mbarrier there; both addresses are those
    of the caller's own shared memory. By one thread (PTX ISA 9.7.9.25.4.1, cp.async.bulk; 9.7.9.23, mapa)."""
    values = (target, source, num_bytes, barrier, cta)
    operands = [Int32(value).ir_value(loc=loc, ip=ip) for value in values]
    text = (
        "{.reg .b32 target, barrier; "
        "mapa.shared::cluster.u32 target, $0, $4; mapa.shared::cluster.u32 barrier, $3, $4; "
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [target], [$1], $2, [barrier];}"
    )
    _asm(None, operands, text, "r,r,r,r,r,~{memory}", True, loc, ip)


@dsl_user_op
def load_acquire(gmem: Int64, *, loc: Any = None, ip: Any = None) -> Int32:
    """Read an int32 of global memory (PTX ISA 9.7.9.8, ld.acquire.gpu)."""
    operands = [Int64(gmem).ir_value(loc=loc, ip=ip)]
    return Int32(_asm(T.i32(), operands, "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l,~{memory}", True, loc, ip))


@dsl_user_op
def _increment_below_not_lane(gmem: Int64, *, loc: Any = None, ip: Any = None) -> Int32:
    """Of an add ptxas makes one atomic for all lanes that are there and a shuffle, which waits for the answer on the
    spot. An increment with a limit that differs between lanes, in lane 0 the largest, it leaves as it is."""
    operands = [Int64(gmem).ir_value(loc=loc, ip=ip)]
    increment = "atom.relaxed.gpu.global.inc.u32 $0, [$1], limit;"
    text = f"{{ .reg .u32 limit; mov.u32 limit, %laneid; not.b32 limit, limit; {increment} }}"
    return Int32(_asm(T.i32(), operands, text, "=r,l,~{memory}", True, loc, ip))


@dsl_user_op
def increment_release(gmem: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """Add 1 to an int32 of global memory (PTX ISA 9.7.13.6, red.release.gpu)."""
    operands = [Int64(gmem).ir_value(loc=loc, ip=ip)]
    _asm(None, operands, "red.release.gpu.global.add.s32 [$0], 1;", "l,~{memory}", True, loc, ip)


@dsl_user_op
def fence_async_global(*, loc: Any = None, ip: Any = None) -> None:
    """Order global accesses of this thread and of bulk copies both ways (PTX ISA 9.7.13.4, fence.proxy.async)."""
    _asm(None, [], "fence.proxy.async.global;", "~{memory}", True, loc, ip)


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
