"""What calls that are alike share, and those plans that need no kernel."""

from __future__ import annotations

from typing import Any

import torch

from flashhopper import reference, reference_varlen
from flashhopper.mod_call import Mods
from flashhopper.problem import NO_SOFTMAX_TENSORS, AttentionProblem, RaggedTensors, SoftmaxTensors

ForwardResult = tuple[torch.Tensor, torch.Tensor]


class Plan:
    """What does not change between two calls that are alike."""

    is_differentiable = False
    """By autograd alone."""

    def __init__(self, problem: AttentionProblem):
        self.options = problem.options

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_tensors: SoftmaxTensors = NO_SOFTMAX_TENSORS,
        ragged: RaggedTensors | None = None,
        mods: Mods | None = None,
    ) -> ForwardResult:
        raise NotImplementedError


class ReferencePlan(Plan):
    """CPU tensors: the same semantics in plain PyTorch, differentiable."""

    is_differentiable = True

    def __init__(self, problem: AttentionProblem):
        super().__init__(problem)
        options = problem.options
        self.arguments: dict[str, Any] = {
            "softmax_scale": problem.softmax_scale,
            "causal": options.causal,
            "window_size": options.window_size,
            "attention_chunk": options.attention_chunk,
            "softcap": float(options.softcap),
        }

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_tensors: SoftmaxTensors = NO_SOFTMAX_TENSORS,
        ragged: RaggedTensors | None = None,
        mods: Mods | None = None,
    ) -> ForwardResult:
        arguments = self.arguments | softmax_tensors._asdict() | {"mods": mods}
        if ragged is None:
            return reference.attention(q, k, v, **arguments)
        return reference_varlen.attention(q, k, v, ragged, **arguments)


class EmptyPlan(Plan):
    """No query or no key: out is 0 and LSE that of no key wherever there is a row at all."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_tensors: SoftmaxTensors = NO_SOFTMAX_TENSORS,
        ragged: RaggedTensors | None = None,
        mods: Mods | None = None,
    ) -> ForwardResult:
        *batch, rows, heads, _ = q.shape
        out = q.new_zeros((*batch, rows, heads, v.shape[-1]))
        lse = q.new_full((*batch, heads, rows), -torch.inf, dtype=torch.float32)
        if softmax_tensors.learnable_sink is not None and ragged is None:
            lse.copy_(softmax_tensors.learnable_sink.detach()[:, None].expand(lse.shape))
        return out, lse
