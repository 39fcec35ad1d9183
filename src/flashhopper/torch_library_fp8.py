"""FP8's operators ``torch.ops.flashhopper.fp8_…``: what graphs record in place of its calls.

A call is taken apart into tensors and numbers; run, an operator does what the eager call does: :mod:`flashhopper.fp8`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashhopper import fp8, fp8_tensor, torch_library
from flashhopper.config import ScaleKind
from flashhopper.fp8 import Accumulate, Descales
from flashhopper.fp8_tensor import Fp8Recipe, Fp8Tensor, Lengths, Role
from flashhopper.options import AttentionOptions, check_options
from flashhopper.problem import AttentionProblem, RaggedFacts, RaggedTensors, SoftmaxTensors
from flashhopper.reference_fp8 import VALUE_KEYS, WHOLE_SEQUENCE
from flashhopper.reference_fp8_varlen import Sequences, num_blocks
from flashhopper.torch_library import OPTIONS_SCHEMA, RAGGED_SCHEMA, SOFTMAX_SCHEMA, TAGS, Call

_RECIPE = "str scales, bool hadamard, bool center_v, int seed, ScalarType dtype"
_REST = f"{SOFTMAX_SCHEMA}, {RAGGED_SCHEMA}, {OPTIONS_SCHEMA}, str accumulate"
_QUANTISED = (
    "Tensor {0}, Tensor {0}_scale, ScalarType {0}_dtype, int {0}_rows, int? {0}_seed, "
    "Tensor {1}, Tensor {1}_scale, ScalarType {1}_dtype, int {1}_rows, int? {1}_seed, "
    "Tensor {2}, Tensor {2}_scale, Tensor? {2}_mean, ScalarType {2}_dtype, SymInt {2}_seqlen"
).format("q", "k", "v")

_library = torch.library.Library("flashhopper", "FRAGMENT")
for _schema in (
    "fp8_quantize_rows(Tensor x, int rows, str scales, int? hadamard_seed, ScalarType dtype, str side, "
    "Tensor? cu_seqlens, Tensor? seqused) -> (Tensor data, Tensor scale)",
    "fp8_quantize_values(Tensor v, str scales, bool center, ScalarType dtype, Tensor? cu_seqlens, Tensor? seqused) -> "
    "(Tensor data, Tensor scale, Tensor mean)",
    f"fp8_quantised_attention({_QUANTISED}, {_REST}) -> (Tensor out, Tensor lse)",
    "fp8_raw_attention(Tensor q, Tensor k, Tensor v, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    f"{_REST}) -> (Tensor out, Tensor lse)",
    f"fp8_attention(Tensor q, Tensor k, Tensor v, {_RECIPE}, {_REST}) -> (Tensor out, Tensor lse)",
):
    _library.define(_schema, tags=TAGS)

Result = tuple[torch.Tensor, torch.Tensor]


def quantize_rows(
    x: torch.Tensor,
    rows: int,
    kind: ScaleKind,
    hadamard_seed: int | None,
    sequences: Sequences | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`flashhopper.reference_fp8_varlen.quantize_rows` as an operator."""
    lengths = ("q", None, None) if sequences is None else sequences
    data, scale = torch.ops.flashhopper.fp8_quantize_rows(x, rows, kind, hadamard_seed, dtype, *lengths)
    return data, scale


def quantize_values(
    v: torch.Tensor, kind: ScaleKind, center: bool, sequences: Sequences | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`flashhopper.reference_fp8_varlen.quantize_values` as an operator."""
    lengths = (None, None) if sequences is None else (sequences.cu_seqlens, sequences.seqused)
    data, scale, mean = torch.ops.flashhopper.fp8_quantize_values(v, kind, center, dtype, *lengths)
    return data, scale, mean


class Attention(NamedTuple):
    """One call of attention on FP8, of which the operators' arguments are made and made again."""

    q: Any
    k: Any
    v: Any
    softmax_tensors: SoftmaxTensors
    ragged: RaggedTensors | None
    options: AttentionOptions
    accumulate: Accumulate
    descales: Descales = Descales()

    def run(self) -> Result:
        """Eagerly."""
        q, k, v, softmax_tensors, ragged, options, accumulate, descales = self
        out, lse = fp8.attention(q, k, v, options, descales, accumulate, softmax_tensors, ragged)
        return out.contiguous(), lse.contiguous()

    def fake(self) -> Result:
        _, _, _, softmax_tensors, ragged, options, _, descales = self
        problem = fp8.checked_inputs(self[:3], options, descales, softmax_tensors, ragged).problem
        like = self.q.data if isinstance(self.q, Fp8Tensor) else self.q
        lse = like.new_empty(problem.lse_shape, dtype=torch.float32)
        return like.new_empty(problem.out_shape, dtype=problem.dtype), lse


def _rest(arguments: tuple[Any, ...]) -> tuple[SoftmaxTensors, RaggedTensors | None, AttentionOptions, Any]:
    """From an operator's last arguments, those of ``_REST``."""
    call = Call.of((None, None, None, *arguments[:-1]))
    return call.softmax_tensors, call.ragged, call.options, arguments[-1]


def _flat_rest(
    softmax_tensors: SoftmaxTensors, ragged: RaggedTensors | None, options: AttentionOptions, accumulate: Accumulate
) -> tuple[Any, ...]:
    lengths: tuple[Any, ...] = (None,) * len(RaggedTensors._fields) if ragged is None else ragged
    return *softmax_tensors, *lengths, *options, accumulate


def _check_types(
    tensors: dict[str, Any], options: AttentionOptions, accumulate: Accumulate, ragged: RaggedTensors | None
) -> None:
    """TypeError for what the operator's schema would turn into something else, or refuse without naming it."""
    for name, value in tensors.items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor or None, got {type(value).__name__}")
    if ragged is not None:
        RaggedFacts.of(ragged)
    check_options(options)
    fp8.check_accumulate(accumulate)


def attention(
    q: Any,
    k: Any,
    v: Any,
    options: AttentionOptions,
    descales: Descales,
    accumulate: Accumulate,
    softmax_tensors: SoftmaxTensors,
    ragged: RaggedTensors | None = None,
) -> Result:
    """:func:`flashhopper.fp8.attention` as an operator."""
    factors = {"q_descale": descales.q, "k_descale": descales.k, "v_descale": descales.v}
    named = {"learnable_sink": softmax_tensors.learnable_sink, "alibi_slopes": softmax_tensors.alibi_slopes}
    _check_types(factors | named, options, accumulate, ragged)
    sink = softmax_tensors.learnable_sink
    if sink is not None and sink.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("learnable_sink requires a gradient, which compiled FP8 attention lacks; detach it")
    rest = _flat_rest(softmax_tensors, ragged, options, accumulate)
    with torch.no_grad():
        if fp8_tensor.are_quantised(q, k, v):
            descales.refuse("quantised tensors carry their scales")
            fp8_tensor.check_roles(q, k, v)
            fp8_tensor.check_sequences(q, k, v, ragged)
            rows = (part for x in (q, k) for part in _flat_rows(x))
            values = v.data, v.scale, v.mean, v.source_dtype, v.shape[-3]
            out, lse = torch.ops.flashhopper.fp8_quantised_attention(*rows, *values, *rest)
        else:
            fp8.check_raw(q, k, v)
            out, lse = torch.ops.flashhopper.fp8_raw_attention(q, k, v, *descales, *rest)
    return out, lse


def _flat_rows(x: Fp8Tensor) -> tuple[Any, ...]:
    return x.data, x.scale, x.source_dtype, x.rows_per_scale, x.hadamard_seed


def _quantised_rows(role: Role, flat: tuple[Any, ...], sequences: Sequences | None) -> Fp8Tensor:
    data, scale, dtype, rows, seed = flat
    return Fp8Tensor(role, data, scale, tuple(data.shape), dtype, rows, hadamard_seed=seed, sequences=sequences)


def _quantised_call(arguments: tuple[Any, ...]) -> Attention:
    rest = _rest(arguments[15:])
    lengths = Lengths.of(rest[1])
    q = _quantised_rows("q", arguments[:5], lengths.side("q"))
    k = _quantised_rows("k", arguments[5:10], lengths.side("k"))
    data, scale, mean, dtype, seqlen = arguments[10:15]
    *batch, heads, head_dim, _ = data.shape
    shape = *batch, seqlen, heads, head_dim
    v = Fp8Tensor("v", data, scale, shape, dtype, WHOLE_SEQUENCE, mean=mean, sequences=lengths.side("v"))
    return Attention(q, k, v, *rest)


def _raw_call(arguments: tuple[Any, ...]) -> Attention:
    q, k, v, *factors = arguments[:6]
    return Attention(q, k, v, *_rest(arguments[6:]), Descales(*factors))


class FromSixteenBits(NamedTuple):
    """One call of attention that quantises: the arguments of ``flashhopper::fp8_attention``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    recipe: Fp8Recipe
    options: AttentionOptions
    accumulate: Accumulate
    ragged: RaggedTensors | None = None

    @classmethod
    def of(cls, arguments: tuple[Any, ...]) -> FromSixteenBits:
        number = 3 + len(Fp8Recipe._fields)
        _, ragged, options, accumulate = _rest(arguments[number:])
        q, k, v, *recipe = arguments[:number]
        return cls(q, k, v, Fp8Recipe(*recipe), options, accumulate, ragged)

    def flat(self) -> tuple[Any, ...]:
        rest = _flat_rest(SoftmaxTensors(), self.ragged, self.options, self.accumulate)
        return self.q, self.k, self.v, *self.recipe, *rest

    def problem(self) -> AttentionProblem:
        """Checked."""
        fp8.check_accumulate(self.accumulate)
        self.recipe.validate()
        for name, x in (("q", self.q), ("k", self.k), ("v", self.v)):
            fp8_tensor.check_source(name, x, self.ragged is not None)
        return AttentionProblem.from_tensors(self.q, self.k, self.v, self.options, self.ragged).validate()

    def run(self) -> Result:
        quantised = fp8.quantize(self.q, self.k, self.v, self.recipe, Lengths.of(self.ragged))
        return Attention(*quantised, SoftmaxTensors(), self.ragged, self.options, self.accumulate).run()

    def fake(self) -> Result:
        problem = self.problem()
        lse = self.q.new_empty(problem.lse_shape, dtype=torch.float32)
        return self.q.new_empty(problem.out_shape), lse


def attention_from_16_bit(call: FromSixteenBits) -> Result:
    """Quantise and attend as one operator, differentiable once with respect to q, k and v."""
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    call.recipe.validate()
    _check_types({}, call.options, call.accumulate, call.ragged)
    out, lse = torch.ops.flashhopper.fp8_attention(*call.flat())
    return out, lse


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Result) -> None:
    call = FromSixteenBits.of(inputs)
    ctx.max_seqlens, lengths = ((), ()) if call.ragged is None else (call.ragged[:2], call.ragged[2:])
    ctx.save_for_backward(call.q, call.k, call.v, *output, *lengths)
    ctx.options, ctx.num_inputs = call.options, len(inputs)
    ctx.set_materialize_grads(False)


def _attention_grad(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
    without: tuple[None, ...] = (None,) * (ctx.num_inputs - 3)
    if grad_out is None and grad_lse is None:
        return None, None, None, *without
    saved = ctx.saved_tensors
    ragged = RaggedTensors(*ctx.max_seqlens, *saved[5:]) if saved[5:] else None
    gradients = gradients_in_16_bits(saved[:5], ctx.options, (grad_out, grad_lse), ragged)
    needed = zip(gradients, ctx.needs_input_grad, strict=False)
    return *(gradient if is_needed else None for gradient, is_needed in needed), *without


def gradients_in_16_bits(
    saved: tuple[torch.Tensor, ...],
    options: AttentionOptions,
    grads: tuple[torch.Tensor | None, torch.Tensor | None],
    ragged: RaggedTensors | None,
) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv by the 16-bit backward's operator. ``saved``: q, k, v, and out and LSE of the FP8 forward; one of
    ``grads``, of out and of LSE, may be None."""
    q, k, v, out, lse = saved
    grad_out, grad_lse = grads
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    call = Call(q, k, v, SoftmaxTensors(), ragged, options)
    dq, dk, dv, _ = torch.ops.flashhopper.attention_backward(grad_out, grad_lse, out, lse, *call.flat())
    return dq, dk, dv


def _sequences(side: Any, cu_seqlens: torch.Tensor | None, seqused: torch.Tensor | None) -> Sequences | None:
    return None if cu_seqlens is None else Sequences(side, cu_seqlens, seqused)


def _quantize_rows(x: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *how, dtype = arguments[:4]
    data, scale = fp8.engine_of(x).quantize_rows(x, *how, _sequences(*arguments[4:]), dtype)
    return data, scale


def _quantize_rows_fake(x: torch.Tensor, rows: int, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *batch, seqlen, heads, _ = x.shape
    dtype, _, cu_seqlens = arguments[2:5]
    blocks = _num_blocks(seqlen, rows, cu_seqlens)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((*batch, heads, blocks), dtype=torch.float32)


def _num_blocks(seqlen: int, rows: int, cu_seqlens: torch.Tensor | None) -> int:
    return -(-seqlen // rows) if cu_seqlens is None else num_blocks(seqlen, cu_seqlens.shape[0] - 1, rows)


def _quantize_values(v: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kind, center, dtype = arguments[:3]
    sequences = _sequences("k", *arguments[3:])
    data, scale, mean = fp8.engine_of(v).quantize_values(v, kind, center, sequences, dtype)
    return data, scale, mean


def _quantize_values_fake(v: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *batch, seqlen, heads, head_dim = v.shape
    dtype, cu_seqlens = arguments[2:4]
    slots = _num_blocks(seqlen, VALUE_KEYS, cu_seqlens) * VALUE_KEYS
    entries = batch if cu_seqlens is None else [cu_seqlens.shape[0] - 1]
    scale, mean = (v.new_empty((*entries, heads, head_dim), dtype=torch.float32) for _ in range(2))
    return v.new_empty((*batch, heads, head_dim, slots), dtype=dtype), scale, mean


def _register() -> None:
    operators: dict[str, tuple[Any, Any]] = {
        "fp8_quantize_rows": (_quantize_rows, _quantize_rows_fake),
        "fp8_quantize_values": (_quantize_values, _quantize_values_fake),
        "fp8_quantised_attention": (lambda *x: _quantised_call(x).run(), lambda *x: _quantised_call(x).fake()),
        "fp8_raw_attention": (lambda *x: _raw_call(x).run(), lambda *x: _raw_call(x).fake()),
        "fp8_attention": (lambda *x: FromSixteenBits.of(x).run(), lambda *x: FromSixteenBits.of(x).fake()),
    }
    for name, (kernel, fake) in operators.items():
        for key in torch_library.DISPATCH_KEYS:
            _library.impl(name, kernel, key)
        torch.library.register_fake(f"flashhopper::{name}", fake, lib=_library)
    torch.library.register_autograd(
        "flashhopper::fp8_attention", _attention_grad, setup_context=_setup_context, lib=_library
    )


_register()
