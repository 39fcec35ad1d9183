"""From a validated problem to a launched kernel: plan once per problem, then only allocate and call."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from flashhopper import reference, reference_varlen
from flashhopper.compiler import get_kernel
from flashhopper.config import ForwardConfig
from flashhopper.device import hopper_multiprocessors
from flashhopper.heuristics import select_spec
from flashhopper.problem import AttentionOptions, AttentionProblem, RaggedTensors, SoftmaxTensors
from flashhopper.tma_view import TMA_ALIGNMENT, TmaView, aligned

LOG2_E = 1.4426950408889634
# A scale of 0 would turn a masked score's -inf into NaN. This one gives every score below 1e23 a weight of 1 as well.
SMALLEST_SCALE = 1e-30
NO_SOFTMAX_TENSORS = SoftmaxTensors()
MAX_TILES = 2**31 - 2**16  # tile numbers are 32-bit, and each CTA may claim a few past the end

ForwardResult = tuple[torch.Tensor, torch.Tensor]


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    config: ForwardConfig | None = None,
    ragged: RaggedTensors | None = None,
) -> ForwardResult:
    """Attention without autograd on CUDA tensors, with it on CPU tensors; ``config`` overrides the tile table.

    Returns out ``(batch, seqlen_q, heads, head_dim_v)`` in q's dtype and LSE ``(batch, heads, seqlen_q)`` fp32; of a
    ragged batch ``(total_q, heads, head_dim_v)`` and ``(heads, total_q)``.
    """
    plan = _plan_of(AttentionProblem.from_tensors(q, k, v, options, ragged), config)
    return plan(q, k, v) if ragged is None else plan(q, k, v, ragged=ragged)


def forward_with_softmax_tensors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    softmax_tensors: SoftmaxTensors,
    ragged: RaggedTensors | None = None,
) -> ForwardResult:
    """:func:`forward` with a sink or ALiBi slopes, which only CPU tensors have today."""
    problem = AttentionProblem.from_tensors(q, k, v, options, ragged)
    problem.validate()
    problem.check_softmax_tensors(softmax_tensors)  # before anything is compiled
    return _plan_of(problem, None)(q, k, v, softmax_tensors, ragged)


def types_of(options: AttentionOptions) -> tuple[type, ...]:
    """For the keys of plans: 1 == True, but only one of them is a valid ``causal`` or side of a window."""
    return tuple(map(type, options + options.window_size))


def _plan_of(problem: AttentionProblem, config: ForwardConfig | None) -> Callable[..., ForwardResult]:
    try:
        return _plan(problem, types_of(problem.options), config)
    except TypeError:
        problem.validate()  # an unhashable option; this names it
        raise


@lru_cache(maxsize=4096)
def _plan(
    problem: AttentionProblem, option_types: tuple[type, ...], config: ForwardConfig | None
) -> Callable[..., ForwardResult]:
    """Validate, choose and compile; cached by the problem itself. Errors are not cached."""
    problem.validate()
    if problem.device.type == "cpu":
        return _ReferencePlan(problem)
    if problem.ragged is not None:
        raise NotImplementedError("cu_seqlens are not there yet on CUDA tensors; accepted today: CPU tensors")
    num_sms = hopper_multiprocessors(problem.device)
    if problem.options.sm_margin >= num_sms:
        raise ValueError(
            f"sm_margin is {problem.options.sm_margin}; the card has {num_sms} SMs, at least 1 must be left"
        )
    if problem.batch == 0 or problem.seqlen_q == 0 or problem.seqlen_k == 0:
        return _EmptyPlan(problem)
    return _KernelPlan(problem, num_sms, config)


class _ReferencePlan:
    """CPU tensors: the same semantics in plain PyTorch, differentiable."""

    def __init__(self, problem: AttentionProblem):
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
    ) -> ForwardResult:
        arguments = self.arguments | softmax_tensors._asdict()
        if ragged is None:
            return reference.attention(q, k, v, **arguments)
        return reference_varlen.attention(q, k, v, ragged, **arguments)


class _EmptyPlan:
    """No query or no key: out is 0 and LSE -inf wherever there is a row at all."""

    def __init__(self, problem: AttentionProblem):
        self.problem = problem

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> ForwardResult:
        p = self.problem
        out = q.new_zeros(p.out_shape)
        lse = q.new_full(p.lse_shape, -torch.inf, dtype=torch.float32)
        return out, lse


class _KernelPlan:
    """A compiled kernel and all that does not change between two calls with the same problem."""

    def __init__(self, problem: AttentionProblem, num_sms: int, config: ForwardConfig | None):
        spec = select_spec(problem, config)
        tile_m = spec.config.tile_m
        num_tiles = -(-problem.seqlen_q // tile_m) * problem.num_heads * problem.batch
        if num_tiles > MAX_TILES:
            raise ValueError(
                f"q has shape {tuple(problem.q.shape)}, {num_tiles} tiles of {tile_m} rows; at most {MAX_TILES} are"
                " accepted"
            )
        self.kernel: Callable[..., Any] = get_kernel(spec)
        self.device, self.device_index, self.dtype = problem.device, problem.device.index, problem.dtype
        self.out_shape, self.lse_shape = problem.out_shape, problem.lse_shape
        self.scale_log2 = max(problem.softmax_scale * LOG2_E, SMALLEST_SCALE)
        self.max_ctas = num_sms - problem.options.sm_margin
        views = [TmaView(facts) for facts in (problem.q, problem.k, problem.v)]
        self.views = views if any(view.changes for view in views) else None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> ForwardResult:
        if self.device_index != torch.cuda.current_device():
            with torch.cuda.device(self.device_index):
                return self._launch(q, k, v)
        return self._launch(q, k, v)

    def _launch(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> ForwardResult:
        if self.views is not None:
            q, k, v = (view(tensor) for view, tensor in zip(self.views, (q, k, v), strict=True))
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % TMA_ALIGNMENT:
            q, k, v = map(aligned, (q, k, v))
        out = torch.empty(self.out_shape, dtype=self.dtype, device=self.device)
        lse = torch.empty(self.lse_shape, dtype=torch.float32, device=self.device)
        self.kernel(q, k, v, out, lse, _workspace(self.device_index), self.scale_log2, self.max_ctas)
        return out, lse


_WORKSPACES: dict[tuple[int, int], torch.Tensor] = {}


def _workspace(device_index: int) -> torch.Tensor:
    """The scheduler's int32 (4,), zeroed once; the last CTA of each launch resets it.

    One per stream, whose launches follow each other. A captured launch gets its own, zeroed by the graph: graphs
    captured on one stream may be replayed at once on several.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(4, dtype=torch.int32, device=torch.device("cuda", device_index))
    key = device_index, torch._C._cuda_getCurrentRawStream(device_index)
    workspace = _WORKSPACES.get(key)
    if workspace is None:
        workspace = _WORKSPACES[key] = torch.zeros(4, dtype=torch.int32, device=torch.device("cuda", device_index))
    return workspace


def redone_tiles(device_index: int = 0) -> int:
    """How many tiles the lazy softmax has redone on a device so far, outside graphs; synchronises. For tests."""
    return sum(int(w[2]) for (index, _), w in _WORKSPACES.items() if index == device_index)
