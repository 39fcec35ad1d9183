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
from flashhopper.kernels.values import ceil_div, divide

VECTOR = 8  # channels that a thread loads at once
ROW_THREADS = 4  # of a row; more of them would leave more of the transform to shuffles
STRIDE = ROW_THREADS * VECTOR  # channels between two vectors of a thread: its row's threads read whole sectors
THREAD_VALUES = 64  # at most, unless a row has more for a thread
WARP = 32
SIGN_WORDS = 8  # of the signs of 32 channels each: 256 channels
SIGN_BITS = 0x80008000 - 2**32  # of two 16-bit values
SCALE_EXPONENTS = (-100, 120)


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


def without_infinity(x: Float32) -> Float32:
    """x for the conversion to FP8, which turns infinities into the largest number: they become NaN, and zeros keep
    their sign."""
    return x * 0.0 + x


def larger_magnitude(largest: Float32, x: Float32) -> Float32:
    """The larger one of ``largest`` and |x|; NaN is left out."""
    return cute.arch.fmax(largest, cute.arch.fmax(x, -x))


def vector_words(gX: cute.Tensor, row: Any, column: int = 0) -> cute.Tensor:
    """Eight elements of a (rows, columns) tensor as 32-bit words."""
    words = cute.recast_ptr(cute.domain_offset((row, column), gX).iterator, dtype=Int32)
    return cute.make_tensor(words, cute.make_layout(VECTOR * gX.element_type.width // Int32.width))


class QuantizeRowsKernel:
    """One CTA per block of rows of a head; a thread holds every fourth vector of some rows from load to store."""

    def __init__(self, spec: QuantizeRowsSpec):
        self.spec = spec
        self.vectors = ceil_div(spec.head_dim, STRIDE)
        self.channels = self.vectors * VECTOR  # of a thread
        self.passes = 1  # more values in a thread: fewer instructions each, fewer warps that wait for each other
        while 2 * self.passes * self.channels <= THREAD_VALUES:
            self.passes *= 2
        self.num_threads = spec.rows * ROW_THREADS // self.passes
        self.rows_per_pass = spec.rows // self.passes
        self.block = spec.head_dim & -spec.head_dim  # channels that are transformed together
        self.norm = self.block**-0.5 if spec.hadamard else 1.0

    @cute.jit
    def __call__(
        self, mX: cute.Tensor, mData: cute.Tensor, mScale: cute.Tensor, signs: tuple, sequences: Any, stream: Any
    ):
        """``mX``, ``mData`` ``(batch, seqlen, heads, head_dim)``, ``mScale`` fp32 ``(batch, heads, blocks)``;
        ``signs``: of 32 channels a word, as :meth:`flip` has them. ``sequences``: of a ragged batch, whose tensors have
        a batch of 1 and whose blocks are :class:`OwnBlocks`, that class's first two, else None."""
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
        part = tidx % ROW_THREADS
        column = cute.assume(part * VECTOR, divby=VECTOR)
        first_row = first_row + tidx // ROW_THREADS
        gX = cute.domain_offset((first_row, column), mX[batch, None, head, None])
        pairs = cute.make_rmem_tensor((VECTOR // 2, self.vectors, self.passes), Int32)
        pairs.fill(0)
        for i in cutlass.range_constexpr(self.passes):  # every load is issued before the first is used
            if first_row + i * self.rows_per_pass < end:
                for v in cutlass.range_constexpr(self.vectors):
                    if v * STRIDE + column < spec.head_dim:
                        cute.autovec_copy(vector_words(gX, i * self.rows_per_pass, v * STRIDE), pairs[None, v, i])
        if const_expr(spec.hadamard):
            self.flip(pairs, signs, part)
        values = cute.make_rmem_tensor((self.channels, self.passes), Float32)
        for k in cutlass.range_constexpr(cute.size(values)):
            values[k] = ptx.unpack_16bit(pairs[k // 2], k % 2 == 1, mX.element_type)
        amax = Float32(0.0)
        for i in cutlass.range_constexpr(self.passes):
            if const_expr(spec.hadamard):
                self.transform(values[None, i], part)
            for c in cutlass.range_constexpr(self.channels):
                amax = larger_magnitude(amax, values[c, i])
        shared = cutlass.memory.SmemAllocator().allocate_array(Int32, self.num_threads // WARP)
        by_warp = cute.make_tensor(shared, cute.make_layout(self.num_threads // WARP))
        largest = self.largest_of_block(amax, by_warp, tidx)
        if largest == Float32.inf:  # again without infinities: they are rare, and would cost two instructions a value
            amax = Float32(0.0)
            for k in cutlass.range_constexpr(cute.size(values)):  # as two loops it takes 103 registers instead of 80
                values[k] = without_infinity(values[k])
                amax = larger_magnitude(amax, values[k])
            cute.arch.sync_threads()  # all have read the largest values before
            largest = self.largest_of_block(amax, by_warp, tidx)
        max_exponent, is_power_of_two = FP8_MAX_EXPONENT[spec.out_dtype], spec.scales == "power_of_two"
        scale, inverse = scale_of(largest * self.norm, is_power_of_two, max_exponent)
        if tidx == 0:
            mScale[batch, head, block] = scale
        # A product with a power of two rounds nothing: one product instead of two, with the same result. Below 2**-126
        # it does round, but what is left there is 0 in FP8.
        first, second = (1.0, inverse * self.norm) if is_power_of_two else (self.norm, inverse)
        packed = cute.make_rmem_tensor((VECTOR // 4, self.vectors, self.passes), Int32)
        for w in cutlass.range_constexpr(cute.size(packed)):
            packed[w] = ptx.pack_8bit(tuple(values[4 * w + c] * first * second for c in range(4)), mData.element_type)
        gData = cute.domain_offset((first_row, column), mData[batch, None, head, None])
        for i in cutlass.range_constexpr(self.passes):
            if first_row + i * self.rows_per_pass < end:
                for v in cutlass.range_constexpr(self.vectors):
                    if v * STRIDE + column < spec.head_dim:
                        words = vector_words(gData, i * self.rows_per_pass, v * STRIDE)
                        cute.autovec_copy(packed[None, v, i], words)

    @cute.jit
    def flip(self, pairs: cute.Tensor, signs: tuple, part: Int32):
        """Random signs, of pairs of channels, whose conversion to fp32 keeps them. Bit i of a word is the sign of
        channel 2 i, bit 16 + i that of channel 2 i + 1: a shift takes both to where the pair has its own."""
        for v in cutlass.range_constexpr(self.vectors):
            word = signs[v] >> (part * (VECTOR // 2))
            for c in cutlass.range_constexpr(VECTOR // 2):
                bits = (word << (15 - c)) & SIGN_BITS
                for i in cutlass.range_constexpr(self.passes):
                    pairs[c, v, i] = pairs[c, v, i] ^ bits

    @cute.jit
    def transform(self, x: cute.Tensor, part: Int32):
        """Hadamard transform of one row's channels, but for the norm: strides below 8 within a vector, then by
        shuffles between threads, then between a thread's vectors. A thread adds or subtracts its own value: the product
        with ±1 is exact."""
        stride = 1
        while const_expr(stride < self.block):
            if const_expr(VECTOR <= stride < STRIDE):
                lanes = stride // VECTOR
                sign = Float32(1.0) if part & lanes == 0 else Float32(-1.0)
                for c in cutlass.range_constexpr(self.channels):
                    x[c] = x[c] * sign + cute.arch.shuffle_sync_bfly(x[c], offset=lanes)
            else:
                distance = stride if const_expr(stride < VECTOR) else stride // ROW_THREADS
                for c in cutlass.range_constexpr(self.channels):
                    if const_expr(c & distance == 0):
                        low, high = x[c], x[c + distance]
                        x[c], x[c + distance] = low + high, low - high
            stride *= 2

    @cute.jit
    def largest_of_block(self, amax: Float32, by_warp: cute.Tensor, tidx: Int32):
        """The largest value of all threads, none of which is negative: their bits compare as they do."""
        largest = cute.arch.warp_redux_sync(ptx.float_bits(amax), "max")
        if tidx % WARP == 0:
            by_warp[tidx // WARP] = largest
        cute.arch.sync_threads()
        return ptx.bits_float(cute.arch.warp_redux_sync(by_warp[tidx % cute.size(by_warp)], "max"))


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
