"""Which key blocks a block of query rows visits. Plain arithmetic: runs on Python ints and on DSL integers alike."""

from typing import Any, NamedTuple

from flashhopper.kernels.values import ceil_div, maximum, minimum


class BlockRange(NamedTuple):
    """Key blocks ``0 … num_blocks - 1``, visited from the last to the first.

    The first ``num_unmasked`` of them in memory, which are visited last, are seen whole by every row of the query block, and at
    least one block is left to the masked loop: every row that sees a key at all sees one there.
    """

    num_blocks: Any
    num_unmasked: Any


def key_blocks(m_block: Any, seqlen_q: Any, seqlen_k: Any, *, tile_m: int, tile_n: int, causal: bool) -> BlockRange:
    """The range for query rows ``m_block * tile_m …``; ``seqlen_q`` and ``seqlen_k`` are at least 1.

    Causal masks are aligned to the bottom right: row i sees keys 0 … i + seqlen_k - seqlen_q. A query block that sees no key
    still visits one block, which the element mask then empties.
    """
    num_blocks = ceil_div(seqlen_k, tile_n)
    if not causal:
        return BlockRange(num_blocks, num_blocks - 1)
    offset = seqlen_k - seqlen_q
    first_row, end_row = m_block * tile_m, minimum((m_block + 1) * tile_m, seqlen_q)
    num_blocks = maximum(minimum(num_blocks, ceil_div(maximum(end_row + offset, 0), tile_n)), 1)
    # Row first_row, which sees least, sees keys 0 … first_row + offset; the last key's block may be ragged.
    num_whole = maximum(minimum(first_row + offset, seqlen_k - 1), 0) // tile_n
    return BlockRange(num_blocks, minimum(num_whole, num_blocks - 1))
