"""Autograd around the kernels, and the way past it for what records graphs."""

from __future__ import annotations

from typing import Any

import torch

from flashhopper import launch, launch_backward, sharding, torch_library
from flashhopper.last_call import LastCalls
from flashhopper.launch_backward import Saved
from flashhopper.mod_call import Mods
from flashhopper.options import AttentionOptions
from flashhopper.plan import Plan
from flashhopper.plan_key import PLAIN_TENSORS
from flashhopper.problem import NO_SOFTMAX_TENSORS, RaggedTensors, SoftmaxTensors

_NUM_LENGTHS = len(RaggedTensors._fields) - 2


class _Attention(torch.autograd.Function):
    """Forward and backward through the kernels. Saved for backward: q, k, v, out, LSE, and what else the call has of
    a sink, slopes, lengths and tensors of its functions."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        learnable_sink: torch.Tensor | None,
        plan: Plan,
        softmax_tensors: SoftmaxTensors,
        ragged: RaggedTensors | None,
        mods: Mods | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``learnable_sink`` is that of ``softmax_tensors``: an argument of its own for autograd, which sees only
        those."""
        out, lse = plan(q, k, v, softmax_tensors, ragged, mods)
        ctx.options = plan.options
        ctx.set_materialize_grads(False)
        if ragged is None and mods is None and softmax_tensors is NO_SOFTMAX_TENSORS:
            ctx.others = None  # to save nothing else takes 0.5 µs less than to save what is None
            ctx.save_for_backward(q, k, v, out, lse)
            return out, lse
        max_seqlens, lengths = ((), ()) if ragged is None else (ragged[:2], ragged[2:])
        # Programs are values; their tensors are saved, so that autograd sees if they are written to.
        functions, mod_tensors = (None, ()) if mods is None else ((mods.score, mods.mask), mods.tensors)
        ctx.others = max_seqlens, functions
        ctx.save_for_backward(q, k, v, out, lse, *softmax_tensors, *lengths, *mod_tensors)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
        if grad_out is None and grad_lse is None:
            return (None,) * 8
        # Once: checkpointing and offloading unpack what they saved a single time.
        q, k, v, out, lse, *rest = ctx.saved_tensors
        softmax_tensors, ragged, mods = NO_SOFTMAX_TENSORS, None, None
        if ctx.others is not None:
            max_seqlens, functions = ctx.others
            softmax_tensors, rest = SoftmaxTensors(*rest[:2]), rest[2:]
            if max_seqlens:
                ragged, rest = RaggedTensors(*max_seqlens, *rest[:_NUM_LENGTHS]), rest[_NUM_LENGTHS:]
            if functions is not None:
                mods = Mods(functions[0], functions[1], tuple(rest))
        saved, grads = Saved(q, k, v, out, lse), (grad_out, grad_lse)
        gradients = kernel_gradients(saved, softmax_tensors, ctx.options, grads, ragged, mods)
        needed = zip(gradients, ctx.needs_input_grad, strict=False)
        return *(gradient if is_needed else None for gradient, is_needed in needed), None, None, None, None


class _AttentionBackward(torch.autograd.Function):
    """The backward kernels as an operation of their own, so that a graph through it is an error.

    With ``once_differentiable`` the gradient of a loss that is linear in out would count as a constant: a penalty on it
    would be dropped without a word.
    """

    @staticmethod
    def forward(
        ctx: Any,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        learnable_sink: torch.Tensor | None,
        softmax_tensors: SoftmaxTensors,
        grad_lse: torch.Tensor | None,
        options: AttentionOptions,
        ragged: RaggedTensors | None,
        mods: Mods | None,
    ) -> tuple[torch.Tensor | None, ...]:
        saved = Saved(q, k, v, out, lse)
        return tuple(
            launch_backward.backward(
                grad_out, *saved, options, grad_lse, ragged=ragged, softmax_tensors=softmax_tensors, mods=mods
            )
        )

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, ...]:
        raise RuntimeError(torch_library.SECOND_DERIVATIVE)


def kernel_gradients(
    saved: Saved,
    softmax_tensors: SoftmaxTensors,
    options: AttentionOptions,
    grads: tuple[torch.Tensor | None, torch.Tensor | None],
    ragged: RaggedTensors | None = None,
    mods: Mods | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Those of q, k, v and the sink by the kernels; one of ``grads``, of out and of LSE, may be None."""
    grad_out, grad_lse = grads
    if grad_out is None:
        grad_out = torch.zeros_like(saved.out)
    if not torch.is_grad_enabled():  # no graph through the backward is asked for: create_graph=False
        return launch_backward.backward(
            grad_out, *saved, options, grad_lse, ragged=ragged, softmax_tensors=softmax_tensors, mods=mods
        )
    gradients: tuple[torch.Tensor | None, ...] = _AttentionBackward.apply(
        grad_out, *saved, softmax_tensors.learnable_sink, softmax_tensors, grad_lse, options, ragged, mods
    )
    return gradients


# Plans, and whether q, k or v needs a gradient that autograd alone cannot give, asked for or not.
_last_calls: LastCalls[tuple[Plan, bool]] = LastCalls()


def repeated_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """As :func:`attention` of a dense problem, if this call is like the last one with these options; None if that is
    not sure."""
    if _is_compiling() or _num_dispatch_modes() > 0 or _functorch_level() is not None:
        return None
    known = _last_calls.find(options, q, k, v)
    if known is None:
        return None
    plan, needs_gradient = known
    if needs_gradient and torch.is_grad_enabled():
        result: tuple[torch.Tensor, torch.Tensor] = _record(q, k, v, None, plan, NO_SOFTMAX_TENSORS, None, None)
        return result
    return plan(q, k, v)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    softmax_tensors: SoftmaxTensors,
    ragged: RaggedTensors | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and LSE of a dense problem or, with ``ragged``, of a ragged one, recorded by autograd if an input needs a
    gradient.

    Where a graph is recorded or transformed it is an operator of :mod:`flashhopper.torch_library`.
    """
    if _is_compiling() or _num_dispatch_modes() > 0:  # fake tensors, selective checkpointing
        if sharding.is_dtensor(q):
            return sharding.attention(q, k, v, options, softmax_tensors, ragged)
        return torch_library.attention(q, k, v, options, softmax_tensors, ragged)
    is_in_transform = _functorch_level() is not None
    is_transformed = is_in_transform and isinstance(q, torch.Tensor) and q.is_cuda
    plan = None if is_transformed else launch.known_plan(q, k, v, options, softmax_tensors, ragged)
    if plan is None:
        if sharding.is_dtensor(q):
            return sharding.attention(q, k, v, options, softmax_tensors, ragged)
        if any(map(_is_subclass, _tensors_of(q, k, v, softmax_tensors, ragged))):
            return torch_library.attention(q, k, v, options, softmax_tensors, ragged)
        if is_transformed:
            return torch_library.transformable_attention(q, k, v, options, softmax_tensors, ragged)
        plan = launch.new_plan(q, k, v, options, softmax_tensors, ragged)
    elif ragged is None and softmax_tensors is NO_SOFTMAX_TENSORS and not is_in_transform:
        needs_gradient = not plan.is_differentiable and (q.requires_grad or k.requires_grad or v.requires_grad)
        _last_calls.keep(options, (plan, needs_gradient), q, k, v)
    return _attention(plan, q, k, v, softmax_tensors, ragged)


def attention_with_mods(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    softmax_tensors: SoftmaxTensors,
    functions: tuple[Any, Any, Any],
    ragged: RaggedTensors | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`attention`, with ``functions``: score_mod, mask_mod and mod_tensors, as the public functions take them.

    Functions cannot be arguments of an operator. ``torch.compile`` therefore leaves its graph for such a call; where a
    graph must be whole, or is not of ``torch.compile``, it is an error.
    """
    if _is_compiling():
        from flashhopper.graph_break import uncompiled

        result: tuple[torch.Tensor, torch.Tensor] = uncompiled(
            attention_with_mods, q, k, v, options, softmax_tensors, functions, ragged
        )
        return result
    mods = Mods.of(*functions)
    if mods is None:
        return attention(q, k, v, options, softmax_tensors, ragged)
    is_recorded = _num_dispatch_modes() > 0 or any(
        _is_subclass(x) for x in (q, k, v, *softmax_tensors, *(ragged or ()), *mods.tensors)
    )
    if is_recorded or (isinstance(q, torch.Tensor) and q.is_cuda and _functorch_level() is not None):
        raise NotImplementedError(
            "score_mod and mask_mod are not there for tensors that a graph, a dispatch mode or torch.func records;"
            " call eagerly, on plain tensors"
        )
    plan = launch.known_plan(q, k, v, options, softmax_tensors, ragged, mods)
    if plan is None:
        plan = launch.new_plan(q, k, v, options, softmax_tensors, ragged, mods)
    return _attention(plan, q, k, v, softmax_tensors, ragged, mods)


_is_compiling = torch.compiler.is_compiling
_num_dispatch_modes, _functorch_level = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_unwrap_if_dead = torch._C._functorch.unwrap_if_dead
# As torch.autograd.Function.apply, which first looks for transforms, where attention() has looked already.
_record = super(torch.autograd.Function, _Attention).apply


def _is_subclass(x: Any) -> bool:
    """Whether an operator has to be called, whose dispatch the subclass sees: a kernel would be given its address."""
    return type(x) not in PLAIN_TENSORS and isinstance(x, torch.Tensor)


def _tensors_of(q: Any, k: Any, v: Any, softmax_tensors: SoftmaxTensors, ragged: RaggedTensors | None) -> list[Any]:
    """A call's tensors, and what else it has in their place; TypeError for a DTensor beside ``q``, which is none."""
    others = {"k": k, "v": v, **softmax_tensors._asdict(), **({} if ragged is None else ragged._asdict())}
    for name, tensor in others.items():
        if sharding.is_dtensor(tensor):
            raise TypeError(
                f"{name} is a DTensor, q is a {type(q).__name__}: pass DTensors for q, k and v, or {name}.to_local()"
            )
    return [q, *others.values()]


def is_recorded(q: torch.Tensor) -> bool:
    """By ``torch.compile``, a dispatch mode (fake tensors, selective checkpointing) or a tensor subclass such as
    DTensor."""
    return _is_compiling() or _num_dispatch_modes() > 0 or _is_subclass(q)


def is_in_transform() -> bool:
    """Whether ``torch.func`` transforms what runs now."""
    return _functorch_level() is not None


def _attention(
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_tensors: SoftmaxTensors,
    ragged: RaggedTensors | None,
    mods: Mods | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a plan, recorded by autograd if an input needs a gradient."""
    if not plan.is_differentiable and torch.is_grad_enabled():
        sink, _ = softmax_tensors
        if q.requires_grad or k.requires_grad or v.requires_grad or (sink is not None and sink.requires_grad):
            q, k, v = _unwrap_if_dead(q), _unwrap_if_dead(k), _unwrap_if_dead(v)
            result: tuple[torch.Tensor, torch.Tensor] = _record(q, k, v, sink, plan, softmax_tensors, ragged, mods)
            return result
    return plan(q, k, v, softmax_tensors, ragged, mods)
