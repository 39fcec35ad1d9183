"""What :mod:`flashhopper.integrations.transformers` makes of Transformers' masks: one number per key.

:func:`mask` is called once for each forward and kind of mask; it reads Transformers' description of the mask instead of
building a square of it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from flashhopper.problem import RaggedTensors

NAME = "flashhopper"
BEYOND = -1
"""In a mask: a place of a static cache that holds no key yet. 0 is padding, 1 and more the packed sequence."""
OTHER = 'use attn_implementation="sdpa" or "eager" for this model'
PACKED_WHEN_COMPILED = f"packed sequences in a compiled model: pass cu_seq_lens_q and its companions, or {OTHER}"


@dataclass
class Known:
    """What has been worked out about a mask that :func:`mask` made, so that the layers share it.

    Reading a mask makes the host wait for the GPU: once for each mask, not for each layer.
    """

    is_whole: bool
    """Every key counts, in one sequence."""
    lengths: dict[tuple[int, bool], RaggedTensors] = field(default_factory=dict)
    """By number of queries, and whether these are aligned with the last keys."""

    @classmethod
    def of(cls, places: torch.Tensor) -> Known | None:
        """None for a copy, another device's for example, and while a graph is recorded."""
        known: Known | None = None if torch.compiler.is_compiling() else getattr(places, _KNOWN, None)
        return known


_KNOWN = "known_to_flashhopper"


class _Pattern(NamedTuple):
    """What :func:`mask` reads out of Transformers' description of a mask."""

    is_causal: bool = True
    segments: torch.Tensor | None = None
    """Of packed rows, ``(batch, seqlen)``, from 0."""
    positions: torch.Tensor | None = None
    """Of packed rows, within their sequences."""
    chunk_size: int | None = None
    left_padding: torch.Tensor | None = None
    """``(batch,)``: places before the first chunk."""

    def both(self, other: _Pattern) -> _Pattern:
        given = {name: value for name, value in other._asdict().items() if value is not None}
        return self._replace(**given | {"is_causal": self.is_causal and other.is_causal})


class _Places(NamedTuple):
    """Where queries and keys stand, counted from the first token of the row."""

    q_offset: int | torch.Tensor
    q_length: int | None
    kv_offset: int | torch.Tensor
    kv_length: int


def mask(
    batch_size: int,
    q_length: int | torch.Tensor | None = None,
    kv_length: int = 0,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int | torch.Tensor = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    cache_position: torch.Tensor | None = None,
    config: Any = None,
    **others: Any,
) -> torch.Tensor | None:
    """The mask of one forward, as Transformers asks for it: None if every key counts.

    Causality and windows are the layers' own arguments; here they are only recognised.

    Args:
        batch_size: rows.
        q_length, q_offset: how many queries, and the place of the first; ``cache_position`` is 4.5x's name for both.
        kv_length, kv_offset: how many keys the layers will see, and the place of the first.
        mask_function: Transformers' description of the mask.
        attention_mask: ``(batch, places)``, true where a token is no padding, or None.
        config: the model's; its ``attention_chunk_size`` must be that of a mask of chunks, since layers look there.

    Returns:
        int32 ``(batch, kv_length)``: -1 where a static cache holds nothing yet, 0 for padding, else the number of the
        packed sequence from 1. None if that would be 1 everywhere. Where there are several chunks it is
        ``(batch, 1, 1, kv_length)``, and keys of chunks before the first query's count as padding.

    Raises:
        NotImplementedError: a mask that is not made of padding, causality, windows, chunks and packed sequences; chunks
            that do not begin with their sequence.
    """
    if torch.compiler.is_dynamo_compiling() and not _is_plain(mask_function):
        places: torch.Tensor | None = _past_the_graph(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            cache_position,
            config,
        )
        return places
    if isinstance(q_length, torch.Tensor):  # 5.0 and 4.5x: positions, by place or by name
        cache_position, q_length = q_length, None
    if cache_position is not None:
        q_length, q_offset = cache_position.shape[0], cache_position[0]
    if not torch.compiler.is_compiling():
        q_offset, kv_offset = int(q_offset), int(kv_offset)
    where = _Places(q_offset, q_length, kv_offset, kv_length)
    return _mask(batch_size, where, _read(mask_function), attention_mask, config)


_past_the_graph = torch.compiler.disable(
    mask, reason=f"{NAME} reads functions of masks, which a graph cannot; with fullgraph=True pass an attention_mask"
)


def _mask(
    batch_size: int, where: _Places, pattern: _Pattern, attention_mask: torch.Tensor | None, config: Any
) -> torch.Tensor | None:
    q_offset, q_length, kv_offset, kv_length = where
    compiling = torch.compiler.is_compiling()
    in_chunks = pattern.chunk_size is not None and kv_offset + kv_length > pattern.chunk_size
    if in_chunks:
        _check_chunks(pattern, where, config)
    if pattern.segments is not None and compiling:
        torch.ops.aten._assert_async.msg((pattern.segments == 0).all(), PACKED_WHEN_COMPILED)
    if compiling and attention_mask is None and not isinstance(q_offset, torch.Tensor) and not in_chunks:
        if q_length is None or kv_offset + kv_length == q_offset + q_length:
            return None
    device = next((x.device for x in (attention_mask, q_offset, pattern.segments) if isinstance(x, torch.Tensor)), None)
    place = torch.arange(kv_length, device=device) + kv_offset
    places = torch.ones(batch_size, kv_length, dtype=torch.int32, device=device)
    if attention_mask is not None and attention_mask.shape[1] == kv_length:
        places = attention_mask.bool().to(torch.int32)  # no cache slides, or this has been here: `generate` asks twice
    elif attention_mask is not None:
        padded = torch.nn.functional.pad(attention_mask.bool(), (0, kv_length)).to(torch.int32)
        places = padded[:, place.clamp_max(padded.shape[1] - 1)]
    elif pattern.segments is not None and not compiling:
        places = pattern.segments.to(torch.int32) + 1
    if pattern.is_causal and q_length is not None:
        places = places.masked_fill(place >= q_offset + q_length, BEYOND)
    if in_chunks:
        places = places.masked_fill(place < _first_chunk(pattern, q_offset, places.device), 0)[:, None, None]
    if compiling:
        return places
    known = Known(is_whole=bool((places == 1).all()))
    if known.is_whole and not in_chunks:
        return None
    setattr(places, _KNOWN, known)
    return places


def _first_chunk(pattern: _Pattern, q_offset: int | torch.Tensor, device: torch.device) -> torch.Tensor:
    """``(batch, 1)``, or ``(1, 1)`` for all: the place where the first query's chunk begins."""
    assert pattern.chunk_size is not None
    padding = pattern.left_padding
    start = torch.zeros(1, dtype=torch.int64, device=device) if padding is None else padding.to(device)
    return (start + (q_offset - start).div(pattern.chunk_size, rounding_mode="floor") * pattern.chunk_size)[:, None]


def _check_chunks(pattern: _Pattern, where: _Places, config: Any) -> None:
    """NotImplementedError where the layers would cut other chunks than the mask does."""
    size, of_config = pattern.chunk_size, getattr(config, "attention_chunk_size", None)
    if size is None or of_config != size:
        raise NotImplementedError(
            f"the mask is of chunks of {size} keys, the config's attention_chunk_size is {of_config}; {OTHER}"
        )
    if torch.compiler.is_compiling():
        return  # no segments then, and caches that slide begin where they should
    if where.kv_offset and where.q_offset - where.kv_offset < size - 1:
        raise NotImplementedError(f"a cache that begins within the first query's chunk is not there; {OTHER}")
    if pattern.segments is not None:
        is_first, positions = first_of_segments(pattern.segments), pattern.positions
        firsts = pattern.segments if positions is None else positions.expand_as(is_first)[is_first]
        if bool(firsts.any()):
            raise NotImplementedError(f"chunks that do not begin with their packed sequence are not there; {OTHER}")


def first_of_segments(segments: torch.Tensor) -> torch.Tensor:
    """Where a row, or a packed sequence in it, begins; bool, of the same shape ``(batch, seqlen)``."""
    is_first = torch.ones_like(segments, dtype=torch.bool)
    is_first[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return is_first


def _is_plain(function: Callable[..., Any] | None) -> bool:
    """A function that is known by itself: what others close over cannot be read while a graph is recorded."""
    from transformers import masking_utils

    bidirectional = getattr(masking_utils, "bidirectional_mask_function", None)  # from 5.0 on
    return function is None or function is masking_utils.causal_mask_function or function is bidirectional


def _read(function: Callable[..., Any] | None) -> _Pattern:
    """What a mask function of ``transformers.masking_utils`` is made of; NotImplementedError if it is anything else."""
    if function is None:
        return _Pattern()
    if _is_plain(function):
        return _Pattern(is_causal="bidirectional" not in function.__name__)
    name = getattr(function, "__qualname__", repr(function))
    if inspect.isfunction(function) and function.__module__ == "transformers.masking_utils":
        inner = inspect.getclosurevars(function).nonlocals
        match name.split(".")[0]:
            case "sliding_window_overlay":
                return _Pattern()
            case "sliding_window_bidirectional_overlay":
                return _Pattern(is_causal=False)
            case "chunked_overlay":
                return _Pattern(chunk_size=inner["chunk_size"], left_padding=inner["left_padding"])
            case "packed_sequence_mask_function":
                return _Pattern(segments=inner["packed_sequence_mask"])
            case "remap_positions_for_packed_sequence":
                return _read(inner["mask_function"])._replace(positions=inner["position_ids"])
            case "and_masks":
                return functools.reduce(_Pattern.both, map(_read, inner["mask_functions"]))
    raise NotImplementedError(f"the mask function {name} is more than {NAME} can express; {OTHER}")
