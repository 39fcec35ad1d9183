"""Which key blocks a block of query rows visits. Plain arithmetic: runs on Python ints and on DSL integers alike."""

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
