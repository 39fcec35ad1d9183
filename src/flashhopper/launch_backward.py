"""From saved tensors and the output's gradient to launched backward kernels: plan once, then only allocate and call."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from flashhopper.compiler import get_kernel
from flashhopper.config import (
    PLAIN,
    PREPROCESS_WARPS,
    ROWS_PER_WARPGROUP,
    BackwardConfig,
    PostprocessSpec,
    PreprocessSpec,
)
from flashhopper.device import hopper_multiprocessors
from flashhopper.heuristics import features_of, select_backward_spec
from flashhopper.launch import (
    MAX_TILES,
    NO_SOFTMAX_TENSORS,
    Given,
    KernelScales,
    Schedule,
    given,
    kernel_window,
    types_of,
    with_batch,
)
from flashhopper.problem import (
    AttentionOptions,
    AttentionProblem,
    RaggedFacts,
    RaggedTensors,
    SoftmaxTensors,
    TensorFacts,
)
from flashhopper.tma_view import TmaView, aligned

ROW_PADDING = 128  # rows of the per-row statistics and of the dQ accumulator: a multiple of every tile_m


class Gradients(NamedTuple):
    """Of a call's inputs, and of its sink if it has one."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsink: torch.Tensor | None = None


class Saved(NamedTuple):
    """What the forward leaves for the backward."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    options: AttentionOptions,
    grad_lse: torch.Tensor | None = None,
    config: BackwardConfig | None = None,
    ragged: RaggedTensors | None = None,
    softmax_tensors: SoftmaxTensors = NO_SOFTMAX_TENSORS,
) -> Gradients:
    """dQ, dK, dV on CUDA tensors, contiguous and in the inputs' dtype, and dsink in the sink's if there is one;
    ``config`` overrides the tile table.

    ``dout`` has out's shape, ``(batch, seqlen_q, heads, head_dim_v)`` or ``(total_q, heads, head_dim_v)``, and any
    strides; ``grad_lse`` has LSE's, ``(batch, heads, seqlen_q)`` or ``(heads, total_q)``, or is None.
    """
    problem = AttentionProblem.from_tensors(q, k, v, options, ragged)
    if dout.stride(-1) != 1:  # what sum() and mean() send back is one expanded number
        dout = dout.contiguous()
    facts = TensorFacts.of(out), TensorFacts.of(dout)
    has = given(problem, softmax_tensors)
    plan = _plan(problem, facts, types_of(options), has, grad_lse is not None, config)
    if plan is None:
        return _gradients_without_pairs(Saved(q, k, v, out, lse), grad_lse, softmax_tensors.learnable_sink)
    return plan(Saved(q, k, v, out, lse), dout, grad_lse, softmax_tensors, ragged)


def _gradients_without_pairs(saved: Saved, grad_lse: torch.Tensor | None, sink: torch.Tensor | None) -> Gradients:
    """No query meets a key: all that depends on anything is the LSE, on the sink."""
    dsink = None
    if sink is not None:
        dsink = torch.zeros_like(sink)
        if grad_lse is not None:
            has_sink = saved.lse > -torch.inf  # rows of no sequence have no sink either
            dsink = grad_lse.where(has_sink, 0.0).movedim(-2, 0).flatten(1).sum(1).to(sink.dtype)
    dq, dk, dv = (torch.zeros_like(x) for x in (saved.q, saved.k, saved.v))
    return Gradients(dq, dk, dv, dsink)


@lru_cache(maxsize=4096)
def _plan(
    problem: AttentionProblem,
    facts: tuple[TensorFacts, TensorFacts],
    option_types: tuple[type, ...],
    has: Given | None,
    has_lse_grad: bool,
    config: BackwardConfig | None,
) -> _BackwardPlan | None:
    """None where a side is empty: every gradient of q, k and v is 0."""
    problem.validate()
    out, dout = facts
    shape = problem.out_shape
    for name, found in (("out", out), ("dout", dout)):
        if (tuple(found.shape), found.dtype, found.device) != (shape, problem.dtype, problem.device):
            raise ValueError(f"{name} is {found}; expected shape {shape}, {problem.dtype} on {problem.device}")
    num_sms = hopper_multiprocessors(problem.device)
    if problem.batch == 0 or problem.rows_q == 0 or problem.rows_k == 0:
        return None
    return _BackwardPlan(problem, facts, num_sms, has, has_lse_grad, config)


class _BackwardPlan:
    """Three compiled kernels, and all that does not change between two calls with the same problem."""

    def __init__(
        self,
        problem: AttentionProblem,
        facts: tuple[TensorFacts, TensorFacts],
        num_sms: int,
        has: Given | None,
        has_lse_grad: bool,
        config: BackwardConfig | None,
    ):
        self.problem, self.max_ctas = problem, num_sms - problem.options.sm_margin
        self.features = replace(features_of(problem, *(has or ())), sink=False)
        spec = select_backward_spec(problem, config, self.features)
        tensors: tuple[TensorFacts, ...] = (problem.q, problem.k, problem.v, *facts)
        self.batch, padded_rows = problem.batch, -(-problem.seqlen_q // ROW_PADDING) * ROW_PADDING
        self.schedules: tuple[Schedule, Schedule] | None = None
        if problem.ragged is not None:
            self.schedules = _schedules(problem, problem.ragged, spec.config.tile_n)
            tensors = tuple(map(with_batch, tensors))
            self.batch, padded_rows = 1, ragged_rows(problem.rows_q, problem.batch)
        heads = self.batch * problem.num_heads
        row_blocks = padded_rows // ROWS_PER_WARPGROUP
        key_tiles = -(-problem.rows_k // spec.config.tile_n) * self.batch * problem.num_heads_k
        if max(heads * row_blocks, key_tiles) > MAX_TILES:
            raise ValueError(
                f"q has shape {tuple(problem.q.shape)}, k {tuple(problem.k.shape)}: more than {MAX_TILES} tiles"
            )
        is_ragged = problem.ragged is not None
        dims = spec.head_dim, spec.head_dim_v
        has_sink = has is not None and has.sink
        self.preprocess = get_kernel(PreprocessSpec(spec.dtype, *dims, has_lse_grad, is_ragged, has_sink))
        self.kernel = get_kernel(spec)
        self.postprocess = get_kernel(PostprocessSpec(spec.dtype, spec.head_dim, is_ragged))
        self.sink_parts_shape = (heads, row_blocks, PREPROCESS_WARPS)
        self.statistics_shape = (2, self.batch, problem.num_heads, padded_rows)
        self.accumulator_shape = (heads, row_blocks, ROWS_PER_WARPGROUP * spec.head_dim)
        chunks = spec.head_dim // spec.config.dq_columns
        self.chunked_shape = (heads, row_blocks, chunks, ROWS_PER_WARPGROUP * spec.config.dq_columns)
        m_blocks = -(-padded_rows // spec.config.tile_m)
        self.semaphores_shape = (heads, m_blocks) if spec.deterministic else None
        self.workspace_words = 1 + (heads * m_blocks if spec.deterministic else 0)
        self.scale, self.scales, self.window = problem.softmax_scale, KernelScales.of(problem), kernel_window(problem)
        self.views = [TmaView(found) for found in tensors]

    def __call__(
        self,
        saved: Saved,
        dout: torch.Tensor,
        grad_lse: torch.Tensor | None,
        softmax_tensors: SoftmaxTensors,
        ragged: RaggedTensors | None,
    ) -> Gradients:
        with torch.cuda.device(self.problem.device):
            return self._launch(saved, dout, grad_lse, softmax_tensors, ragged)

    def _launch(
        self,
        saved: Saved,
        dout: torch.Tensor,
        grad_lse: torch.Tensor | None,
        softmax_tensors: SoftmaxTensors,
        ragged: RaggedTensors | None,
    ) -> Gradients:
        p, device = self.problem, self.problem.device
        lse, sink = saved.lse, softmax_tensors.learnable_sink
        inputs: tuple[torch.Tensor, ...] = (saved.q, saved.k, saved.v, saved.out, dout)
        by_keys = by_queries = None
        if self.schedules is not None and ragged is not None:
            by_keys, by_queries = (schedule(ragged) for schedule in self.schedules)
            inputs = tuple(tensor.unsqueeze(0) for tensor in inputs)
            lse = lse.unsqueeze(0)
        q, k, v, out, dout = (
            aligned(view(tensor) if view.changes else tensor) for view, tensor in zip(self.views, inputs, strict=True)
        )
        statistics = torch.empty(self.statistics_shape, dtype=torch.float32, device=device)
        accumulator = torch.empty(self.accumulator_shape, dtype=torch.float32, device=device)
        dq, dk, dv = (torch.empty(facts.shape, dtype=p.dtype, device=device) for facts in (p.q, p.k, p.v))
        # The preprocess kernel zeroes it, but does not know how many CTAs it has if ragged.
        allocate = torch.empty if by_keys is None else torch.zeros
        workspace = allocate(self.workspace_words, dtype=torch.int32, device=device)
        lse_log2, delta = statistics.unbind()
        semaphores = workspace[1:].view(self.semaphores_shape) if self.semaphores_shape is not None else None
        if grad_lse is not None:
            grad_lse = grad_lse.contiguous().view(lse.shape)
        sink_parts = sinks = None
        if sink is not None:  # of a ragged batch not every row block is a sequence's
            sink_parts = allocate(self.sink_parts_shape, dtype=torch.float32, device=device)
            sinks = sink.detach().float().contiguous(), sink_parts
        features = None
        if self.features != PLAIN:
            slopes = None
            if softmax_tensors.alibi_slopes is not None:
                slopes = self.scales.slopes(softmax_tensors.alibi_slopes, p.batch)
            features = (self.window, self.scales.softcap, slopes, None, by_keys)
        # From here on nothing else may be launched: each kernel starts under the end of the one before it.
        self.preprocess(out, dout, lse, grad_lse, lse_log2, delta, accumulator, workspace, sinks, by_queries)
        self.kernel(
            (q, k, v, dout),
            lse_log2,
            delta,
            accumulator.view(self.chunked_shape),
            (_as_batch(dk), _as_batch(dv)),
            workspace[:1],
            semaphores,
            self.scale,
            self.scales.scale_log2,
            self.max_ctas,
            features,
        )
        self.postprocess(accumulator, _as_batch(dq), self.scale, by_queries)
        dsink = None
        if sink is not None and sink_parts is not None:
            dsink = sink_parts.view(self.batch, p.num_heads, -1).sum((0, 2), dtype=torch.float32).to(sink.dtype)
        return Gradients(dq, dk, dv, dsink)


def ragged_rows(total_rows: int, batch: int) -> int:
    """Rows of workspaces that have whole blocks of ROW_PADDING rows for every sequence, where
    ``kernels.backward_grid.padded_row`` says."""
    return (total_rows // ROW_PADDING + batch + 1) * ROW_PADDING


def _schedules(problem: AttentionProblem, ragged: RaggedFacts, tile_n: int) -> tuple[Schedule, Schedule]:
    """By keys for the main kernel; by queries for those before and after it."""
    by_keys = Schedule(ragged, by_keys=True, total_rows=problem.rows_k, tile_rows=tile_n, heads=problem.num_heads_k)
    return by_keys, Schedule(
        ragged, by_keys=False, total_rows=problem.rows_q, tile_rows=ROW_PADDING, heads=problem.num_heads
    )


def _as_batch(tensor: torch.Tensor) -> torch.Tensor:
    """Packed sequences as a batch of 1."""
    return tensor if tensor.dim() == 4 else tensor.unsqueeze(0)
