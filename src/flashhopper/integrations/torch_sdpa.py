"""FlashHopper as PyTorch's flash attention: ``scaled_dot_product_attention``, ``MultiheadAttention``, ``varlen_attn``.

Importing this module enters ``"FLASHHOPPER"`` into the registry of ``torch.nn.attention`` (torch 2.10 and later):

    import flashhopper.integrations.torch_sdpa
    torch.nn.attention.activate_flash_attention_impl("FLASHHOPPER")

From then on the aten operators that PyTorch calls when it chooses its flash backend run our kernels on CUDA tensors,
until ``restore_flash_attention_impl()``. :func:`activate` and :func:`restore` do the same on torch 2.9 too.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from flashhopper import torch_library
from flashhopper.device import hopper_multiprocessors
from flashhopper.options import AttentionOptions
from flashhopper.problem import RaggedTensors, SoftmaxTensors
from flashhopper.torch_library import Call

_registry: Any = None  # in torch 2.9
with contextlib.suppress(ImportError):
    from torch.nn.attention import _registry

NAME = "FLASHHOPPER"


class Handle:
    """The registered operators; PyTorch's own are back after :meth:`remove`."""

    def __init__(self, dispatch_key: str) -> None:
        self._library: Any = torch.library.Library("aten", "IMPL", dispatch_key)
        override = (
            {"allow_override": True} if "allow_override" in inspect.signature(self._library.impl).parameters else {}
        )
        for name, implementation in IMPLEMENTATIONS.items():
            if hasattr(torch.ops.aten, name):
                self._library.impl(name, implementation, dispatch_key, **override)

    def remove(self) -> None:
        """Give the operators back; a second time does nothing."""
        global _active
        if self._library is not None:
            self._library._destroy()
        self._library = None
        if _active is self:
            _active = None


_active: Handle | None = None
"""Ours, whoever activated it."""


def activate() -> None:
    """``torch.nn.attention.activate_flash_attention_impl("FLASHHOPPER")``, also on torch 2.9, which lacks it.

    Raises:
        RuntimeError: the current GPU is not Hopper, or there is none.
    """
    if _registry is None:
        _register()
    else:
        _registry.activate_flash_attention_impl(NAME)


def restore() -> None:
    """``restore_flash_attention_impl()``, also on torch 2.9 and 2.10, which lack it; nothing if ours is not active."""
    active = _active
    if active is None:
        return
    if hasattr(_registry, "restore_flash_attention_impl"):
        _registry.restore_flash_attention_impl()
    elif _registry is not None:  # torch 2.10 can activate only
        _registry._FLASH_ATTENTION_ACTIVE = None
    active.remove()


def _register() -> Handle:
    """What the registry calls to activate."""
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"{NAME} cannot be activated: torch sees no CUDA device, and its kernels need a Hopper GPU (H100, H200, "
            "H800, H20). On a CPU flashhopper.integrations.torch_sdpa.on_cpu() runs the reference in their place."
        )
    hopper_multiprocessors(torch.device("cuda", torch.cuda.current_device()))
    return _make_active("CUDA")


def _make_active(dispatch_key: str) -> Handle:
    global _active
    if _active is not None:
        _active.remove()
    _active = Handle(dispatch_key)
    return _active


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """The same for CPU tensors, through the reference: to test and to learn with, without a GPU.

    On CPU tensors ``scaled_dot_product_attention`` never calls the operators that this module implements; inside the
    context it does. Keyword arguments that they lack, ``attn_mask`` and ``dropout_p``, are errors there, and so is
    ``is_causal`` with other than as many keys as queries, which PyTorch aligns top left.
    """
    handle = Handle("CPU")
    functional: Any = torch.nn.functional
    original = functional.scaled_dot_product_attention

    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if attn_mask is not None:
            raise _unsupported("scaled_dot_product_attention", "attn_mask must be None")
        if is_causal and query.size(-2) != key.size(-2):  # PyTorch aligns that top left
            raise _unsupported("scaled_dot_product_attention", "is_causal needs as many keys as queries")
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out: torch.Tensor = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out

    functional.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original
        handle.remove()


def _unsupported(what: str, reason: str) -> RuntimeError:
    return RuntimeError(
        f"{NAME} {what} unsupported: {reason}; restore_flash_attention_impl() brings PyTorch's own back"
    )


def _options(
    is_causal: bool,
    scale: float | None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    num_splits: int | None = None,
) -> AttentionOptions:
    """FA3's options; what PyTorch keeps as global settings is read here."""
    window = tuple(-1 if side is None else int(side) for side in (window_size_left, window_size_right))
    return AttentionOptions(
        softmax_scale=scale,
        causal=is_causal,
        window_size=(window[0], window[1]),
        num_splits=num_splits or 1,  # None and 0 leave the choice to the implementation
        deterministic=torch.are_deterministic_algorithms_enabled(),
        sm_margin=torch._C._get_sm_carveout_experimental() or 0,
    )


def _ragged(
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    seqused_k: torch.Tensor | None = None,
) -> RaggedTensors | None:
    if cum_seq_q is None and cum_seq_k is None:
        if seqused_k is not None:
            raise _unsupported("forward", "seqused_k without cum_seq_q and cum_seq_k")
        return None
    if cum_seq_q is None or cum_seq_k is None:
        raise _unsupported("forward", "cum_seq_q and cum_seq_k must both be given, or neither")
    return RaggedTensors(int(max_q), int(max_k), cum_seq_q, cum_seq_k, None, seqused_k)


def _readable(x: torch.Tensor) -> torch.Tensor:
    """With a contiguous last dimension, as PyTorch's own implementation makes it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _with_strides_of(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """x laid out as ``empty_like(like)`` would be: compiled graphs count on it. A copy unless it is so already."""
    result = torch.empty_like(like)
    if x.shape != like.shape or x.stride() == result.stride():
        return x
    return result.copy_(x)


def _no_dropout(
    what: str, dropout_p: float, return_debug_mask: bool = False, others: dict[str, Any] | None = None
) -> None:
    if dropout_p != 0.0:
        raise _unsupported(what, f"dropout_p must be 0, got {dropout_p}")
    if return_debug_mask:
        raise _unsupported(what, "return_debug_mask must be False")
    for name, value in (others or {}).items():
        if value is not None:
            raise _unsupported(what, f"{name} must be None")


def _no_randomness(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seed and offset of no dropout, and no mask.

    In the shapes of PyTorch's fake kernels. DTensor has no sharding for the offset, and so takes only a scalar.
    """
    seed, offset = (torch.zeros(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ()))
    return seed, offset, query.new_empty(0)


def flash_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, ...]:
    """``aten::_flash_attention_forward``: ``(b, s, h, d)``, or ``(total, h, d)`` with ``cum_seq_q``, ``cum_seq_k``."""
    _no_dropout("forward", dropout_p, return_debug_mask, others)
    call = Call(
        _readable(query),
        _readable(key),
        _readable(value),
        SoftmaxTensors(alibi_slopes=alibi_slopes),
        _ragged(cum_seq_q, cum_seq_k, max_q, max_k, seqused_k),
        _options(is_causal, scale, window_size_left, window_size_right, num_splits),
    )
    out, lse = torch_library.forward(call)
    return _with_strides_of(out, query), lse, *_no_randomness(query)


def flash_attention_forward_into(
    out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *arguments: Any, **keywords: Any
) -> torch.Tensor:
    """``aten::_flash_attention_forward_no_dropout_inplace``: the result is copied into ``out``; LSE is returned."""
    result, lse, *_ = flash_attention_forward(query, key, value, *arguments, **keywords)
    out.copy_(result)
    return lse


def flash_attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor | None,
    unused: torch.Tensor | None,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``aten::_flash_attention_backward``, in the layouts of :func:`flash_attention_forward`."""
    _no_dropout("backward", dropout_p, others=others)
    call = Call(
        _readable(query),
        _readable(key),
        _readable(value),
        SoftmaxTensors(),
        _ragged(cum_seq_q, cum_seq_k, max_q, max_k),
        _options(is_causal, scale, window_size_left, window_size_right),
    )
    grad_out, out = _readable(grad_out), _readable(out)
    dq, dk, dv, _ = torch_library.backward(grad_out, None, out, logsumexp.contiguous(), call)
    return _with_strides_of(dq, query), _with_strides_of(dk, key), _with_strides_of(dv, value)


def sdpa_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    **others: Any,
) -> tuple[Any, ...]:
    """``aten::_scaled_dot_product_flash_attention``: ``(b, h, s, d)``; causal masks are aligned bottom right."""
    _no_dropout("forward", dropout_p, return_debug_mask, others)
    q, k, v = (_readable(x).transpose(1, 2) for x in (query, key, value))
    out, lse = torch_library.forward(Call(q, k, v, SoftmaxTensors(), None, _options(is_causal, scale)))
    out = _with_strides_of(out.transpose(1, 2), query)
    return out, lse, None, None, query.size(2), key.size(2), *_no_randomness(query)


def sdpa_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor | None,
    philox_offset: torch.Tensor | None,
    *,
    scale: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``aten::_scaled_dot_product_flash_attention_backward``: ``(b, h, s, d)``."""
    _no_dropout("backward", dropout_p, others=others)
    dout, q, k, v, o = (_readable(x).transpose(1, 2) for x in (grad_out, query, key, value, out))
    call = Call(q, k, v, SoftmaxTensors(), None, _options(is_causal, scale))
    dq, dk, dv, _ = torch_library.backward(dout, None, o, logsumexp.contiguous(), call)
    dq, dk, dv = (_with_strides_of(x.transpose(1, 2), y) for x, y in ((dq, query), (dk, key), (dv, value)))
    return dq, dk, dv


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": flash_attention_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_attention_forward_into,  # torch 2.12 and later
    "_flash_attention_backward": flash_attention_backward,
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
}

if _registry is not None:
    _registry.register_flash_attention_impl(NAME, register_fn=_register)
