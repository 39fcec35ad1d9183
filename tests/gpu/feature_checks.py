"""Calls with masks, softcap, sinks and ragged batches: forward and backward in one check, against fp32 by the numerics
contract. Reference and plain PyTorch run on the card, sequence by sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from backward_checks import FULL, MANY_KEYS, Incoming, fenced_allocations, hidden_pairs, plain_attention
from checks import BF16, Result, Tensors, scale_of
from ragged import Batch
from tolerance import assert_close_on_average, assert_close_to_reference, assert_lse_close, largest_error, tolerance

from flashhopper import flash_attn_func, flash_attn_varlen_func
from flashhopper.options import AttentionOptions
from flashhopper.reference import attention


class Call(NamedTuple):
    """What is asked for beside q, k and v."""

    options: AttentionOptions = FULL
    sink: torch.Tensor | None = None
    batch: Batch | None = None
    """Ragged; None is a dense call."""

    @property
    def masks(self) -> dict[str, Any]:
        """The arguments of ``visible_keys``."""
        return {name: getattr(self.options, name) for name in ("causal", "window_size", "attention_chunk")}


PLAIN = Call()


class Outcome(NamedTuple):
    """All that a call and its backward return; ``dsink`` is None without a sink."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsink: torch.Tensor | None = None


def ragged_inputs(batch: Batch, heads: int, heads_k: int, head_dim: int, dtype: torch.dtype = BF16) -> Tensors:
    """q, k and v of normal values, ``(total, heads, head_dim)``."""
    shapes = (batch.q.total, heads), (batch.k.total, heads_k), (batch.k.total, heads_k)
    q, k, v = (torch.randn(*shape, head_dim, device="cuda").to(dtype) for shape in shapes)
    return q, k, v


def incoming_of(tensors: Tensors, *, lse: bool = True) -> Incoming:
    """Normal gradients for out and, with ``lse``, for LSE."""
    q, _, v = tensors
    *rows, heads, _ = q.shape
    grad_out = torch.randn(*rows, heads, v.shape[-1], device="cuda").to(q.dtype)
    grad_lse = torch.randn(*rows[:-1], heads, rows[-1], device="cuda")
    return Incoming(grad_out, grad_lse if lse else None)


def attend(tensors: Tensors, call: Call) -> Result:
    """The public call as it is, without any checks."""
    options = call.options._asdict() | {"learnable_sink": call.sink, "return_lse": True}
    if call.batch is None:
        dense: Result = flash_attn_func(*tensors, **options)
        return dense
    ragged: Result = flash_attn_varlen_func(*tensors, **call.batch.arguments("cuda"), **options)
    return ragged


def take(tensors: Tensors, call: Call, incoming: Incoming) -> Outcome:
    """Forward and backward through the public function and autograd, without any checks."""
    q, k, v = (x.detach().requires_grad_() for x in tensors)
    sink = None if call.sink is None else call.sink.detach().requires_grad_()
    result = attend((q, k, v), call._replace(sink=sink))
    return Outcome(*result, *pull(result, (q, k, v), sink, incoming))


def pull(result: Result, tensors: Tensors, sink: torch.Tensor | None, incoming: Incoming) -> tuple[torch.Tensor, ...]:
    """Gradients of a result that autograd has recorded."""
    inputs = [*tensors] if sink is None else [*tensors, sink]
    pairs = [(x, grad) for x, grad in zip(result, incoming, strict=True) if grad is not None]
    outputs, grads = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, inputs, grads)


def run(tensors: Tensors, call: Call, incoming: Incoming) -> Outcome:
    """As :func:`take`, with every allocation poisoned; of a dense call all results must be among them."""
    with fenced_allocations() as addresses:
        outcome = take(tensors, call, incoming)
    if call.batch is None and tensors[0].numel() and tensors[1].numel():
        for name, x in outcome._asdict().items():
            if name != "dsink":
                where = x.untyped_storage().data_ptr()
                assert where in addresses, f"{name} was taken from elsewhere than torch.empty…: it was not poisoned"
    return outcome


def check(tensors: Tensors, call: Call = PLAIN, incoming: Incoming | None = None) -> Outcome:
    """Run, and compare. ``incoming``: by default normal values for out and LSE."""
    incoming = incoming or incoming_of(tensors)
    outcome = run(tensors, call, incoming)
    compare(tensors, call, incoming, outcome)
    return outcome


def compare(tensors: Tensors, call: Call, incoming: Incoming, outcome: Outcome) -> None:
    """An outcome against fp32; what sees nothing, or is seen by nothing, is exactly 0."""
    q, k, v = tensors
    print(f"q {tuple(q.shape)} k {tuple(k.shape)} v {tuple(v.shape)} {q.dtype} {call.options} {call.batch}")
    ref = expected(attention, tensors, call, incoming, torch.float32)
    low = expected(plain_attention, tensors, call, incoming, q.dtype)
    hidden = [hidden_pairs(*lengths, q.device, **call.masks) for lengths in lengths_of(tensors, call)]
    visible = sum(int((~pairs).sum()) for pairs in hidden)
    few_keys = visible < MANY_KEYS * sum(len(pairs) for pairs in hidden)
    factor = 3 if call.options.softcap else 2
    assert outcome.out.dtype == q.dtype
    assert_lse_close(outcome.lse, ref.lse)
    for name, x, r, t in zip(Outcome._fields, outcome, ref, low, strict=True):
        if x is None or name == "lse":
            continue
        assert x.device == q.device, (name, x.device)
        print(f"{name}: largest error {largest_error(x, r):.3e}, allowed {tolerance(r, t, factor):.3e}")
        assert_close_to_reference(x, r, t, factor)
        if name in ("dq", "dk", "dv"):
            assert x.dtype == q.dtype, (name, x.dtype)
            assert_close_on_average(x, r, t, factor=factor if few_keys else factor - 1)
    blind, unseen = idle_rows(tensors, call, hidden)
    for name, rows in (("out", blind), ("dq", blind), ("dk", unseen), ("dv", unseen)):
        x = getattr(outcome, name)
        assert x.flatten(0, -3)[rows].count_nonzero() == 0, f"{name} of rows that have no part is not 0"


def lengths_of(tensors: Tensors, call: Call) -> list[tuple[int, int]]:
    """Of the sequences with rows on either side; all of a dense batch have the same."""
    if call.batch is None:
        return [(tensors[0].shape[1], tensors[1].shape[1])]
    return list(zip(call.batch.q.counted, call.batch.k.counted, strict=True))


def idle_rows(tensors: Tensors, call: Call, hidden: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows of q see no key and which of k no query sees, ``(rows,)`` as they lie in memory."""
    blind = [pairs.all(dim=1) for pairs in hidden]
    unseen = [pairs.all(dim=0) for pairs in hidden]
    if call.batch is None:
        return blind[0].repeat(tensors[0].shape[0]), unseen[0].repeat(tensors[1].shape[0])
    all_rows = []
    for side, parts in ((call.batch.q, blind), (call.batch.k, unseen)):
        rows = side.unused.to(tensors[0].device)
        for at, part in zip(side.slices, parts, strict=True):
            rows[at] = part
        all_rows.append(rows)
    return all_rows[0], all_rows[1]


def expected(
    function: Callable[..., Result], tensors: Tensors, call: Call, incoming: Incoming, dtype: torch.dtype
) -> Outcome:
    """``function``'s out, LSE and their gradients, computed in ``dtype``, one sequence after another."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in tensors)
    sink = None if call.sink is None else call.sink.detach().to(dtype).requires_grad_()
    arguments = call.masks | {
        "softmax_scale": scale_of(q, call.options.softmax_scale),
        "softcap": call.options.softcap,
        "learnable_sink": sink,
    }
    if call.batch is None:
        out, lse = function(q, k, v, **arguments)
    else:
        out, lse = in_sequences(function, (q, k, v), call.batch, arguments)
    given = [
        torch.zeros_like(x) if grad is None else grad.to(x.dtype) for x, grad in zip((out, lse), incoming, strict=True)
    ]
    inputs = [x for x in (q, k, v, sink) if x is not None]
    if not out.requires_grad:  # no sequence at all
        return Outcome(out, lse, *(torch.zeros_like(x) for x in inputs))
    gradients = torch.autograd.grad((out, lse), inputs, given, allow_unused=True, materialize_grads=True)
    return Outcome(out.detach(), lse.detach(), *gradients)


def in_sequences(function: Callable[..., Result], tensors: Tensors, batch: Batch, arguments: dict[str, Any]) -> Result:
    """``function`` of each sequence alone; 0 and -inf in the rows between."""
    q, k, v = tensors
    outs, lses = [], []
    ends = [at.start for at in batch.q.slices[1:]] + [batch.q.total]
    for q_rows, k_rows, end in zip(batch.q.slices, batch.k.slices, ends, strict=False):
        out, lse = function(q[None, q_rows], k[None, k_rows], v[None, k_rows], **arguments)
        rest = end - q_rows.stop
        outs += [out[0], out.new_zeros(rest, *out.shape[2:])]
        lses += [lse[0], lse.new_full((lse.shape[1], rest), -math.inf)]
    if not outs:
        return q.new_zeros(*q.shape[:2], v.shape[2]), q.new_full((q.shape[1], q.shape[0]), -math.inf).float()
    return torch.cat(outs), torch.cat(lses, dim=1)


def count_differing(outcome: Outcome, wanted: Outcome) -> torch.Tensor:
    """How many elements of each result differ in any bit, without a host synchronisation."""
    counts = []
    for x, y in zip(outcome, wanted, strict=True):
        if x is not None and y is not None:
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            bits = torch.int16 if x.element_size() == 2 else torch.int32
            counts.append((x.contiguous().view(bits) != y.contiguous().view(bits)).sum())
    return torch.stack(counts)


def assert_same(outcome: Outcome, wanted: Outcome) -> None:
    """Bitwise equal; the same NaN counts as equal."""
    assert sum(count_differing(outcome, wanted).tolist()) == 0
