"""FlashHopper in Hugging Face Transformers: ``attn_implementation="flashhopper"``, from 4.57 on.

    from flashhopper.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="flashhopper")

Two functions are registered. :func:`~flashhopper.integrations.transformers_mask.mask` is called once for each forward
and kind of mask; it turns Transformers' description of a mask into one number per key. :func:`attention` is called by
each layer; rows with padding become sequences of a ragged batch, so that no key of padding is read and, in causal
layers, nothing is computed for its queries.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flashhopper.api import flash_attn_func, flash_attn_varlen_func
from flashhopper.integrations.transformers_mask import (
    BEYOND,
    NAME,
    OTHER,
    PACKED_WHEN_COMPILED,
    Known,
    first_of_segments,
    mask,
)
from flashhopper.problem import RaggedTensors


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

    When a model is made it would load that, or put another in its place, and masks of chunks it would refuse. Where it
    asks, ours is none.
    """
    for name in ("modeling_utils", "masking_utils"):
        module: Any = importlib.import_module(f"transformers.{name}")
        original = getattr(module, "is_flash_attention_requested", None)
        if original is not None and not getattr(original, "knows_flashhopper", False):
            module.is_flash_attention_requested = _except_ours(original)


def _except_ours(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, *arguments: Any, **keywords: Any
    ) -> bool:
        if NAME in (requested_attention_implementation, getattr(config, "_attn_implementation", None)):
            return False
        return original(config, requested_attention_implementation, *arguments, **keywords)

    is_flash_attention_requested.knows_flashhopper = True  # type: ignore[attr-defined]
    return is_flash_attention_requested


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
        attention_mask: None, what ``mask`` returns, or a padding mask ``(batch, seqlen_k)``.
        dropout: 0.
        scaling: the factor on q·k; None is ``head_dim ** -0.5``.
        sliding_window: keys that a query sees, itself included (to both sides, where not causal).
        softcap, s_aux: softcap and learnable sink of :func:`flash_attn_func`.
        others: read are ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k``, of packed
            sequences.

    Returns:
        out ``(batch, seqlen_q, heads, head_dim_v)``; None for the weights, which are never stored.

    Raises:
        NotImplementedError: dropout, a mask or a bias that is not padding or chunks, weights asked for.
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
        "attention_chunk": _chunk(module, attention_mask, others),
        "softcap": softcap or 0.0,
        "learnable_sink": s_aux,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    q, k, v = (_autocast(x).transpose(1, 2) for x in (query, key, value))
    known = None if attention_mask is None else Known.of(attention_mask)
    if attention_mask is not None and not (known is not None and known.is_whole):
        return _attend_padded(q, k, v, attention_mask, options), None
    if others.get("cu_seq_lens_q") is not None:
        return _attend_packed(q, k, v, others, options), None
    out: torch.Tensor = flash_attn_func(q, k, v, **options)
    return out, None


def _refuse(dropout: float, attention_mask: torch.Tensor | None, others: dict[str, Any]) -> None:
    if dropout:
        raise NotImplementedError(f"attention dropout is {dropout}, which {NAME} lacks; set attention_dropout to 0")
    if attention_mask is not None and attention_mask.dim() != 2 and not _has_chunks(attention_mask):
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


def _has_chunks(attention_mask: torch.Tensor) -> bool:
    """Whether ``mask`` made it for several chunks; masks that others prepare have heads or queries, or are no int32."""
    shape = attention_mask.shape
    return len(shape) == 4 and shape[1] == 1 and shape[2] == 1 and attention_mask.dtype == torch.int32


def _chunk(module: torch.nn.Module, attention_mask: torch.Tensor | None, others: dict[str, Any]) -> int:
    """``attention_chunk`` of a layer, 0 where all keys lie in one chunk."""
    if attention_mask is None or attention_mask.dim() == 2:
        return 0
    size = getattr(getattr(module, "config", None), "attention_chunk_size", None)
    if size is None:
        raise NotImplementedError(f"a mask of chunks, and no attention_chunk_size in the config of the layer; {OTHER}")
    if others.get("cu_seq_lens_q") is not None and torch.compiler.is_compiling():
        raise NotImplementedError(f"chunks of packed sequences in a compiled model are not there; {OTHER}")
    return int(size)


def _attend_padded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention_mask: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """Rows of which parts count: each becomes one or several sequences of a ragged batch."""
    batch, seqlen_k = q.shape[0], attention_mask.shape[-1]
    if seqlen_k > k.shape[1] or attention_mask.shape[0] != batch:
        raise ValueError(
            f"the mask has shape {tuple(attention_mask.shape)}; there are {batch} rows with {k.shape[1]} keys"
        )
    is_aligned = options["causal"] or options["window_size"] != (-1, -1)
    places, key, known = attention_mask.view(batch, seqlen_k), (q.shape[1], is_aligned), Known.of(attention_mask)
    if known is None:
        lengths = _lengths(places.to(torch.int32), *key)
    else:
        lengths = known.lengths[key] = known.lengths.get(key) or _lengths(places, *key)
    return _ragged((q, k[:, :seqlen_k], v[:, :seqlen_k]), lengths, options)


def _lengths(places: torch.Tensor, seqlen_q: int, is_aligned: bool) -> RaggedTensors:
    """Each row is a sequence that is not used, for the padding, and one that is; packed rows are all their sequences.

    Args:
        places: what ``mask`` returns, int32 ``(batch, seqlen_k)``.
        is_aligned: the last query stands at the last key; else every query sees every key.
    """
    if torch.compiler.is_compiling():
        torch.ops.aten._assert_async.msg((places <= 1).all(), PACKED_WHEN_COMPILED)
    elif int(places.max()) > 1:
        return _lengths_of_segments(places, seqlen_q)
    seqlen_k = places.shape[1]
    keys = _Range.of(places > 0)
    queries = _Range(torch.zeros_like(keys.start), torch.full_like(keys.start, seqlen_q))
    if is_aligned:
        first_query = (places != BEYOND).sum(dim=1) - seqlen_q  # the key at which query 0 stands
        queries = _Range(*((x - first_query).clamp(0, seqlen_q) for x in keys))
    cu_seqlens = queries.cu_seqlens(seqlen_q), keys.cu_seqlens(seqlen_k)
    return RaggedTensors(seqlen_q, seqlen_k, *cu_seqlens, queries.seqused(), keys.seqused())


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
        rows = torch.arange(len(self.start) + 1, device=self.start.device) * seqlen
        borders = torch.stack([rows[:-1], rows[:-1] + self.start], dim=1).flatten()
        return torch.cat([borders, rows[-1:]]).to(torch.int32)  # `pad` would make its value a constant of a graph

    def seqused(self) -> torch.Tensor:
        """Nothing of what comes before, and the part."""
        return torch.stack([torch.zeros_like(self.start), self.end - self.start], dim=1).flatten().to(torch.int32)


def _lengths_of_segments(segments: torch.Tensor, seqlen_q: int) -> RaggedTensors:
    """Of rows packed with whole sequences ``segments (batch, seqlen)``, without a cache."""
    batch, seqlen = segments.shape
    if seqlen_q != seqlen:
        raise NotImplementedError(f"packed sequences with a cache are not there; {OTHER}")
    firsts = first_of_segments(segments).flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(firsts, (0, 1), value=batch * seqlen)
    longest = int(cu_seqlens.diff().max())
    cu_seqlens = cu_seqlens.to(torch.int32)
    return RaggedTensors(longest, longest, cu_seqlens, cu_seqlens)
