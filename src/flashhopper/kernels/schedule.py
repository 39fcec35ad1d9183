"""The order in which the sequences of a ragged batch are worked on, longest first, computed on the device."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from flashhopper.config import ScheduleSpec
from flashhopper.kernels.ragged import RECORD_WORDS
from flashhopper.kernels.values import ceil_div, maximum, minimum

THREADS = 1024
LANES = 32
CLASSES = 64  # of lengths: two per power of two
NO_SEQUENCE = -1


class ScheduleKernel:
    """One CTA. A tile costs what its sequence's other side is long: sequences are sorted by that, in classes of equal
    first two bits. Rows past the used ones of a sequence, and past the last sequence, become records without keys."""

    def __init__(self, spec: ScheduleSpec):
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        cu_rows: cute.Tensor,
        cu_others: cute.Tensor,
        used_rows: Any,
        used_others: Any,
        records: cute.Tensor,
        first_tiles: cute.Tensor,
        total_rows: Int32,
        tile_rows: Int32,
        heads: Int32,
        stream: Any,
    ):
        """``cu_*`` int32 ``(batch + 1,)``, ``used_*`` int32 ``(batch,)`` or None. Out: see :class:`SequenceTable`, for
        2 · batch sequences, tiles of ``tile_rows`` rows and ``heads`` heads."""
        sizes = (total_rows, tile_rows, heads)
        self.kernel((cu_rows, cu_others), (used_rows, used_others), records, first_tiles, sizes).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, cu: tuple, used: tuple, records: cute.Tensor, first_tiles: cute.Tensor, sizes: tuple):
        total_rows, tile_rows, heads = sizes
        storage = cutlass.memory.SmemAllocator()
        places = storage.allocate_tensor(Int32, cute.make_layout(CLASSES))
        cute.arch.griddepcontrol_launch_dependents()  # which wait for this one to end before they need it
        tidx, _, _ = cute.arch.thread_idx()
        batch = cute.size(cu[0]) - 1
        if tidx < CLASSES:
            places[tidx] = Int32(0)
        cute.arch.sync_threads()
        for i in cutlass.range(tidx, batch, THREADS):
            _, _, _, length_others = self.sequence(i, cu, used, total_rows)
            cute.arch.atomic_add(places.iterator + self.length_class(length_others), Int32(1))
        cute.arch.sync_threads()
        if tidx < LANES:
            self.to_first_places(places, tidx)
        cute.arch.sync_threads()
        for i in cutlass.range(tidx, batch, THREADS):
            start, length, start_others, length_others = self.sequence(i, cu, used, total_rows)
            place = cute.arch.atomic_add(places.iterator + self.length_class(length_others), Int32(1))
            self.write(records, place, (i, start, length, start_others, length_others))
            first_tiles[place] = ceil_div(length, tile_rows) * heads
            end = total_rows
            if i + 1 < batch:
                end = cu[0][i + 1]
            start_unused = start + length
            unused = maximum(minimum(end, total_rows) - start_unused, 0)
            self.write(records, batch + i, (i, start_unused, unused, Int32(0), Int32(NO_SEQUENCE)))
            first_tiles[batch + i] = ceil_div(unused, tile_rows) * heads
        cute.arch.sync_threads()
        if tidx < LANES:
            self.to_first_tiles(first_tiles, tidx)

    @cute.jit
    def sequence(self, i: Int32, cu: tuple, used: tuple, total_rows: Int32):
        """Start and length of a sequence's rows and of the other side's. Lengths that the tensors do not hold are cut,
        so that nothing is written outside them."""
        cu_rows, cu_others = cu
        used_rows, used_others = used
        start, start_others = cu_rows[i], cu_others[i]
        length, length_others = cu_rows[i + 1] - start, cu_others[i + 1] - start_others
        if const_expr(used_rows is not None):
            length = minimum(used_rows[i], length)
        if const_expr(used_others is not None):
            length_others = minimum(used_others[i], length_others)
        start = minimum(maximum(start, 0), total_rows)
        return start, minimum(maximum(length, 0), total_rows - start), start_others, maximum(length_others, 0)

    def length_class(self, length: Int32) -> Int32:
        """The longest come first: by the position of the first bit, then by the second bit."""
        log2 = 31 - cute.arch.clz(length | 1)
        second_bit = (length << 1 >> log2) & 1
        return CLASSES - 1 - (2 * log2 + second_bit)

    @cute.jit
    def to_first_places(self, places: cute.Tensor, lane: Int32):
        """Counts to exclusive sums, by one warp."""
        carry = Int32(0)
        for chunk in cutlass.range_constexpr(CLASSES // LANES):
            count = places[chunk * LANES + lane]
            total = self.inclusive_sum(count, lane)
            places[chunk * LANES + lane] = carry + total - count
            carry = carry + cute.arch.shuffle_sync(total, LANES - 1)

    @cute.jit
    def to_first_tiles(self, first_tiles: cute.Tensor, lane: Int32):
        """Numbers of tiles to exclusive sums and, at the end, the sum of all, by one warp."""
        count, carry = cute.size(first_tiles) - 1, Int32(0)
        for chunk in cutlass.range(ceil_div(count, LANES)):
            i, tiles = chunk * LANES + lane, Int32(0)
            if i < count:
                tiles = first_tiles[i]
            total = self.inclusive_sum(tiles, lane)
            if i < count:
                first_tiles[i] = carry + total - tiles
            carry = carry + cute.arch.shuffle_sync(total, LANES - 1)
        if lane == 0:
            first_tiles[count] = carry

    @cute.jit
    def inclusive_sum(self, value: Int32, lane: Int32):
        """Of the values of the lanes up to this one."""
        for distance in (1, 2, 4, 8, 16):
            below = cute.arch.shuffle_sync_up(value, offset=distance, mask_and_clamp=0)
            value = value + (below if lane >= distance else Int32(0))
        return value

    @cute.jit
    def write(self, records: cute.Tensor, place: Int32, words: tuple):
        for i, word in enumerate(words):
            records[place * RECORD_WORDS + i] = word


def compile_schedule(spec: ScheduleSpec, options: str = "--enable-tvm-ffi") -> Any:
    """The result takes ``(cu_rows, cu_others, used_rows or None, used_others or None, records, first_tiles, total_rows,
    tile_rows, heads)``, on torch's current stream."""

    def ints(extent: Any = None) -> Any:
        return make_fake_compact_tensor(Int32, (cute.sym_int() if extent is None else extent,), assumed_align=4)

    cu = cute.sym_int()
    return cute.compile(
        ScheduleKernel(spec),
        ints(cu),
        ints(cu),
        ints() if spec.has_used_rows else None,
        ints() if spec.has_used_others else None,
        ints(),
        ints(),
        Int32(1),
        Int32(1),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )
