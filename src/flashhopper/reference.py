"""Attention in plain PyTorch: the oracle that tests compare with and what CPU tensors run through, and an emulator of
the forward kernel's arithmetic, tile by tile, that shows on any machine what the kernel's roundings cost.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from flashhopper.config import ROWS_PER_WARPGROUP, ForwardConfig
from flashhopper.mod_call import Mods, Pairs

CHUNK_SCORES = 2**24
"""Scores held at once (64 MiB in fp32): query rows are cut so that memory grows with the inputs, not their product."""

LOG2_E = math.log2(math.e)
NO_KEY_YET = -3.0e38  # row_max before the first visible key: finite, so that no (-inf) - (-inf) can arise
MOVE_ABOVE = 2.0**30  # lazy softmax: a partial sum above this moves the reference
SAFE_SUMS = (2.0**-60, 2.0**100)  # lazy softmax: a final row sum outside proves nothing, the tile is redone
MAX_REFERENCE = {torch.bfloat16: 2.0**31, torch.float16: 2.0**28}  # beyond, a row becomes NaN


class Visible(NamedTuple):
    """The keys that each query row sees: ``starts[i] ≤ key < ends[i]``, int64 ``(seqlen_q,)``; maybe none."""

    starts: torch.Tensor
    ends: torch.Tensor
    positions: torch.Tensor
    """The key at which each query stands, ``(seqlen_q,)``; maybe none of those there are."""

    def of_rows(self, start: int, stop: int) -> Visible:
        """Those of query rows ``start … stop - 1``."""
        return Visible(*(x[start:stop] for x in self))

    def shifted(self, keys: int) -> Visible:
        """The same keys, counted from key number ``keys``."""
        return Visible(*(x - keys for x in self))


def visible_keys(
    seqlen_q: int,
    seqlen_k: int,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    device: torch.device | None = None,
) -> Visible:
    """What the masks leave of each row; they combine by intersection.

    All are aligned to the bottom right: query i stands at key i + seqlen_k - seqlen_q. ``causal`` ends there,
    ``window_size`` (left, right) reaches that many keys to either side, inclusive (-1: without bound), and
    ``attention_chunk`` ends at the borders of the chunk of that many keys in which the query stands (0: no chunks).
    """
    position = torch.arange(seqlen_q, device=device) + seqlen_k - seqlen_q
    starts, ends = torch.zeros_like(position), torch.full_like(position, seqlen_k)
    left, right = window_size
    if causal:
        ends = ends.minimum(position + 1)
    if left >= 0:
        starts = starts.maximum(position - left)
    if right >= 0:
        ends = ends.minimum(position + right + 1)
    if attention_chunk > 0:
        first = position.div(attention_chunk, rounding_mode="floor") * attention_chunk
        starts, ends = starts.maximum(first), ends.minimum(first + attention_chunk)
    return Visible(starts, ends, position)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    learnable_sink: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    mods: Mods | None = None,
    first_batch: int = 0,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its log-sum-exp, differentiable by autograd through both.

    q ``(b, sq, h, d)``, k ``(b, sk, hk, d)``, v ``(b, sk, hk, dv)`` with ``h % hk == 0``; which keys a row sees:
    :func:`visible_keys`. Scores s become ``softcap · tanh(s / softcap)`` if softcap is over 0. ``alibi_slopes``
    ``(h,)`` or ``(b, h)``, constants, then take slope · |i + sk - sq - j| from the score of query i and key j (Press et
    al. 2022, sec. 3); then ``mods`` have their say, to which the first batch entry is number ``first_batch``.
    ``learnable_sink`` ``(h,)`` adds exp(sink) to the denominator of every row of its head. Returns
    out ``(b, sq, h, dv)`` in q's dtype and the natural-log LSE ``(b, h, sq)``, the sink included, in fp32 (fp64 if
    computed in fp64). A row without a visible key has out 0, LSE -inf (with a sink: the sink) and passes no gradient on
    to q, k and v. ``compute_dtype`` is fp32 by default, fp64 for fp64 inputs; q's own dtype gives the error that plain
    low-precision PyTorch makes, the measure of the tolerance rule.
    """
    if compute_dtype is None:
        compute_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k = k.shape[1]
    q_rows = q.to(compute_dtype)
    # (b, hk, sk, d): laid out once, so that no chunk copies all keys again
    k_heads, v_heads = (x.to(compute_dtype).transpose(1, 2).contiguous() for x in (k, v))
    sink = None if learnable_sink is None else learnable_sink.to(compute_dtype)
    visible = visible_keys(
        seqlen_q, seqlen_k, causal=causal, window_size=window_size, attention_chunk=attention_chunk, device=q.device
    )
    slopes = None
    if alibi_slopes is not None:  # bf16 would round distances
        slopes = alibi_slopes.detach().to(torch.promote_types(compute_dtype, torch.float32))
        slopes = slopes.reshape(slopes.shape[:-1].numel(), k.shape[2], heads // k.shape[2], 1, 1)
    scoring = _Scoring(softmax_scale, softcap, slopes, mods)

    chunk = max(CHUNK_SCORES // max(batch * heads * seqlen_k, 1), 1)
    starts = range(0, max(seqlen_q, 1), chunk)
    attend = _attend_rows
    if len(starts) > 1 and torch.is_grad_enabled():
        # Recomputed in backward: kept, the chunks' scores would add up to the whole (b, h, sq, sk) matrix.
        attend = partial(checkpoint, _attend_rows, use_reentrant=False, preserve_rng_state=False)
    outs, lses = [], []
    for start in starts:
        stop = min(start + chunk, seqlen_q)
        rows = visible.of_rows(start, stop)
        first, last = 0, 0  # the keys that some row of the chunk may see
        if stop > start:
            first, last = int(rows.starts.min().clamp(0, seqlen_k)), int(rows.ends.max().clamp(0, seqlen_k))
        last = max(first, last)
        seen_k, seen_v = k_heads[:, :, first:last], v_heads[:, :, first:last]
        pairs = None if mods is None else _pairs(q, k, slice(start, stop), slice(first, last), first_batch)
        out, lse = attend(q_rows[:, start:stop], seen_k, seen_v, rows.shifted(first), scoring, sink, pairs)
        outs.append(out)
        lses.append(lse)
    lse_dtype = torch.float64 if compute_dtype == torch.float64 else torch.float32
    return torch.cat(outs, dim=1).to(q.dtype), torch.cat(lses, dim=2).to(lse_dtype)


class _Scoring(NamedTuple):
    """From q·k to scores."""

    softmax_scale: float
    softcap: float
    slopes: torch.Tensor | None
    """Of ALiBi, ``(b or 1, hk, group, 1, 1)``."""
    mods: Mods | None

    def __call__(self, products: torch.Tensor, positions: torch.Tensor, pairs: Pairs | None) -> torch.Tensor:
        """Products and scores ``(b, hk, group, rows, keys)`` of rows that stand at the keys ``positions``."""
        scores = products * self.softmax_scale
        if self.softcap > 0:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.slopes is not None:
            distances = (positions[:, None] - torch.arange(scores.shape[-1], device=scores.device)).abs()
            scores = scores - (self.slopes * distances).to(scores.dtype)
        if self.mods is not None and pairs is not None:
            scores = pairs.scores(self.mods, scores)
        return scores


def _pairs(q: torch.Tensor, k: torch.Tensor, rows: slice, keys: slice, first_batch: int) -> Pairs:
    """Of some rows and keys of all heads, for scores ``(b, hk, group, rows, keys)``."""
    (batch, _, heads, _), heads_k = q.shape, k.shape[2]

    def integers(start: int, stop: int) -> torch.Tensor:
        return torch.arange(start, stop, dtype=torch.int32, device=q.device)

    return Pairs(
        integers(first_batch, first_batch + batch).view(batch, 1, 1, 1, 1),
        integers(0, heads).view(heads_k, heads // heads_k, 1, 1),
        integers(rows.start, rows.stop).unsqueeze(1),
        integers(keys.start, keys.stop),
    )


def _attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: Visible,
    scoring: _Scoring,
    sink: torch.Tensor | None,
    pairs: Pairs | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows q ``(b, rows, h, d)`` against k ``(b, hk, n, d)``, v ``(b, hk, n, dv)``: out and LSE, in their dtype."""
    with torch.autocast(q.device.type, enabled=False):  # else its products would be 16-bit ones, recomputed or not
        return _attend_rows_as_given(q, k, v, visible, scoring, sink, pairs)


def _attend_rows_as_given(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: Visible,
    scoring: _Scoring,
    sink: torch.Tensor | None,
    pairs: Pairs | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`_attend_rows` in the dtype of q, k and v, whatever autocast says.

    Query heads that share K and V are stacked as rows of one matrix product. The row max is a constant to autograd:
    neither output depends on it.
    """
    batch, rows, heads, head_dim = q.shape
    _, heads_k, keys, head_dim_v = v.shape
    group = heads // heads_k
    stacked = _grouped(q, heads_k).reshape(batch, heads_k, group * rows, head_dim)
    products = (stacked @ k.transpose(2, 3)).view(batch, heads_k, group, rows, keys)
    scores = scoring(products, visible.positions, pairs)
    columns = torch.arange(keys, device=q.device)
    hidden = (columns < visible.starts[:, None]) | (columns >= visible.ends[:, None])
    if pairs is not None and scoring.mods is not None and scoring.mods.mask is not None:
        hidden = hidden | pairs.hidden(scoring.mods)
    if hidden.any():
        scores = scores.masked_fill(hidden, -math.inf)
    row_max = scores.new_zeros(batch, heads_k, group, rows, 1)
    if keys:
        row_max = scores.detach().amax(dim=-1, keepdim=True)
        row_max = row_max.masked_fill(row_max == -math.inf, 0.0)
    no_key = (hidden.all(dim=-1) if keys else torch.ones_like(visible.starts, dtype=torch.bool)).unsqueeze(-1)
    if sink is not None:
        sinks = sink.view(heads_k, group, 1, 1)
        row_max = torch.where(no_key, sinks.detach(), torch.maximum(row_max, sinks.detach()))
        row_max = row_max.masked_fill(row_max == -math.inf, 0.0)
    weights = torch.exp(scores - row_max)
    row_sum = weights.sum(dim=-1, keepdim=True)
    if sink is not None:
        row_sum = row_sum + torch.exp(sinks - row_max)
    no_weight = row_sum == 0
    row_sum = row_sum.masked_fill(no_weight, 1.0)  # before the division and the log: their gradients stay finite
    acc = (weights.flatten(2, 3) @ v).view(batch, heads_k, group, rows, head_dim_v)
    out = (acc / row_sum).masked_fill(no_key | no_weight, 0.0)
    lse = (row_max + torch.log(row_sum)).masked_fill(no_weight, -math.inf)
    return out.permute(0, 3, 1, 2, 4).reshape(batch, rows, heads, head_dim_v), lse.reshape(batch, heads, rows)


class _Tile(NamedTuple):
    """Running state of some query rows for every batch and head: ``(b, hk, group, rows, 1 or dv)``, fp32."""

    row_max: torch.Tensor
    """What the exponents subtract, in log2 units: the running maximum, or the lazy softmax's reference."""
    row_sum: torch.Tensor
    acc_O: torch.Tensor

    def rescaled(self, row_max: torch.Tensor) -> _Tile:
        """The same sums relative to another ``row_max``; the factor comes from the rounded values."""
        scores_scale = _exp2(self.row_max - row_max)
        return _Tile(row_max, self.row_sum * scores_scale, self.acc_O * scores_scale)

    def moved(self) -> _Tile:
        """Move the reference of each row by log2 of its sum, in the warpgroups where a sum has grown too large."""
        fire = (self.row_sum > MOVE_ABOVE).any(dim=-2, keepdim=True)
        new = self.rescaled(self.row_max + torch.log2(self.row_sum.clamp_min(1.0)))
        lost = (self.row_sum >= SAFE_SUMS[1]) | (_exp2(self.row_max - new.row_max) == 0.0)
        trusted = new.row_sum.masked_fill(lost, math.nan)  # NaN for good: the tile is redone
        new = new._replace(row_sum=trusted)
        return new.where(fire.squeeze((-2, -1)), self)

    def where(self, chosen: torch.Tensor, other: _Tile) -> _Tile:
        """This state for the heads ``chosen (b, hk, group)``, the other state elsewhere."""
        pairs = zip(self, other, strict=True)
        return _Tile(*(torch.where(chosen[..., None, None], mine, theirs) for mine, theirs in pairs))

    def accumulated(self, exponents: torch.Tensor, v: torch.Tensor) -> _Tile:
        """Add a block: P summed in fp32, then rounded to V's dtype for P·V."""
        p = _exp2(exponents)
        acc = self.acc_O + p.to(v.dtype).float() @ v.float()
        return self._replace(row_sum=self.row_sum + p.sum(dim=-1, keepdim=True), acc_O=acc)

    def marked(self, max_reference: float) -> _Tile:
        """NaN where the reference is so large that its own rounding spoils the exponents."""
        too_large = (self.row_max.abs() >= max_reference) & (self.row_max != NO_KEY_YET)
        return self._replace(row_sum=self.row_sum.masked_fill(too_large, math.nan))

    def is_safe(self, ends: torch.Tensor) -> torch.Tensor:
        """Per head ``(b, hk, group)``: does the lazy softmax's result hold for each of these rows?"""
        low, high = SAFE_SUMS
        sums_hold = (self.row_sum > low) & (self.row_sum < high) | (ends[:, None] <= 0)
        return (sums_hold & self.acc_O.isfinite().all(dim=-1, keepdim=True)).flatten(-2).all(dim=-1)


class _Blocks(NamedTuple):
    """Padded operands, as the tiles in shared memory hold them, and what every tile shares."""

    q: torch.Tensor
    """``(b, hk, group, m_blocks * tile_m, d)``"""
    k: torch.Tensor
    """``(b, hk, 1, n_blocks * tile_n, d)``"""
    v: torch.Tensor
    """``(b, hk, 1, n_blocks * tile_n, dv)``"""
    ends: torch.Tensor
    """Per row, the number of keys it sees (0 or less: none)."""
    seqlen_q: int
    seqlen_k: int
    causal: bool
    scale_log2: float
    tile_m: int
    tile_n: int


def emulate_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    config: ForwardConfig,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The forward kernel's arithmetic: out, LSE as :func:`attention` gives them, and the number of tiles redone.

    Of ``config`` the tile sizes and the softmax policy count; the rest changes when things happen, not the result.
    """
    seqlen_q = q.shape[1]
    seqlen_k, heads_k = k.shape[1:3]
    tile_m, tile_n = config.tile_m, config.tile_n
    q_tiles = _grouped(_padded(q, tile_m), heads_k)
    batch, _, group, rows_padded, _ = q_tiles.shape
    rows = torch.arange(rows_padded, device=q.device)
    blocks = _Blocks(
        q=q_tiles,
        k=_grouped(_padded(k, tile_n), heads_k),
        v=_grouped(_padded(v, tile_n), heads_k),
        ends=(rows + 1 + seqlen_k - seqlen_q if causal else torch.full_like(rows, seqlen_k)).clamp_max(seqlen_k),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        causal=causal,
        scale_log2=float(torch.tensor(softmax_scale * LOG2_E, dtype=torch.float32)),
        tile_m=tile_m,
        tile_n=tile_n,
    )
    out = torch.empty(batch, heads_k, group, rows_padded, v.shape[3], device=q.device)
    lse = torch.empty(batch, heads_k, group, rows_padded, device=q.device)
    redone = 0
    for m_block in range(rows_padded // tile_m):
        at = slice(m_block * tile_m, (m_block + 1) * tile_m)
        tile = _run_tile(blocks, at, lazy=config.softmax == "lazy")
        if config.softmax == "lazy":
            failed = ~tile.is_safe(blocks.ends[at])
            redone += int(failed.sum())
            if failed.any():
                tile = _run_tile(blocks, at, lazy=False).where(failed, tile)
        tile = tile.marked(MAX_REFERENCE.get(q.dtype, math.inf))
        inverse = torch.where(tile.row_sum == 0, 0.0, 1.0 / tile.row_sum)
        out[..., at, :] = tile.acc_O * inverse
        lse[..., at] = ((tile.row_max + torch.log2(tile.row_sum)) * (1.0 / LOG2_E)).squeeze(-1)
    out = out[..., :seqlen_q, :].permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)
    return out, lse[..., :seqlen_q].flatten(1, 2), redone


def _run_tile(blocks: _Blocks, at: slice, lazy: bool) -> _Tile:
    """The query rows ``at``, one warpgroup after another: each visits its own range of key blocks."""
    from flashhopper.kernels.block_range import key_blocks  # here: CPU users of attention() need not load cutlass

    warpgroups = []
    for first_row in range(at.start, at.stop, ROWS_PER_WARPGROUP):
        visited = key_blocks(
            first_row,
            blocks.seqlen_q,
            max(blocks.seqlen_k, 1),
            num_rows=ROWS_PER_WARPGROUP,
            tile_n=blocks.tile_n,
            causal=blocks.causal,
        )
        rows = slice(first_row, first_row + ROWS_PER_WARPGROUP)
        warpgroups.append(_run_warpgroup(blocks, rows, visited.num_blocks, visited.num_unmasked if lazy else 0))
    return _Tile(*(torch.cat(parts, dim=-2) for parts in zip(*warpgroups, strict=True)))


def _run_warpgroup(blocks: _Blocks, at: slice, num_blocks: int, num_lazy: int) -> _Tile:
    """Key blocks from the last to the first: the ordinary online softmax, then the lazy one in the first blocks."""
    q = blocks.q[..., at, :].float()
    start = torch.zeros_like(q[..., :1])
    tile = _Tile(start + NO_KEY_YET, start, start.expand(*start.shape[:-1], blocks.v.shape[-1]))
    for n_block in reversed(range(num_blocks)):
        keys = slice(n_block * blocks.tile_n, (n_block + 1) * blocks.tile_n)
        acc_S = q @ blocks.k[..., keys, :].float().transpose(-1, -2)
        if n_block < num_lazy:
            tile = tile.moved()
            exponents = _fused_multiply_subtract(acc_S, blocks.scale_log2, tile.row_max)
        else:
            columns = torch.arange(keys.start, keys.stop, device=q.device)
            hidden = columns >= blocks.ends[at, None]
            block_max = (acc_S * blocks.scale_log2).masked_fill(hidden, -math.inf).amax(dim=-1, keepdim=True)
            tile = tile.rescaled(torch.maximum(tile.row_max, block_max))
            exponents = _fused_multiply_subtract(acc_S, blocks.scale_log2, tile.row_max).masked_fill(hidden, -math.inf)
        tile = tile.accumulated(exponents, blocks.v[..., keys, :])
    return tile


def _exp2(x: torch.Tensor) -> torch.Tensor:
    """2 ** x as ex2.approx.ftz: results below the normal numbers are 0."""
    result = torch.exp2(x)
    return result.masked_fill(result < torch.finfo(torch.float32).tiny, 0.0)


def _padded(x: torch.Tensor, tile: int) -> torch.Tensor:
    """x with its rows zero-filled to whole tiles, at least one, as TMA fills shared memory."""
    rows = max(-(-x.shape[1] // tile), 1) * tile
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rows - x.shape[1]))


def _grouped(x: torch.Tensor, heads_k: int) -> torch.Tensor:
    """``(b, s, h, d)`` as ``(b, hk, h // hk, s, d)``, a view."""
    batch, rows, heads, head_dim = x.shape
    return x.view(batch, rows, heads_k, heads // heads_k, head_dim).permute(0, 2, 3, 1, 4)


def _fused_multiply_subtract(x: torch.Tensor, scale: float, y: torch.Tensor) -> torch.Tensor:
    """``x * scale - y`` in fp32 with one rounding, as FFMA does: the product of two fp32 numbers is exact in fp64."""
    return (x.double() * scale - y.double()).float()
