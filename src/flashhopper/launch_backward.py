"""From saved tensors and the output's gradient to launched backward kernels, planned as the forward is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from flashhopper import current
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
from flashhopper.heuristics import features_of, select_backward_spec, within
from flashhopper.last_call import LastCalls
from flashhopper.launch import Given, KernelScales, Layout, compact, given, kernel_tensors, kernel_window, with_batch
from flashhopper.launch_schedule import MAX_TILES, Schedule
from flashhopper.mod_call import Mods
from flashhopper.options import AttentionOptions
from flashhopper.plan_key import Key, call_key, remember
from flashhopper.problem import (
    NO_SOFTMAX_TENSORS,
    AttentionProblem,
    RaggedFacts,
    RaggedTensors,
    SoftmaxTensors,
    TensorFacts,
)
from flashhopper.tma_view import TMA_ALIGNMENT, TmaView, aligned

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


_plans: dict[Key, _BackwardPlan | None] = {}
_UNKNOWN = object()
_last_calls: LastCalls[_BackwardPlan] = LastCalls()


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
    mods: Mods | None = None,
) -> Gradients:
    """dQ, dK, dV on CUDA tensors, contiguous and in the inputs' dtype, and dsink in the sink's if there is one;
    ``config`` overrides the tile table.

    ``dout`` has out's shape, ``(batch, seqlen_q, heads, head_dim_v)`` or ``(total_q, heads, head_dim_v)``, and any
    strides; ``grad_lse`` has LSE's, ``(batch, heads, seqlen_q)`` or ``(heads, total_q)``, or is None.
    """
    if dout.stride(-1) != 1:  # what sum() and mean() send back is one expanded number
        dout = dout.contiguous()
    saved = Saved(q, k, v, out, lse)
    is_plain = ragged is None and mods is None and softmax_tensors is NO_SOFTMAX_TENSORS
    is_plain = is_plain and grad_lse is None and config is None
    known = _last_calls.find(options, q, k, v, out, dout) if is_plain else None
    if known is not None:
        return known(saved, dout, None, softmax_tensors, None, None)
    key = (
        call_key(q, k, v, options, softmax_tensors, ragged),
        (out.shape, dout.shape) if ragged is None else _ragged_shapes(q, out, dout),
        out.stride(),
        dout.stride(),
        out.dtype,
        dout.dtype,
        out.device,
        dout.device,
        grad_lse is None,
        config,
        None if mods is None else mods.key,
    )
    plan: Any = _plans.get(key, _UNKNOWN)
    if plan is _UNKNOWN:
        problem = AttentionProblem.from_tensors(q, k, v, options, ragged).validate()
        has = given(problem, softmax_tensors, mods)
        plan = make_plan(problem, (TensorFacts.of(out), TensorFacts.of(dout)), has, grad_lse is not None, config)
        remember(_plans, key, plan)
    elif is_plain and plan is not None:
        _last_calls.keep(options, plan, q, k, v, out, dout)
    if plan is None:
        return _gradients_without_pairs(saved, grad_lse, softmax_tensors.learnable_sink)
    gradients: Gradients = plan(saved, dout, grad_lse, softmax_tensors, ragged, mods)
    return gradients


def _ragged_shapes(q: torch.Tensor, out: torch.Tensor, dout: torch.Tensor) -> Key:
    """What is not a number of rows."""
    return out.shape[:-1] == q.shape[:-1] == dout.shape[:-1], out.shape[-1], dout.shape[-1]


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


def make_plan(
    problem: AttentionProblem,
    facts: tuple[TensorFacts, TensorFacts],
    has: Given | None = None,
    has_lse_grad: bool = False,
    config: BackwardConfig | None = None,
) -> _BackwardPlan | None:
    """For a validated problem, and facts of out and dout. None where a side is empty: every gradient of q, k and v is
    0."""
    out, dout = facts
    shape = problem.out_shape
    for name, found in (("out", out), ("dout", dout)):
        if (tuple(found.shape), found.dtype, found.device) != (shape, problem.dtype, problem.device):
            raise ValueError(f"{name} is {found}; expected shape {shape}, {problem.dtype} on {problem.device}")
    num_sms = hopper_multiprocessors(problem.device)
    if problem.batch == 0 or problem.rows_q == 0 or problem.rows_k == 0:
        return None
    return _BackwardPlan(problem, facts, num_sms, has, has_lse_grad, config)


class Workspaces(NamedTuple):
    """What the kernels work in, for one number of rows and sequences."""

    statistics: Layout
    """Of LSE in base 2, and of delta."""
    accumulator: Layout
    chunked: tuple[int, ...]
    """The accumulator's shape as the main kernel sees it."""
    sink_parts: tuple[int, ...]
    """Shape of each preprocess warp's part of the sink's gradient."""
    semaphores: tuple[int, ...] | None
    words: int
    """int32: the tile counter, and the semaphores."""


class _BackwardPlan:
    """Three compiled kernels and their arguments but for tensors. Of a ragged problem it serves all lengths with the
    same :func:`call_key`."""

    def __init__(
        self,
        problem: AttentionProblem,
        facts: tuple[TensorFacts, TensorFacts],
        num_sms: int,
        has: Given | None,
        has_lse_grad: bool,
        config: BackwardConfig | None,
    ):
        self.max_ctas = num_sms - problem.options.sm_margin
        self.dtype, self.device, self.device_index = problem.dtype, problem.device, problem.device.index
        features = replace(features_of(problem, *(has or ())), sink=False)
        self.is_plain = features == PLAIN
        self.spec = spec = within(select_backward_spec(problem, config, features), self.max_ctas)
        self.heads, self.heads_k = problem.num_heads, problem.num_heads_k
        tensors: tuple[TensorFacts, ...] = (problem.q, problem.k, problem.v, *facts)
        self.schedules: tuple[Schedule, Schedule] | None = None
        if problem.ragged is not None:
            self.schedules = _schedules(problem, problem.ragged, spec.config.keys_per_tile)
            tensors = tuple(map(with_batch, tensors))
        self.workspaces = self.workspaces_for(problem.batch, problem.rows_q, problem.rows_k)
        self.gradient_layouts = [compact(x.shape) for x in problem[:3]]
        is_ragged = problem.ragged is not None
        dims = spec.head_dim, spec.head_dim_v
        has_sink = has is not None and has.sink
        self.preprocess = get_kernel(PreprocessSpec(spec.dtype, *dims, has_lse_grad, is_ragged, has_sink))
        self.kernel = get_kernel(spec)
        self.postprocess = get_kernel(PostprocessSpec(spec.dtype, spec.head_dim, is_ragged))
        self.scale, self.window = problem.softmax_scale, kernel_window(problem)
        self.scales = KernelScales.of(problem, features.score_mod is not None)
        views = [TmaView(found) for found in tensors]
        self.views = views if any(view.changes for view in views) else None

    def workspaces_for(self, batch: int, rows_q: int, rows_k: int) -> Workspaces:
        """ValueError if there are too many tiles."""
        padded_rows = -(-rows_q // ROW_PADDING) * ROW_PADDING
        if self.schedules is not None:
            by_keys, by_queries = self.schedules
            by_keys.max_tiles(rows_k, batch)
            by_queries.max_tiles(rows_q, batch)
            batch, padded_rows = 1, ragged_rows(rows_q, batch)
        spec, config, heads = self.spec, self.spec.config, batch * self.heads
        row_blocks, m_blocks = padded_rows // ROWS_PER_WARPGROUP, -(-padded_rows // config.tile_m)
        key_tiles = -(-rows_k // config.keys_per_tile) * batch * self.heads_k
        if max(heads * row_blocks, key_tiles) > MAX_TILES:
            raise ValueError(f"{rows_q} rows of q and {rows_k} of k are more than {MAX_TILES} tiles")
        columns = config.dq_columns
        return Workspaces(
            compact((batch, self.heads, padded_rows)),
            compact((heads, row_blocks, ROWS_PER_WARPGROUP * spec.head_dim)),
            (heads, row_blocks, spec.head_dim // columns, ROWS_PER_WARPGROUP * columns),
            (heads, row_blocks, PREPROCESS_WARPS),
            (heads, m_blocks * config.num_ctas) if spec.deterministic else None,
            1 + (heads * m_blocks * config.num_ctas if spec.deterministic else 0),
        )

    def __call__(
        self,
        saved: Saved,
        dout: torch.Tensor,
        grad_lse: torch.Tensor | None,
        softmax_tensors: SoftmaxTensors,
        ragged: RaggedTensors | None,
        mods: Mods | None,
    ) -> Gradients:
        if self.device_index != current.device():
            with torch.cuda.device(self.device_index):
                return self(saved, dout, grad_lse, softmax_tensors, ragged, mods)
        device, sink = self.device, softmax_tensors.learnable_sink
        q, k, v, out, lse = saved
        dq, dk, dv = gradients = self._empty_gradients(q, k)
        spaces, batch, by_keys, by_queries = self.workspaces, q.shape[0], None, None
        if self.schedules is not None and ragged is not None:
            batch = ragged.cu_seqlens_q.shape[0] - 1
            spaces = self.workspaces_for(batch, q.shape[0], k.shape[0])
            by_keys, by_queries = self.schedules[0](ragged, k.shape[0]), self.schedules[1](ragged, q.shape[0])
            q, k, v, out, dout, lse, dq, dk, dv = (x.unsqueeze(0) for x in (*saved[:4], dout, lse, *gradients))
        if self.views is not None:
            inputs = zip(self.views, (q, k, v, out, dout), strict=True)
            q, k, v, out, dout = (view(tensor) if view.changes else tensor for view, tensor in inputs)
        addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr() | dout.data_ptr()
        if addresses % TMA_ALIGNMENT:
            q, k, v, out, dout = map(aligned, (q, k, v, out, dout))
        lse_log2 = current.empty_strided(*spaces.statistics, torch.float32)
        delta = current.empty_strided(*spaces.statistics, torch.float32)
        accumulator = current.empty_strided(*spaces.accumulator, torch.float32)
        # The preprocess kernel zeroes it, but does not know how many CTAs it has if ragged.
        if by_keys is None:
            workspace = current.empty_strided((spaces.words,), (1,), torch.int32)
        else:
            workspace = torch.zeros(spaces.words, dtype=torch.int32, device=device)
        semaphores = workspace[1:].view(spaces.semaphores) if spaces.semaphores is not None else None
        if grad_lse is not None:
            grad_lse = grad_lse.contiguous().view(lse.shape)
        sink_parts = sinks = None
        if sink is not None:  # of a ragged batch not every row block is a sequence's
            allocate = torch.empty if by_keys is None else torch.zeros
            sink_parts = allocate(spaces.sink_parts, dtype=torch.float32, device=device)
            sinks = sink.detach().float().contiguous(), sink_parts
        features = None
        if not self.is_plain:
            slopes = None
            if softmax_tensors.alibi_slopes is not None:
                slopes = self.scales.slopes(softmax_tensors.alibi_slopes, batch)
            scales = self.scales
            features = (self.window, scales.softcap, slopes, None, by_keys, scales.unit, kernel_tensors(mods))
        # From here on nothing else may be launched: each kernel starts under the end of the one before it.
        self.preprocess(out, dout, lse, grad_lse, lse_log2, delta, accumulator, workspace, sinks, by_queries)
        self.kernel(
            (q, k, v, dout),
            lse_log2,
            delta,
            accumulator.view(spaces.chunked),
            (dk, dv),
            workspace,
            semaphores,
            self.scale,
            self.scales.scale_log2,
            self.max_ctas,
            features,
        )
        self.postprocess(accumulator, dq, self.scale, by_queries)
        dsink = None
        if sink is not None and sink_parts is not None:
            of_heads = sink_parts.view(lse_log2.shape[0], self.heads, -1)
            dsink = of_heads.sum((0, 2), dtype=torch.float32).to(sink.dtype)
        return Gradients(*gradients, dsink)

    def _empty_gradients(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dtype = self.dtype
        of_q, of_k, of_v = self.gradient_layouts
        if self.schedules is not None:  # rows differ from call to call, their strides do not
            of_q, of_k, of_v = (
                ((rows, *shape[1:]), strides)
                for rows, (shape, strides) in zip((q.shape[0], k.shape[0], k.shape[0]), (of_q, of_k, of_v), strict=True)
            )
        return (
            current.empty_strided(*of_q, dtype),
            current.empty_strided(*of_k, dtype),
            current.empty_strided(*of_v, dtype),
        )


def ragged_rows(total_rows: int, batch: int) -> int:
    """Rows of workspaces that have whole blocks of ROW_PADDING rows for every sequence, where
    ``kernels.backward_grid.padded_row`` says."""
    return (total_rows // ROW_PADDING + batch + 1) * ROW_PADDING


def _schedules(problem: AttentionProblem, ragged: RaggedFacts, keys_per_tile: int) -> tuple[Schedule, Schedule]:
    """By keys for the main kernel; by queries for those before and after it."""
    by_keys = Schedule(ragged, by_keys=True, tile_rows=keys_per_tile, heads=problem.num_heads_k)
    return by_keys, Schedule(ragged, by_keys=False, tile_rows=ROW_PADDING, heads=problem.num_heads)
