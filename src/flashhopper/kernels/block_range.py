"""Which key blocks a block of query rows visits, and which query blocks a key block meets. Plain arithmetic: runs on
Python ints and on DSL integers alike."""

from typing import Any, NamedTuple

from flashhopper.kernels.values import ceil_div, maximum, minimum


class BlockRange(NamedTuple):
    """Key blocks ``0 … num_blocks - 1``, visited from the last to the first.

    The first ``num_unmasked`` of them in memory, which are visited last, are seen whole by every row of the query
    block, and at least one block is left to the masked loop: every row that sees a key at all sees one there.
    """

    num_blocks: Any
    num_unmasked: Any


def key_blocks(first_row: Any, seqlen_q: Any, seqlen_k: Any, *, num_rows: int, tile_n: int, causal: bool) -> BlockRange:
    """The range for query rows ``first_row … first_row + num_rows - 1``; both lengths are at least 1.

    Causal masks are aligned to the bottom right: row i sees keys 0 … i + seqlen_k - seqlen_q. Rows that see no key, or
    lie past the end of the sequence, still visit one block, which the element mask empties or whose result nobody
    stores.
    """
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
    return BlockRange(num_blocks, minimum(num_whole, num_blocks - 1))


class QueryRange(NamedTuple):
    """Query blocks ``first … first + num_blocks - 1``, which see some key of a key block.

    The first ``num_masked`` of them in memory need the element mask; the others see every key of the block.
    """

    first: Any
    num_masked: Any
    num_blocks: Any


def query_blocks(n_block: Any, seqlen_q: Any, seqlen_k: Any, *, tile_m: int, tile_n: int, causal: bool) -> QueryRange:
    """The query blocks of ``tile_m`` rows that key block ``n_block`` of ``tile_n`` keys meets; lengths at least 1.

    Query rows past the end of the sequence need no mask: their probabilities are 0. Keys past the end do.
    """
    num_m_blocks = ceil_div(seqlen_q, tile_m)
    first_key, end_key = n_block * tile_n, (n_block + 1) * tile_n
    # 1 if the block reaches past the last key, else 0, without a branch: see key_blocks.
    is_ragged = minimum(maximum(end_key - seqlen_k, 0), 1)
    first, first_whole = n_block * 0, n_block * 0
    if causal:
        offset = seqlen_k - seqlen_q  # query i sees keys 0 … i + offset
        first = minimum(maximum(first_key - offset, 0) // tile_m, num_m_blocks)
        # The first row of an unmasked block sees the last key; beyond the last query nothing is left to see.
        first_whole = minimum(ceil_div(maximum(end_key - 1 - offset, 0), tile_m), num_m_blocks)
    num_blocks = num_m_blocks - first
    num_masked = maximum(first_whole - first, is_ragged * num_blocks)
    return QueryRange(first, num_masked, num_blocks)
