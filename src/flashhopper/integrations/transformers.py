"""FlashHopper in Hugging Face Transformers: ``attn_implementation="flashhopper"``, from 4.57 on.

    from flashhopper.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="flashhopper")

Two functions are registered. :func:`mask` is called once for each forward and kind of mask; it turns Transformers'
description of a mask into one number per key. :func:`attention` is called by each layer; rows with padding become
sequences of a ragged batch, so that nothing is computed for padding.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flashhopper.api import flash_attn_func, flash_attn_varlen_func
from flashhopper.problem import RaggedTensors

NAME = "flashhopper"
BEYOND = -1
"""In a mask: a place of a static cache that holds no key yet. 0 is padding, 1 and more the packed sequence."""
OTHER = 'use attn_implementation="sdpa" or "eager" for this model'


def register() -> None:
    """Make ``attn_implementation="flashhopper"`` known to Transformers; a second time changes nothing.

    Raises:
        ImportError: Transformers is not installed, or is older than 4.57.
    """
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as error:
        raise ImportError(
            f"flashhopper.integrations.transformers needs transformers 4.57 or later with its interfaces for attention"
            f" and masks ({error}); pip install -U transformers"
        ) from error
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)
    _keep_from_being_loaded()


def _keep_from_being_loaded() -> None:
    """From 5.0 on Transformers takes every name with "flash" in it for a package or a kernel of its hub.

    When a model is made it would load that, or put another in its place. Where it asks by name, ours is none.
    """
    modeling_utils: Any = importlib.import_module("transformers.modeling_utils")
    original = getattr(modeling_utils, "is_flash_attention_requested", None)
    if original is None or getattr(original, "knows_flashhopper", False):
        return

    @functools.wraps(original)
    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, *arguments: Any, **keywords: Any
    ) -> bool:
        if requested_attention_implementation == NAME:
            return False
        return bool(original(config, requested_attention_implementation, *arguments, **keywords))

    is_flash_attention_requested.knows_flashhopper = True  # type: ignore[attr-defined]
    modeling_utils.is_flash_attention_requested = is_flash_attention_requested


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """One layer's attention, as Transformers calls it.

    Args:
        module: the layer; its ``is_causal`` counts where the argument is None.
        query: ``(batch, heads, seqlen_q, head_dim)``.
        key, value: ``(batch, heads_k, seqlen_k, head_dim)``.
        attention_mask: None, what :func:`mask` returns, or a padding mask ``(batch, seqlen_k)``.
        dropout: 0.
        scaling: the factor on q·k; None is ``head_dim ** -0.5``.
        sliding_window: keys that a query sees, itself included (to both sides, where not causal).
        softcap, s_aux: softcap and learnable sink of :func:`flash_attn_func`.
        others: read are ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k``, of packed
            sequences.

    Returns:
        out ``(batch, seqlen_q, heads, head_dim_v)``; None for the weights, which are never stored.

    Raises:
        NotImplementedError: dropout, a mask or a bias that is not padding, weights asked for.
        Otherwise as :func:`flash_attn_func`.
    """
    _refuse(dropout, attention_mask, others)
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    window = (-1, -1)
    if sliding_window is not None:
        window = (sliding_window - 1, 0 if causal else sliding_window - 1)
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "causal": causal,
        "window_size": window,
        "softcap": softcap or 0.0,
        "learnable_sink": s_aux,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    q, k, v = (_autocast(x).transpose(1, 2) for x in (query, key, value))
    if attention_mask is not None:
        return _attend_padded(q, k, v, attention_mask, options), None
    if others.get("cu_seq_lens_q") is not None:
        return _attend_packed(q, k, v, others, options), None
    out: torch.Tensor = flash_attn_func(q, k, v, **options)
    return out, None


def _refuse(dropout: float, attention_mask: torch.Tensor | None, others: dict[str, Any]) -> None:
    if dropout:
        raise NotImplementedError(f"attention dropout is {dropout}, which {NAME} lacks; set attention_dropout to 0")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise NotImplementedError(
            f"{NAME} takes padding masks (batch, seqlen_k), got a mask of shape {tuple(attention_mask.shape)}; {OTHER}"
        )
    if others.get("output_attentions"):
        raise NotImplementedError(f"{NAME} never stores attention weights; output_attentions needs eager attention")
    for name in ("position_bias", "attention_bias"):
        if others.get(name) is not None:
            raise NotImplementedError(f"{name} is not there; {OTHER}")


def _autocast(x: torch.Tensor) -> torch.Tensor:
    """In autocast's dtype where autocast is on, as PyTorch's own attention has it: some norms return fp32."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def _ragged(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], lengths: RaggedTensors, options: dict[str, Any]
) -> torch.Tensor:
    """``(batch, seqlen, heads, head_dim)`` with all rows as one: what ``lengths`` makes of it, in the same shape."""
    q, k, v = (x.flatten(0, 1) for x in tensors)
    out: torch.Tensor = flash_attn_varlen_func(q, k, v, **lengths._asdict(), **options)
    return out.view(*tensors[0].shape[:2], *out.shape[1:])


def _attend_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: dict[str, Any], options: dict[str, Any]
) -> torch.Tensor:
    """Several sequences in one row, with their lengths given."""
    given = RaggedTensors(
        int(lengths["max_length_q"]),
        int(lengths["max_length_k"]),
        lengths["cu_seq_lens_q"].to(torch.int32),
        lengths["cu_seq_lens_k"].to(torch.int32),
    )
    return _ragged((q, k, v), given, options)


def _attend_padded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, places: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """Rows of which parts count: each row is a sequence that is not used, for the padding, and one that is."""
    batch, seqlen_q = q.shape[:2]
    seqlen_k = places.shape[1]
    if seqlen_k > k.shape[1] or places.shape[0] != batch:
        raise ValueError(f"the mask has shape {tuple(places.shape)}; there are {batch} rows with {k.shape[1]} keys")
    k, v = k[:, :seqlen_k], v[:, :seqlen_k]
    places = places.to(torch.int32)
    if not torch.compiler.is_compiling() and int(places.max()) > 1:
        return _attend_segments(q, k, v, places, options)
    keys = _Range.of(places > 0)
    queries = _Range(torch.zeros_like(keys.start), torch.full_like(keys.start, seqlen_q))
    if options["causal"] or options["window_size"] != (-1, -1):
        first_query = (places != BEYOND).sum(dim=1) - seqlen_q  # the key at which query 0 stands
        queries = _Range(*((x - first_query).clamp(0, seqlen_q) for x in keys))
    cu_seqlens = queries.cu_seqlens(seqlen_q), keys.cu_seqlens(seqlen_k)
    lengths = RaggedTensors(seqlen_q, seqlen_k, *cu_seqlens, queries.seqused(), keys.seqused())
    return _ragged((q, k, v), lengths, options)


class _Range(NamedTuple):
    """The part of each row that counts: ``start ≤ place < end``, int64 ``(batch,)``."""

    start: torch.Tensor
    end: torch.Tensor

    @classmethod
    def of(cls, counts: torch.Tensor) -> _Range:
        """Of a mask ``(batch, seqlen)``; NotImplementedError if what counts has a hole in it."""
        number = counts.sum(dim=1)
        start = counts.to(torch.int32).argmax(dim=1)
        last = counts.shape[1] - 1 - counts.flip(1).to(torch.int32).argmax(dim=1)
        unbroken = ((last - start + 1 == number) | (number == 0)).all()
        message = f"a padding mask has a hole between keys of a row, which {NAME} lacks; {OTHER}"
        if torch.compiler.is_compiling():
            torch.ops.aten._assert_async.msg(unbroken, message)
        elif not unbroken:
            raise NotImplementedError(message)
        return cls(start, start + number)

    def cu_seqlens(self, seqlen: int) -> torch.Tensor:
        """Row by row what comes before the part, and the part with the rest of the row."""
        rows = torch.arange(len(self.start), device=self.start.device) * seqlen
        borders = torch.stack([rows, rows + self.start], dim=1).flatten()
        return torch.nn.functional.pad(borders, (0, 1), value=len(self.start) * seqlen).to(torch.int32)

    def seqused(self) -> torch.Tensor:
        """Nothing of what comes before, and the part."""
        return torch.stack([torch.zeros_like(self.start), self.end - self.start], dim=1).flatten().to(torch.int32)


def _attend_segments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """Rows packed with whole sequences ``segments (batch, seqlen)``, without a cache."""
    batch, seqlen = segments.shape
    if q.shape[1] != seqlen:
        raise NotImplementedError(f"packed sequences with a cache are not there; {OTHER}")
    is_first = torch.ones_like(segments, dtype=torch.bool)
    is_first[:, 1:] = segments[:, 1:] != segments[:, :-1]
    cu_seqlens = torch.nn.functional.pad(is_first.flatten().nonzero().flatten(), (0, 1), value=batch * seqlen)
    longest = int(cu_seqlens.diff().max())
    cu_seqlens = cu_seqlens.to(torch.int32)
    return _ragged((q, k, v), RaggedTensors(longest, longest, cu_seqlens, cu_seqlens), options)


class _Pattern(NamedTuple):
    """What :func:`mask` reads out of Transformers' description of a mask."""

    segments: torch.Tensor | None = None
    """Of packed rows, ``(batch, seqlen)``, from 0."""
    chunk_size: int | None = None


def mask(
    batch_size: int,
    q_length: int | torch.Tensor | None = None,
    kv_length: int = 0,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int | torch.Tensor = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    cache_position: torch.Tensor | None = None,
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

    Returns:
        int32 ``(batch, kv_length)``: -1 where a static cache holds nothing yet, 0 for padding, else the number of the
        packed sequence from 1. None if that would be 1 everywhere.

    Raises:
        NotImplementedError: a mask that is not made of padding, causality, windows and packed sequences.
    """
    if isinstance(q_length, torch.Tensor):  # 5.0 and 4.5x: positions, by place or by name
        cache_position, q_length = q_length, None
    if cache_position is not None:
        q_length, q_offset = cache_position.shape[0], cache_position[0]
    pattern = _Pattern() if mask_function is None else _read(mask_function)
    if pattern.chunk_size is not None and kv_length > pattern.chunk_size:
        raise NotImplementedError(f"chunked attention of {pattern.chunk_size} keys is not there; {OTHER}")
    compiling = torch.compiler.is_compiling()
    if pattern.segments is not None and compiling:
        message = f"packed sequences in a compiled model: pass cu_seq_lens_q and its companions, or {OTHER}"
        torch.ops.aten._assert_async.msg((pattern.segments == 0).all(), message)
    if not compiling:
        q_offset, kv_offset = int(q_offset), int(kv_offset)
    elif attention_mask is None and not isinstance(q_offset, torch.Tensor):
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
    is_causal = mask_function is None or "bidirectional" not in _names(mask_function)
    if is_causal and q_length is not None:
        places = places.masked_fill(place >= q_offset + q_length, BEYOND)
    if not compiling and bool((places == 1).all()):
        return None
    return places


def _names(function: Callable[..., Any]) -> str:
    """The names of the functions that a description is made of."""
    inner = [x for x in _closure(function).values() if callable(x) or isinstance(x, tuple)]
    parts = [y for x in inner for y in (x if isinstance(x, tuple) else (x,)) if inspect.isfunction(y)]
    return " ".join([function.__qualname__, *map(_names, parts)])


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    return dict(inspect.getclosurevars(function).nonlocals) if inspect.isfunction(function) else {}


def _read(function: Callable[..., Any]) -> _Pattern:
    """What a mask function of ``transformers.masking_utils`` is made of; NotImplementedError if it is anything else."""
    name, inner = getattr(function, "__qualname__", repr(function)), _closure(function)
    if getattr(function, "__module__", None) == "transformers.masking_utils":
        match name.split(".")[0]:
            case "causal_mask_function" | "bidirectional_mask_function":
                return _Pattern()
            case "sliding_window_overlay" | "sliding_window_bidirectional_overlay":
                return _Pattern()
            case "chunked_overlay" | "_legacy_chunked_overlay":
                return _Pattern(chunk_size=inner["chunk_size"])
            case "packed_sequence_mask_function":
                return _Pattern(segments=inner["packed_sequence_mask"])
            case "remap_positions_for_packed_sequence":
                return _read(inner["mask_function"])
            case "and_masks":
                parts = [_read(part) for part in inner["mask_functions"]]
                segments = next((part.segments for part in parts if part.segments is not None), None)
                chunks = next((part.chunk_size for part in parts if part.chunk_size is not None), None)
                return _Pattern(segments, chunks)
    raise NotImplementedError(f"the mask function {name} is more than {NAME} can express; {OTHER}")
