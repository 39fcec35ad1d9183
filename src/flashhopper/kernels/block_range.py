"""Which key blocks a block of query rows visits, and which query blocks a key block meets. Plain arithmetic: runs on
Python ints and on DSL integers alike."""

from typing import Any, NamedTuple

from flashhopper.kernels.values import ceil_div, maximum, minimum

UNBOUNDED = 2**30  # a side of a window that hides nothing; sequences with windows are at most this long


class KeyWindow(NamedTuple):
    """The keys that a row sees by its position, and the positions that see a key.

    A query row i stands at position i + seqlen_k - seqlen_q, which may be negative. Both intervals move up with their
    argument, and a row's contains its own position, if that is a key at all.
    """

    left: Any
    right: Any
    chunk: Any = None
    """Keys per chunk; None without chunks."""

    def keys(self, position: Any) -> tuple[Any, Any]:
        """First and end of the keys that a position sees, not clipped to the sequence."""
        first, end = position - self.left, position + self.right + 1
        if self.chunk is not None:
            start = maximum(position, 0) // self.chunk * self.chunk
            first = maximum(first, start)
            # Before the first key lies a chunk without keys. 1 if there is a key, else 0: see key_blocks.
            is_key = minimum(maximum(position + 1, 0), 1)
            end = minimum(end, (start + self.chunk) * is_key)
        return first, end

    def positions(self, key: Any) -> tuple[Any, Any]:
        """First and end of the positions that see a key, which is at least 0."""
        first, end = key - self.right, key + self.left + 1
        if self.chunk is not None:
            start = key // self.chunk * self.chunk
            first, end = maximum(first, start), minimum(end, start + self.chunk)
        return first, end


class BlockRange(NamedTuple):
    """Key blocks ``first … first + num_blocks - 1``, visited from the last to the first.

    In memory: ``num_left`` blocks that need the element mask, ``num_unmasked`` that every row of the query block sees
    whole, and at least one more masked one, visited first, in which every row that sees a key at all sees one.
    """

    num_blocks: Any
    num_unmasked: Any
    first: Any = 0
    num_left: Any = 0

    @property
    def num_right(self) -> Any:
        """Masked blocks that are visited first, at least 1."""
        return self.num_blocks - self.num_unmasked - self.num_left

    @property
    def end(self) -> Any:
        return self.first + self.num_blocks


def key_blocks(
    first_row: Any,
    seqlen_q: Any,
    seqlen_k: Any,
    *,
    num_rows: int,
    tile_n: int,
    causal: bool,
    window: KeyWindow | None = None,
) -> BlockRange:
    """The range for query rows ``first_row … first_row + num_rows - 1``; seqlen_q is at least 1.

    Masks are aligned to the bottom right: a causal row i sees keys 0 … i + seqlen_k - seqlen_q. Rows that see no key,
    or lie past the end of the sequence, still visit one block, which the element mask empties or whose result nobody
    stores.
    """
    if window is not None:
        return _blocks_in_window(first_row, seqlen_q, seqlen_k, num_rows, tile_n, window)
    num_blocks = ceil_div(seqlen_k, tile_n)
    num_whole = num_blocks - 1
    end_row = minimum(first_row + num_rows, seqlen_q)
    if causal:
        offset = seqlen_k - seqlen_q
        num_blocks = minimum(num_blocks, ceil_div(maximum(end_row + offset, 0), tile_n))
        # Row first_row, which sees least, sees keys 0 … first_row + offset; the last key's block may be ragged.
        num_whole = maximum(minimum(first_row + offset, seqlen_k - 1), 0) // tile_n
    # 1 if a row exists, else 0, without a branch: ints and DSL integers have no conditional expression in common.
    exists = minimum(maximum(seqlen_q - first_row, 0), 1)
    num_blocks = maximum(num_blocks * exists, 1)
    return BlockRange(num_blocks, maximum(minimum(num_whole, num_blocks - 1), 0))


def _blocks_in_window(
    first_row: Any, seqlen_q: Any, seqlen_k: Any, num_rows: int, tile_n: int, window: KeyWindow
) -> BlockRange:
    offset = seqlen_k - seqlen_q
    last_row = minimum(first_row + num_rows, seqlen_q) - 1
    first_row = minimum(first_row, last_row)  # rows past the end visit what the last one does
    first_key, end_key = window.keys(first_row + offset)  # of the first row
    later_key, last_end_key = window.keys(last_row + offset)  # of the last
    end = maximum(ceil_div(maximum(minimum(last_end_key, seqlen_k), 0), tile_n), 1)
    first = minimum(maximum(first_key, 0) // tile_n, end - 1)
    # The block of the first row's last key is masked, so that every row sees a key in a masked block visited first.
    end_whole = maximum(minimum(end_key, seqlen_k) - 1, 0) // tile_n
    end_whole = minimum(maximum(end_whole, first), end - 1)
    first_whole = minimum(maximum(ceil_div(maximum(later_key, 0), tile_n), first), end_whole)
    return BlockRange(end - first, end_whole - first_whole, first, first_whole - first)


class QueryRange(NamedTuple):
    """Query blocks ``first … first + num_blocks - 1``, which see some key of a key block.

    In memory the first ``num_masked`` of them need the element mask; the next ``num_whole`` see every key of the block,
    and what follows them is masked again.
    """

    first: Any
    num_masked: Any
    num_blocks: Any
    num_whole: Any


def query_blocks(
    n_block: Any,
    seqlen_q: Any,
    seqlen_k: Any,
    *,
    tile_m: int,
    tile_n: int,
    causal: bool,
    window: KeyWindow | None = None,
) -> QueryRange:
    """The query blocks of ``tile_m`` rows that key block ``n_block`` of ``tile_n`` keys meets; seqlen_k at least 1.

    Query rows past the end of the sequence need no mask: their probabilities are 0. Keys past the end do.
    """
    num_m_blocks = ceil_div(seqlen_q, tile_m)
    first_key, end_key = n_block * tile_n, (n_block + 1) * tile_n
    # 1 if the block reaches past the last key, else 0, without a branch: see key_blocks.
    is_ragged = minimum(maximum(end_key - seqlen_k, 0), 1)
    offset = seqlen_k - seqlen_q  # query i stands at position i + offset
    if window is not None:
        first_position, first_end = window.positions(first_key)
        _, last_end = window.positions(minimum(end_key, seqlen_k) - 1)
        later_position, _ = window.positions(end_key - 1)
        first = minimum(maximum(first_position - offset, 0) // tile_m, num_m_blocks)
        end = ceil_div(maximum(minimum(last_end - offset, seqlen_q), 0), tile_m)
        num_blocks = maximum(end - first, 0)
        # Whole from the first row that sees the last key to the last row that sees the first key.
        first_whole = minimum(maximum(ceil_div(maximum(later_position - offset, 0), tile_m), first), first + num_blocks)
        end_row = maximum(first_end - offset, 0)
        past_last = minimum(maximum(end_row - seqlen_q + 1, 0), 1)  # 1 if the last row too sees the first key
        end_whole = maximum(end_row // tile_m, past_last * num_m_blocks)
        end_whole = maximum(minimum(end_whole, first + num_blocks), first_whole)
        num_masked = maximum(first_whole - first, is_ragged * num_blocks)
        return QueryRange(first, num_masked, num_blocks, (end_whole - first_whole) * (1 - is_ragged))
    first, first_whole = n_block * 0, n_block * 0
    if causal:
        first = minimum(maximum(first_key - offset, 0) // tile_m, num_m_blocks)
        # The first row of an unmasked block sees the last key; beyond the last query nothing is left to see.
        first_whole = minimum(ceil_div(maximum(end_key - 1 - offset, 0), tile_m), num_m_blocks)
    num_blocks = num_m_blocks - first
    num_masked = maximum(first_whole - first, is_ragged * num_blocks)
    return QueryRange(first, num_masked, num_blocks, num_blocks - num_masked)


def hides_all(first_key: Any, num_keys: int, first_position: Any, num_rows: int, window: KeyWindow | None) -> Any:
    """Whether none of ``num_rows`` rows from ``first_position`` on sees one of ``num_keys`` keys from ``first_key`` on,
    whatever the lengths; without a window by the causal mask."""
    last_position = first_position + num_rows - 1
    if window is None:
        return first_key > last_position
    first, _ = window.keys(first_position)
    _, end = window.keys(last_position)
    return (first_key + num_keys <= first) | (first_key >= end)
