"""V to FP8, transposed: statistics of each channel, its scale and mean, then the conversion.

``reference_fp8.quantize_values`` is the specification; every operation here is the same fp32 operation in the same
order.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int32, const_expr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from flashhopper.config import ELEMENT_BYTES, FP8_MAX_EXPONENT, QuantizeValuesSpec, ValueScalesSpec, ValueStatisticsSpec
from flashhopper.kernels import ptx
from flashhopper.kernels.forward import ELEMENTS
from flashhopper.kernels.quantize import (
    SIGN_BITS,
    VECTOR,
    fake_sequences,
    scale_of,
    vector_words,
    without_infinity,
)
from flashhopper.kernels.ragged import OwnBlocks, own_block
from flashhopper.kernels.values import ceil_div, divide

KEYS = 128  # of a CTA that transposes
WORDS = KEYS // 4  # of four 8-bit keys
PITCH = WORDS + 1  # words between channels in shared memory: neither writes nor reads conflict
WARP = 32
GROUPS = 4  # of the words of a channel: a warp takes so many times 8 words by 32 channels
STATISTICS_KEYS = 512
LANES = 8  # threads that share a channel's keys
SUM, LOWEST, HIGHEST = range(3)
EXPONENT_BITS = 0x7F800000  # of fp32
PAIR_OF_INFINITIES = {"bfloat16": 0x7F807F80, "float16": 0x7C007C00}
BYTES = (0xFF, 0xFF00, 0xFF0000, 0xFF000000 - 2**32)  # of a word
MANTISSA_BITS = {"bfloat16": 7, "float16": 10}


class ValueStatisticsKernel:
    """Sum, minimum and maximum of the finite values of each channel, for one chunk of keys of a head per CTA."""

    def __init__(self, spec: ValueStatisticsSpec):
        self.spec = spec
        self.groups = spec.head_dim // VECTOR

    @cute.jit
    def __call__(self, mV: cute.Tensor, mPartial: cute.Tensor, sequences: Any, stream: Any):
        """``mV`` ``(batch, seqlen, heads, head_dim)``, ``mPartial`` fp32 ``(batch, heads, chunks, 3, head_dim)``.
        ``sequences``: of a ragged batch, whose tensors have a batch of 1 and whose chunks are :class:`OwnBlocks`, that
        class's first two, else None; so below too."""
        num_ctas = cute.size(mPartial, mode=[0]) * cute.size(mPartial, mode=[1]) * cute.size(mPartial, mode=[2])
        self.kernel(mV, mPartial, sequences).launch(
            grid=(num_ctas, 1, 1), block=(LANES * self.groups, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mV: cute.Tensor, mPartial: cute.Tensor, sequences: Any):
        cute.arch.griddepcontrol_launch_dependents()  # the kernel of the scales waits for this one to end
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        chunk_index, head = divide(cta, cute.size(mPartial, mode=[1]))
        batch, chunk = divide(chunk_index, cute.size(mPartial, mode=[2]))
        lane, group = divide(tidx, self.groups)
        head_dim = self.spec.head_dim
        first, end = chunk * STATISTICS_KEYS, cute.size(mV, mode=[1])
        if const_expr(self.spec.ragged):
            _, first, end = OwnBlocks(sequences[0], sequences[1], end, STATISTICS_KEYS).find(chunk)
        first = first + lane
        steps = cutlass.min(STATISTICS_KEYS // LANES, (cutlass.max(end - first, 0) + LANES - 1) // LANES)
        gV = cute.domain_offset((first, cute.assume(group * VECTOR, divby=VECTOR)), mV[batch, None, head, None])
        results = cute.make_rmem_tensor((VECTOR, 3), Float32)
        self.gather(gV, steps, results)
        magnitude = Float32(0.0)  # Inf or NaN if a sum is, and then some values may be
        for c in cutlass.range_constexpr(VECTOR):
            magnitude = magnitude + cute.arch.fmax(results[c, SUM], -results[c, SUM])
        if not magnitude < Float32.inf:
            self.gather_finite(gV, steps, results)
        shared = cutlass.memory.SmemAllocator().allocate_array(Float32, LANES * 3 * head_dim)
        lanes = cute.make_tensor(shared, cute.make_layout((head_dim, 3, LANES)))
        for c in cutlass.range_constexpr(VECTOR):
            for kind in cutlass.range_constexpr(3):
                lanes[group * VECTOR + c, kind, lane] = results[c, kind]
        cute.arch.sync_threads()
        total, lowest, highest = (lanes[tidx, kind, 0] for kind in range(3))  # a thread per channel
        for i in cutlass.range_constexpr(1, LANES):
            total = total + lanes[tidx, SUM, i]
            lowest = cute.arch.fmin(lowest, lanes[tidx, LOWEST, i])
            highest = cute.arch.fmax(highest, lanes[tidx, HIGHEST, i])
        for kind, value in ((SUM, total), (LOWEST, lowest), (HIGHEST, highest)):
            mPartial[batch, head, chunk, kind, tidx] = value

    @cute.jit
    def gather(self, gV: cute.Tensor, steps: Int32, results: cute.Tensor):
        """Statistics as if all values were finite, which finite sums prove; the extremes of two channels at once."""
        element = gV.element_type
        inf = PAIR_OF_INFINITIES[self.spec.dtype]
        extremes = cute.make_rmem_tensor((VECTOR // 2, 3), Int32)
        extremes[None, LOWEST].fill(inf)
        extremes[None, HIGHEST].fill(inf | SIGN_BITS)
        results[None, SUM].fill(0.0)
        for step in cutlass.range(steps, unroll=8):
            pairs = cute.make_rmem_tensor((VECTOR // 2,), Int32)
            cute.autovec_copy(vector_words(gV, step * LANES), pairs)
            for p in cutlass.range_constexpr(VECTOR // 2):
                for half in cutlass.range_constexpr(2):
                    c = 2 * p + half
                    results[c, SUM] = results[c, SUM] + ptx.unpack_16bit(pairs[p], half == 1, element)
                for kind in cutlass.range_constexpr(LOWEST, HIGHEST + 1):
                    extremes[p, kind] = ptx.extreme_16bit(extremes[p, kind], pairs[p], kind == HIGHEST, element)
        for kind in cutlass.range_constexpr(LOWEST, HIGHEST + 1):
            for c in cutlass.range_constexpr(VECTOR):
                results[c, kind] = ptx.unpack_16bit(extremes[c // 2, kind], c % 2 == 1, element)

    @cute.jit
    def gather_finite(self, gV: cute.Tensor, steps: Int32, results: cute.Tensor):
        """Statistics of the finite values."""
        results[None, SUM].fill(0.0)
        results[None, LOWEST].fill(Float32.inf)
        results[None, HIGHEST].fill(-Float32.inf)
        for step in cutlass.range(steps, unroll=1):
            pairs = cute.make_rmem_tensor((VECTOR // 2,), Int32)
            cute.autovec_copy(vector_words(gV, step * LANES), pairs)
            for c in cutlass.range_constexpr(VECTOR):
                x = ptx.unpack_16bit(pairs[c // 2], c % 2 == 1, gV.element_type)
                is_finite = cute.arch.fmax(x, -x) < Float32.inf  # false for NaN too: fmax of two NaN is NaN
                results[c, SUM] = results[c, SUM] + (x if is_finite else Float32(0.0))
                results[c, LOWEST] = cute.arch.fmin(results[c, LOWEST], x if is_finite else Float32.inf)
                results[c, HIGHEST] = cute.arch.fmax(results[c, HIGHEST], x if is_finite else -Float32.inf)


class ValueScalesKernel:
    """Scale, reciprocal and mean of each channel from the chunks' statistics: a CTA per head, a thread per channel."""

    def __init__(self, spec: ValueScalesSpec):
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        mPartial: cute.Tensor,
        mScale: cute.Tensor,
        mInverse: cute.Tensor,
        mMean: cute.Tensor,
        one_over_keys: Float32,
        sequences: Any,
        stream: Any,
    ):
        """Out: fp32 ``(batch or sequences, heads, head_dim)`` each. ``one_over_keys``: of a dense batch."""
        num_ctas = cute.size(mScale, mode=[0]) * cute.size(mScale, mode=[1])
        self.kernel(mPartial, mScale, mInverse, mMean, one_over_keys, sequences).launch(
            grid=(num_ctas, 1, 1), block=(self.spec.head_dim, 1, 1), use_pdl=True, stream=stream
        )

    @cute.jit
    def rounded_mean(self, mean: Float32, largest: Float32):
        """``reference_fp8.rounded_to_spacing``."""
        steps = 23 - MANTISSA_BITS[self.spec.dtype]
        bits = ptx.float_bits(largest) & EXPONENT_BITS
        if bits == EXPONENT_BITS:  # not finite
            bits = Int32(0)
        shift = ptx.bits_float((cutlass.min(bits, EXPONENT_BITS - ((steps + 1) << 23)) + (steps << 23)) | 0x400000)
        return ptx.add_rounded(ptx.add_rounded(mean, shift), -shift)

    @cute.kernel
    def kernel(
        self,
        mPartial: cute.Tensor,
        mScale: cute.Tensor,
        mInverse: cute.Tensor,
        mMean: cute.Tensor,
        one_over_keys: Float32,
        sequences: Any,
    ):
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()  # by every thread: whoever waits for this kernel waits for the one before it
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        batch, head = divide(cta, cute.size(mPartial, mode=[1]))
        entry, first, num_chunks = batch, Int32(0), cute.size(mPartial, mode=[2])
        if const_expr(self.spec.ragged):
            cu_seqlens, lengths = sequences
            num_keys = lengths[batch]
            entry, first = Int32(0), own_block(cu_seqlens[batch], batch, STATISTICS_KEYS)
            num_chunks = cutlass.min(ceil_div(num_keys, STATISTICS_KEYS), num_chunks - first)
            # As the host has it for a dense batch: divided in double precision, then rounded.
            one_over_keys = Float32(Float64(1.0) / Float64(cutlass.max(num_keys, 1)))
        total, lowest, highest = Float32(0.0), Float32.inf, -Float32.inf
        for chunk in cutlass.range(first, first + num_chunks, unroll=16):
            total = total + mPartial[entry, head, chunk, SUM, tidx]
            lowest = cute.arch.fmin(lowest, mPartial[entry, head, chunk, LOWEST, tidx])
            highest = cute.arch.fmax(highest, mPartial[entry, head, chunk, HIGHEST, tidx])
        mean = Float32(0.0)
        if const_expr(self.spec.center):
            mean = self.rounded_mean(total * one_over_keys, cute.arch.fmax(highest, -lowest))
            if not cute.arch.fmax(mean, -mean) < Float32.inf:
                mean = Float32(0.0)
        amax = cute.arch.fmax(highest - mean, mean - lowest)
        if not cute.arch.fmax(amax, -amax) < Float32.inf:
            amax = Float32(0.0)
        max_exponent = FP8_MAX_EXPONENT[self.spec.out_dtype]
        scale, inverse = scale_of(amax, self.spec.scales == "power_of_two", max_exponent)
        mScale[batch, head, tidx] = scale
        mInverse[batch, head, tidx] = inverse
        mMean[batch, head, tidx] = mean


class QuantizeValuesKernel:
    """Converts and transposes 128 keys of a head per CTA, 32 channels per warp; from e4m3 input, transposes alone.

    A thread takes the four keys that share a word of the result, whose order is that of P's registers.
    """

    def __init__(self, spec: QuantizeValuesSpec):
        self.spec, self.converts = spec, spec.dtype not in FP8_MAX_EXPONENT
        self.num_warps = ceil_div(spec.head_dim, WARP)

    @cute.jit
    def __call__(self, mV: cute.Tensor, mInverse: Any, mMean: Any, mData: cute.Tensor, sequences: Any, stream: Any):
        """``mV`` ``(batch, seqlen, heads, head_dim)``; ``mInverse`` and ``mMean`` fp32 ``(batch or sequences, heads,
        head_dim)``, None with FP8; ``mData`` FP8 ``(batch, heads, head_dim, slots)``, slots a multiple of 128."""
        num_ctas = cute.size(mData, mode=[0]) * cute.size(mData, mode=[1]) * (cute.size(mData, mode=[3]) // KEYS)
        self.kernel(mV, mInverse, mMean, mData, sequences).launch(
            grid=(num_ctas, 1, 1), block=(self.num_warps * WARP, 1, 1), use_pdl=self.converts, stream=stream
        )

    @cute.kernel
    def kernel(self, mV: cute.Tensor, mInverse: Any, mMean: Any, mData: cute.Tensor, sequences: Any):
        head_dim = self.spec.head_dim
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        if const_expr(self.converts):
            cute.arch.griddepcontrol_wait()
            num_ctas, _, _ = cute.arch.grid_dim()
            cta = num_ctas - 1 - cta  # what the statistics read last is still in the cache
        block_index, head = divide(cta, cute.size(mData, mode=[1]))
        batch, block = divide(block_index, cute.size(mData, mode=[3]) // KEYS)
        sequence, first_key, end = batch, block * KEYS, cute.size(mV, mode=[1])
        if const_expr(self.spec.ragged):
            sequence, first_key, end = OwnBlocks(sequences[0], sequences[1], end, KEYS).find(block)
        warp, lane = divide(tidx, WARP)
        column = cute.assume(warp * WARP + lane % 4 * VECTOR, divby=VECTOR)
        shared = cutlass.memory.SmemAllocator().allocate_array(Int32, self.num_warps * WARP * PITCH)
        words = cute.make_tensor(shared, cute.make_layout((WORDS, self.num_warps * WARP), stride=(1, PITCH)))
        if column < head_dim:
            gV = cute.domain_offset((first_key, column), mV[batch, None, head, None])
            channels = cute.domain_offset((0, column), words)
            numbers: Any = None
            if const_expr(self.converts):
                numbers = tuple(self.channel_numbers(m[sequence, head, None], column) for m in (mMean, mInverse))
            self.convert(gV, numbers, end - first_key, lane // 4, channels)
        cute.arch.sync_warp()
        channel, part = warp * WARP + lane // 8, lane % 8
        start = cute.assume(block * KEYS + 16 * part, divby=16)
        gData = cute.domain_offset((channel, start), mData[batch, head, None, None])
        for i in cutlass.range_constexpr(WARP // 4):
            if channel + 4 * i < head_dim:
                four = cute.make_rmem_tensor((4,), Int32)
                for w in cutlass.range_constexpr(4):
                    four[w] = words[4 * part + w, channel + 4 * i]
                target = cute.recast_ptr(cute.domain_offset((4 * i, 0), gData).iterator, dtype=Int32)
                cute.autovec_copy(four, cute.make_tensor(target, cute.make_layout(4)))

    def channel_numbers(self, gX: cute.Tensor, column: Int32) -> cute.Tensor:
        """Of the thread's channels."""
        numbers = cute.make_rmem_tensor((VECTOR,), Float32)
        source = cute.domain_offset((column,), gX)
        cute.autovec_copy(cute.make_tensor(source.iterator, numbers.layout), numbers)
        return numbers

    @cute.jit
    def convert(self, gV: cute.Tensor, numbers: Any, num_keys: Int32, first: Int32, words: cute.Tensor):
        """Eight channels of a block's words from ``first``, every eighth; keys past the end, from ``num_keys``, are 0.
        ``numbers``: means and reciprocals of scales, None with FP8."""
        element = gV.element_type
        values = cute.make_rmem_tensor((VECTOR * element.width // Int32.width, 4, GROUPS), Int32)
        values.fill(0)
        masks = cute.make_rmem_tensor((GROUPS,), Int32)
        masks.fill(0)
        for i in cutlass.range_constexpr(GROUPS):  # every load is issued before the first is used
            for j in cutlass.range_constexpr(4):
                word = first + i * (WORDS // GROUPS)
                key = word // 4 * 16 + 8 * (j // 2) + 2 * (word % 4) + j % 2
                if key < num_keys:
                    cute.autovec_copy(vector_words(gV, key), values[None, j, i])
                    masks[i] |= BYTES[j]
        for i in cutlass.range_constexpr(GROUPS):
            x = cute.make_rmem_tensor((VECTOR, 4), Float32)
            if const_expr(self.converts):
                for k in cutlass.range_constexpr(cute.size(x)):
                    number = ptx.unpack_16bit(values[k // 2 + i * cute.size(x) // 2], k % 2 == 1, element)
                    x[k] = without_infinity((number - numbers[0][k % VECTOR]) * numbers[1][k % VECTOR])
            else:
                x.store(cute.recast_tensor(values[None, None, i], element).load().to(Float32))
            for c in cutlass.range_constexpr(VECTOR):
                packed = ptx.pack_8bit(tuple(x[c, j] for j in range(4)), ELEMENTS[self.spec.out_dtype])
                words[first + i * (WORDS // GROUPS), c] = packed & masks[i]


def _values(spec: Any, batch: Any, heads: Any) -> Any:
    strides = tuple(cute.sym_int64(divisibility=16 // ELEMENT_BYTES[spec.dtype]) for _ in range(3))
    shape = (batch, cute.sym_int(), heads, spec.head_dim)
    return make_fake_tensor(ELEMENTS[spec.dtype], shape, (*strides, 1), assumed_align=16)


def _compact(element: Any, shape: tuple) -> Any:
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(element, shape, stride_order=order, assumed_align=16)


def compile_value_statistics(spec: ValueStatisticsSpec, options: str = "--enable-tvm-ffi") -> Any:
    """The result takes ``(v, partial, sequences)``, on torch's current stream; ``sequences`` as in
    :func:`flashhopper.kernels.quantize.compile_quantize_rows`."""
    batch, heads, chunks = (cute.sym_int() for _ in range(3))
    partial = _compact(Float32, (batch, heads, chunks, 3, spec.head_dim))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    sequences = fake_sequences(spec.ragged)
    return cute.compile(
        ValueStatisticsKernel(spec), _values(spec, batch, heads), partial, sequences, stream, options=options
    )


def compile_value_scales(spec: ValueScalesSpec, options: str = "--enable-tvm-ffi") -> Any:
    """The result takes ``(partial, scale, inverse, mean, 1 / seqlen, sequences)``, on torch's current stream."""
    batch, heads, chunks = (cute.sym_int() for _ in range(3))
    entries = cute.sym_int() if spec.ragged else batch
    channels = [_compact(Float32, (entries, heads, spec.head_dim)) for _ in range(3)]
    partial = _compact(Float32, (batch, heads, chunks, 3, spec.head_dim))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    sequences = fake_sequences(spec.ragged)
    return cute.compile(ValueScalesKernel(spec), partial, *channels, Float32(1.0), sequences, stream, options=options)


def compile_quantize_values(spec: QuantizeValuesSpec, options: str = "--enable-tvm-ffi") -> Any:
    """The result takes ``(v, inverse, mean, data, sequences)``, inverse and mean None with FP8, on torch's current
    stream."""
    batch, heads = (cute.sym_int() for _ in range(2))
    entries = cute.sym_int() if spec.ragged else batch
    kernel = QuantizeValuesKernel(spec)
    channels = [_compact(Float32, (entries, heads, spec.head_dim)) if kernel.converts else None for _ in range(2)]
    data = _compact(ELEMENTS[spec.out_dtype], (batch, heads, spec.head_dim, cute.sym_int(divisibility=KEYS)))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        kernel,
        _values(spec, batch, heads),
        *channels,
        data,
        fake_sequences(spec.ragged),
        stream,
        options=options,
    )
