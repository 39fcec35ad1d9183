"""Q and K to FP8: random signs and a Hadamard transform if asked for, then a scale for each block of rows of a head.

``reference_fp8.quantize_rows`` is the specification; every operation here is the same fp32 operation in the same order.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from flashhopper.config import ELEMENT_BYTES, FP8_MAX_EXPONENT, QuantizeRowsSpec
from flashhopper.kernels import ptx
from flashhopper.kernels.forward import ELEMENTS
from flashhopper.kernels.ragged import OwnBlocks
from flashhopper.kernels.values import divide

CHANNELS = 16  # of a thread: 32 bytes in, 16 bytes out
MAX_THREADS = 256
WARP = 32
SIGN_WORDS = 8  # 32-bit words of sign bits, for 256 channels
SCALE_EXPONENTS = (-100, 120)
SIGN_BIT = -(2**31)


@cute.jit
def finite_magnitude(x: Float32):
    """|x|, or 0 if x is Inf or NaN."""
    magnitude = cute.arch.fmax(x, -x)
    return magnitude if magnitude < Float32.inf else Float32(0.0)


@cute.jit
def scale_of(amax: Float32, is_power_of_two: cutlass.Constexpr[bool], max_exponent: cutlass.Constexpr[int]):
    """The scale for a largest magnitude and its reciprocal; 1 if it is 0. ``max_exponent``: of ``FP8_MAX_EXPONENT``."""
    low, high = SCALE_EXPONENTS
    scale, inverse = Float32(1.0), Float32(1.0)
    if const_expr(is_power_of_two):
        bits = ptx.float_bits(amax)
        exponent = (bits >> 23) - (127 + max_exponent)
        if (bits & 0x7FFFFF) > 0x600000:
            exponent += 1
        exponent = cutlass.max(cutlass.min(exponent, high), low)
        scale, inverse = ptx.bits_float((exponent + 127) << 23), ptx.bits_float((127 - exponent) << 23)
    else:
        scale = cute.arch.fmax(amax / (1.75 * 2.0**max_exponent), Float32(2.0**low))
        inverse = 1.0 / scale
    if amax == 0.0:
        scale, inverse = Float32(1.0), Float32(1.0)
    return scale, inverse


def saturating(x: Float32) -> Float32:
    """x for the conversion to FP8, which turns infinities into the largest number: they become NaN, and zeros keep
    their sign."""
    return x * 0.0 + x


class QuantizeRowsKernel:
    """One CTA per block of rows of a head; a thread holds 16 channels of some rows from load to store."""

    def __init__(self, spec: QuantizeRowsSpec):
        self.spec = spec
        self.threads_per_row = 1
        while self.threads_per_row * CHANNELS < spec.head_dim:  # a power of two, for the shuffles
            self.threads_per_row *= 2
        self.num_threads = min(MAX_THREADS, spec.rows * self.threads_per_row)
        self.rows_per_pass = self.num_threads // self.threads_per_row
        self.passes = spec.rows // self.rows_per_pass
        self.block = spec.head_dim & -spec.head_dim  # channels that are transformed together

    @cute.jit
    def __call__(
        self, mX: cute.Tensor, mData: cute.Tensor, mScale: cute.Tensor, signs: tuple, sequences: Any, stream: Any
    ):
        """``mX``, ``mData`` ``(batch, seqlen, heads, head_dim)``, ``mScale`` fp32 ``(batch, heads, blocks)``;
        ``signs``: 8 words, bit i of which is set if channel i changes its sign. ``sequences``: of a ragged batch,
        whose tensors have a batch of 1 and whose blocks are :class:`OwnBlocks`, that class's first two, else None."""
        num_ctas = cute.size(mScale)
        self.kernel(mX, mData, mScale, signs, sequences).launch(
            grid=(num_ctas, 1, 1), block=(self.num_threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mData: cute.Tensor, mScale: cute.Tensor, signs: tuple, sequences: Any):
        spec = self.spec
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        row_block, head = divide(cta, cute.size(mScale, mode=[1]))  # heads of the same rows follow each other
        batch, block = divide(row_block, cute.size(mScale, mode=[2]))
        first_row, end = block * spec.rows, cute.size(mX, mode=[1])
        if const_expr(spec.ragged):
            _, first_row, end = OwnBlocks(sequences[0], sequences[1], end, spec.rows).find(block)
        part = tidx % self.threads_per_row
        column = part * CHANNELS
        first_row = first_row + tidx // self.threads_per_row
        halves = cute.make_rmem_tensor((CHANNELS // 2, 2, self.passes), mX.element_type)
        halves.fill(0.0)
        for i in cutlass.range_constexpr(self.passes):  # every load is issued before the first is used
            row = first_row + i * self.rows_per_pass
            if row < end and column < spec.head_dim:
                for half in cutlass.range_constexpr(2):
                    gX = cute.domain_offset((column + half * (CHANNELS // 2),), mX[batch, row, head, None])
                    vector = cute.make_tensor(gX.iterator.align(16), cute.make_layout(CHANNELS // 2))
                    cute.autovec_copy(vector, halves[None, half, i])
        values = cute.make_rmem_tensor((CHANNELS, self.passes), Float32)
        flat = cute.make_tensor(values.iterator, cute.make_layout(cute.size(values)))
        flat.store(cute.make_tensor(halves.iterator, flat.layout).load().to(Float32))
        amax = Float32(0.0)
        for i in cutlass.range_constexpr(self.passes):
            if const_expr(spec.hadamard):
                self.transform(values[None, i], signs, part)
            for c in cutlass.range_constexpr(CHANNELS):
                amax = cute.arch.fmax(amax, finite_magnitude(values[c, i]))
        largest, max_exponent = self.largest_of_block(amax, tidx), FP8_MAX_EXPONENT[spec.out_dtype]
        scale, inverse = scale_of(largest, spec.scales == "power_of_two", max_exponent)
        if tidx == 0:
            mScale[batch, head, block] = scale
        for i in cutlass.range_constexpr(self.passes):
            packed = cute.make_rmem_tensor((CHANNELS // 4,), Int32)
            for w in cutlass.range_constexpr(CHANNELS // 4):
                four = tuple(saturating(values[4 * w + c, i] * inverse) for c in range(4))
                packed[w] = ptx.pack_8bit(four, mData.element_type)
            row = first_row + i * self.rows_per_pass
            if row < end and column < spec.head_dim:
                gData = cute.domain_offset((column,), mData[batch, row, head, None])
                words = cute.recast_ptr(gData.iterator.align(16), dtype=Int32)
                cute.autovec_copy(packed, cute.make_tensor(words, cute.make_layout(CHANNELS // 4)))

    @cute.jit
    def transform(self, x: cute.Tensor, signs: tuple, part: Int32):
        """Signs and Hadamard transform of one row's channels: strides below 16 within the thread, the others by
        shuffles. A thread adds or subtracts its own value: the product with ±1 is exact."""
        word = signs[0]
        for w in cutlass.range_constexpr(1, SIGN_WORDS):
            word = signs[w] if part // 2 == w else word
        bits = word >> (part % 2 * CHANNELS)
        for c in cutlass.range_constexpr(CHANNELS):
            x[c] = ptx.bits_float(ptx.float_bits(x[c]) ^ ((bits << (31 - c)) & SIGN_BIT))
        stride = 1
        while const_expr(stride < min(self.block, CHANNELS)):
            for c in cutlass.range_constexpr(CHANNELS):
                if const_expr(c & stride == 0):
                    low, high = x[c], x[c + stride]
                    x[c], x[c + stride] = low + high, low - high
            stride *= 2
        while const_expr(stride < self.block):
            lanes = stride // CHANNELS
            sign = Float32(1.0) if part & lanes == 0 else Float32(-1.0)
            for c in cutlass.range_constexpr(CHANNELS):
                x[c] = x[c] * sign + cute.arch.shuffle_sync_bfly(x[c], offset=lanes)
            stride *= 2
        for c in cutlass.range_constexpr(CHANNELS):
            x[c] = x[c] * self.block**-0.5

    @cute.jit
    def largest_of_block(self, amax: Float32, tidx: Int32):
        """The largest value of all threads."""
        for lanes in (1, 2, 4, 8, 16):
            amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, offset=lanes))
        num_warps = self.num_threads // WARP
        shared = cutlass.memory.SmemAllocator().allocate_array(Float32, MAX_THREADS // WARP)
        by_warp = cute.make_tensor(shared, cute.make_layout(num_warps))
        if tidx % WARP == 0:
            by_warp[tidx // WARP] = amax
        cute.arch.sync_threads()
        largest = by_warp[0]
        for w in cutlass.range_constexpr(1, num_warps):
            largest = cute.arch.fmax(largest, by_warp[w])
        return largest


def fake_sequences(ragged: bool) -> Any:
    """Types of ``cu_seqlens`` and lengths, for the compiler; None of a dense batch."""
    if not ragged:
        return None
    return tuple(make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=4) for _ in range(2))


def compile_quantize_rows(spec: QuantizeRowsSpec, options: str = "--enable-tvm-ffi") -> Any:
    """The result takes ``(x, data, scale, sign words as a tuple of 8 ints, sequences)``, on torch's current stream;
    ``sequences``: ``(cu_seqlens, lengths)``, int32, or None."""
    batch, seqlen, heads, blocks = (cute.sym_int() for _ in range(4))

    def tensor(dtype: Any) -> Any:
        strides = tuple(cute.sym_int64(divisibility=16 // ELEMENT_BYTES[dtype]) for _ in range(3))
        shape = (batch, seqlen, heads, spec.head_dim)
        return make_fake_tensor(ELEMENTS[dtype], shape, (*strides, 1), assumed_align=16)

    return cute.compile(
        QuantizeRowsKernel(spec),
        tensor(spec.dtype),
        tensor(spec.out_dtype),
        make_fake_compact_tensor(Float32, (batch, heads, blocks), stride_order=(2, 1, 0), assumed_align=4),
        tuple(Int32(0) for _ in range(SIGN_WORDS)),
        fake_sequences(spec.ragged),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )
