"""The operators ``torch.ops.flashhopper``: what graphs record in place of a call that runs at once.

``torch.compile``, ``torch.export``, functorch and dispatch modes see one operator with a fake kernel, a gradient and a
batching rule. A call that nothing records goes past them (``ops.attention``): the dispatcher would cost it more host
time than all the rest of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flashhopper import launch, launch_backward, reference_backward
from flashhopper.options import AttentionOptions, check_options
from flashhopper.problem import AttentionProblem, RaggedFacts, RaggedTensors, SoftmaxTensors

SOFTMAX_SCHEMA = "Tensor? learnable_sink, Tensor? alibi_slopes"
RAGGED_SCHEMA = (
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, "
    "Tensor? seqused_k"
)
OPTIONS_SCHEMA = (
    "float? softmax_scale, bool causal, int[2] window_size, int attention_chunk, float softcap, int num_splits, "
    "bool? pack_gqa, bool deterministic, int sm_margin"
)
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
DISPATCH_KEYS = ("CPU", "CUDA")

_library = torch.library.Library("flashhopper", "DEF")
_library.define(
    f"attention(Tensor q, Tensor k, Tensor v, {SOFTMAX_SCHEMA}, {RAGGED_SCHEMA}, {OPTIONS_SCHEMA}) -> "
    "(Tensor out, Tensor lse)",
    tags=TAGS,
)
_library.define(
    "attention_backward(Tensor dout, Tensor? grad_lse, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, "
    f"{SOFTMAX_SCHEMA}, {RAGGED_SCHEMA}, {OPTIONS_SCHEMA}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)",
    tags=TAGS,
)

SECOND_DERIVATIVE = (
    "flash_attn_func can be differentiated once; second derivatives (create_graph=True) need another attention"
)


class Call(NamedTuple):
    """One call of attention, dense or ragged: the arguments of ``flashhopper::attention``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    softmax_tensors: SoftmaxTensors
    ragged: RaggedTensors | None
    options: AttentionOptions

    @classmethod
    def of(cls, arguments: tuple[Any, ...]) -> Call:
        """From the operator's arguments, where the window is a list."""
        q, k, v, *rest = arguments
        ragged = RaggedTensors(*rest[_SOFTMAX_SIZE : _SOFTMAX_SIZE + _RAGGED_SIZE])
        options = AttentionOptions(*rest[_SOFTMAX_SIZE + _RAGGED_SIZE :])
        left, right = options.window_size
        return cls(
            q,
            k,
            v,
            SoftmaxTensors(*rest[:_SOFTMAX_SIZE]),
            None if ragged.cu_seqlens_q is None else ragged,
            options._replace(window_size=(left, right)),
        )

    def flat(self) -> tuple[Any, ...]:
        """The operator's arguments."""
        ragged = _DENSE if self.ragged is None else self.ragged
        return self.q, self.k, self.v, *self.softmax_tensors, *ragged, *self.options

    def problem(self) -> AttentionProblem:
        return AttentionProblem.from_tensors(self.q, self.k, self.v, self.options, self.ragged)


_SOFTMAX_SIZE, _RAGGED_SIZE = len(SoftmaxTensors._fields), len(RaggedTensors._fields)
_DENSE = (None,) * _RAGGED_SIZE
_NUM_GRADIENTS = 4
"""dq, dk, dv and the sink's: the operator's first arguments; alibi_slopes is the next."""
NUM_RESULTS = 4
"""dout, grad_lse, out and LSE: the backward's arguments before the forward's."""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    softmax_tensors: SoftmaxTensors,
    ragged: RaggedTensors | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and LSE through ``torch.ops.flashhopper.attention``."""
    call = Call(q, k, v, softmax_tensors, ragged, options)
    _check_types(call)
    out, lse = torch.ops.flashhopper.attention(*call.flat())
    return out, lse


def transformable_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    softmax_tensors: SoftmaxTensors,
    ragged: RaggedTensors | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`attention` for ``torch.func``, which cannot see through a gradient registered with an operator."""
    call = Call(q, k, v, softmax_tensors, ragged, options)
    _check_types(call)
    out, lse = _Transformable.apply(*call.flat())
    return out, lse


def _check_types(call: Call) -> None:
    """TypeError for what the operator's schema would turn into something else, or refuse without naming it."""
    for name in ("q", "k", "v"):
        if not isinstance(getattr(call, name), torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(getattr(call, name)).__name__}")
    for name in ("learnable_sink", "alibi_slopes"):
        value = getattr(call.softmax_tensors, name)
        if value is not None and not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor or None, got {type(value).__name__}")
    if call.ragged is not None:
        RaggedFacts.of(call.ragged)
    check_options(call.options)


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and LSE past dispatcher and autograd, on either device."""
    q, k, v = call[:3]
    return launch.forward(q, k, v, call.options, ragged=call.ragged, softmax_tensors=call.softmax_tensors)


def _attention(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = forward(Call.of(arguments))
    return out.contiguous(), lse.contiguous()  # as the fake kernel says; the kernels' results are


def _attention_fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = Call.of(arguments)
    problem = call.problem().validate()
    if any(x is not None for x in call.softmax_tensors):
        problem.check_softmax_tensors(call.softmax_tensors)
    lse_dtype = torch.float64 if problem.dtype == torch.float64 else torch.float32
    return call.q.new_empty(problem.out_shape), call.q.new_empty(problem.lse_shape, dtype=lse_dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    if ctx.needs_input_grad[_NUM_GRADIENTS]:
        raise NotImplementedError("alibi_slopes requires a gradient, which is not there yet; detach it")
    ctx.is_tensor = [isinstance(x, torch.Tensor) for x in inputs]
    ctx.others = [x for x in inputs if not isinstance(x, torch.Tensor)]
    ctx.save_for_backward(*output, *(x for x in inputs if isinstance(x, torch.Tensor)))
    ctx.set_materialize_grads(False)


def _attention_grad(
    ctx: Any,
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    backward: Callable[..., tuple[torch.Tensor, ...]] = torch.ops.flashhopper.attention_backward,
) -> tuple[Any, ...]:
    without = (None,) * (len(ctx.is_tensor) - _NUM_GRADIENTS)
    if grad_out is None and grad_lse is None:
        return (None,) * _NUM_GRADIENTS + without
    out, lse, *saved = ctx.saved_tensors  # once: checkpointing unpacks what it saved a single time
    tensors, others = iter(saved), iter(ctx.others)
    arguments = [next(tensors) if is_tensor else next(others) for is_tensor in ctx.is_tensor]
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    gradients = backward(grad_out, grad_lse, out, lse, *arguments)
    needed = zip(gradients, ctx.needs_input_grad, strict=False)
    return *(gradient if is_needed else None for gradient, is_needed in needed), *without


def _attention_backward(
    dout: torch.Tensor, grad_lse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, ...]:
    return backward(dout, grad_lse, out, lse, Call.of(arguments))


def backward(
    dout: torch.Tensor, grad_lse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, call: Call
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv and the sink's gradient, of no elements where there is no sink; as :func:`forward`."""
    q, k, v = call[:3]
    if q.device.type != "cpu":
        gradients = launch_backward.backward(
            dout, q, k, v, out, lse, call.options, grad_lse, ragged=call.ragged, softmax_tensors=call.softmax_tensors
        )
        *of_inputs, dsink = gradients
        return *of_inputs, q.new_empty(0) if dsink is None else dsink
    results = reference_backward.Results(out, lse, dout, torch.zeros_like(lse) if grad_lse is None else grad_lse)
    options: dict[str, Any] = {
        "softmax_scale": call.problem().softmax_scale,
        "causal": call.options.causal,
        "window_size": call.options.window_size,
        "attention_chunk": call.options.attention_chunk,
        "softcap": call.options.softcap,
    }
    if call.ragged is None:
        of_reference = reference_backward.backward(results, q, k, v, call.softmax_tensors, **options)
    else:
        of_reference = reference_backward.ragged_backward(
            results, q, k, v, call.softmax_tensors, call.ragged, **options
        )
    dsink = of_reference.learnable_sink
    return of_reference.q, of_reference.k, of_reference.v, q.new_empty(0) if dsink is None else dsink


def _attention_backward_fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
    call = Call.of(arguments[NUM_RESULTS:])
    dq, dk, dv = (x.new_empty(x.shape) for x in call[:3])
    sink = call.softmax_tensors.learnable_sink
    return dq, dk, dv, dq.new_empty(0) if sink is None else sink.new_empty(sink.shape)


def _no_second_derivative(ctx: Any, *gradients: torch.Tensor) -> None:
    raise RuntimeError(SECOND_DERIVATIVE)


class _Transformable(torch.autograd.Function):
    """``flashhopper::attention`` with the same gradient, in the form that ``torch.func`` transforms."""

    generate_vmap_rule = True  # maps what forward and backward call, by the operators' own rules
    setup_context = staticmethod(_setup_context)

    @staticmethod
    def forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.ops.flashhopper.attention(*arguments)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
        return _attention_grad(ctx, grad_out, grad_lse, _TransformableBackward.apply)


class _TransformableBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[torch.Tensor, ...]:
        gradients: tuple[torch.Tensor, ...] = torch.ops.flashhopper.attention_backward(*arguments)
        return gradients

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Nothing to save: there is no second derivative."""

    backward = staticmethod(_no_second_derivative)


def _attention_vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
    """A mapped dimension is more batch; what is not mapped is shared by all of it."""
    _check_mapped(Call.of(arguments), in_dims[3:])
    q, k, v = (_merged(x, dim, info.batch_size) for x, dim in zip(arguments[:3], in_dims[:3], strict=True))
    out, lse = torch.ops.flashhopper.attention(q, k, v, *arguments[3:])
    return tuple(x.unflatten(0, (info.batch_size, -1)) for x in (out, lse)), (0, 0)


def _attention_backward_vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
    mapped = NUM_RESULTS + 3  # and q, k, v
    call = Call.of(arguments[NUM_RESULTS:])
    _check_mapped(call, in_dims[mapped:])
    if call.softmax_tensors.learnable_sink is not None:
        raise NotImplementedError("vmap over gradients of learnable_sink is not there; call for one sample at a time")
    pairs = zip(arguments[:mapped], in_dims[:mapped], strict=True)
    merged = (None if x is None else _merged(x, dim, info.batch_size) for x, dim in pairs)
    *gradients, dsink = torch.ops.flashhopper.attention_backward(*merged, *arguments[mapped:])
    return (*(x.unflatten(0, (info.batch_size, -1)) for x in gradients), dsink), (0, 0, 0, None)


def _check_mapped(call: Call, in_dims: tuple[int | None, ...]) -> None:
    """NotImplementedError for what more batch does not express; ``in_dims`` are those after q, k and v."""
    if call.ragged is not None:
        raise NotImplementedError("vmap over a ragged batch is not there; put all sequences into one batch")
    for name, value, dim in zip(SoftmaxTensors._fields, call.softmax_tensors, in_dims, strict=False):
        if dim is not None or (name == "alibi_slopes" and value is not None and value.dim() == 2):
            raise NotImplementedError(f"vmap over {name} is not there; accepted are the same numbers per head for all")


def _merged(x: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    """``(size · batch, …)`` of a tensor whose dimension ``dim`` is mapped, or of one that is shared."""
    mapped = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return mapped.flatten(0, 1)


def _register() -> None:
    for key in DISPATCH_KEYS:
        _library.impl("attention", _attention, key)
        _library.impl("attention_backward", _attention_backward, key)
    name, backward_name = "flashhopper::attention", "flashhopper::attention_backward"
    torch.library.register_fake(name, _attention_fake, lib=_library)
    torch.library.register_fake(backward_name, _attention_backward_fake, lib=_library)
    torch.library.register_autograd(name, _attention_grad, setup_context=_setup_context, lib=_library)
    torch.library.register_autograd(backward_name, _no_second_derivative, lib=_library)
    torch.library.register_vmap(name, _attention_vmap, lib=_library)
    torch.library.register_vmap(backward_name, _attention_backward_vmap, lib=_library)


_register()
