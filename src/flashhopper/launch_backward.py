"""From saved tensors and the output's gradient to launched backward kernels: plan once, then only allocate and call."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from flashhopper.compiler import get_kernel
from flashhopper.config import ROWS_PER_WARPGROUP, BackwardConfig, PostprocessSpec, PreprocessSpec
from flashhopper.device import hopper_multiprocessors
from flashhopper.heuristics import select_backward_spec
from flashhopper.launch import LOG2_E, MAX_TILES, SMALLEST_SCALE, types_of
from flashhopper.problem import AttentionOptions, AttentionProblem, RaggedTensors, TensorFacts
from flashhopper.tma_view import TmaView, aligned

ROW_PADDING = 128  # rows of the per-row statistics and of the dQ accumulator: a multiple of every tile_m

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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
) -> Gradients:
    """dQ, dK, dV on CUDA tensors, contiguous and in the inputs' dtype; ``config`` overrides the tile table.

    ``dout`` has out's shape, ``(batch, seqlen_q, heads, head_dim_v)`` or ``(total_q, heads, head_dim_v)``, and any
    strides; ``grad_lse`` has LSE's, ``(batch, heads, seqlen_q)`` or ``(heads, total_q)``, or is None.
    """
    problem = AttentionProblem.from_tensors(q, k, v, options, ragged)
    if dout.stride(-1) != 1:  # what sum() and mean() send back is one expanded number
        dout = dout.contiguous()
    facts = TensorFacts.of(out), TensorFacts.of(dout)
    plan = _plan(problem, facts, types_of(options), grad_lse is not None, config)
    if plan is None:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    return plan(Saved(q, k, v, out, lse), dout, grad_lse)


@lru_cache(maxsize=4096)
def _plan(
    problem: AttentionProblem,
    facts: tuple[TensorFacts, TensorFacts],
    option_types: tuple[type, ...],
    has_lse_grad: bool,
    config: BackwardConfig | None,
) -> _BackwardPlan | None:
    """None where a side is empty: every gradient is 0."""
    problem.validate()
    if problem.ragged is not None:
        raise NotImplementedError("gradients of ragged batches are not there yet on CUDA tensors")
    out, dout = facts
    shape = problem.out_shape
    for name, given in (("out", out), ("dout", dout)):
        if (tuple(given.shape), given.dtype, given.device) != (shape, problem.dtype, problem.device):
            raise ValueError(f"{name} is {given}; expected shape {shape}, {problem.dtype} on {problem.device}")
    num_sms = hopper_multiprocessors(problem.device)
    if problem.batch == 0 or problem.seqlen_q == 0 or problem.seqlen_k == 0:
        return None
    return _BackwardPlan(problem, facts, num_sms, has_lse_grad, config)


class _BackwardPlan:
    """Three compiled kernels, and all that does not change between two calls with the same problem."""

    def __init__(
        self,
        problem: AttentionProblem,
        facts: tuple[TensorFacts, TensorFacts],
        num_sms: int,
        has_lse_grad: bool,
        config: BackwardConfig | None,
    ):
        self.problem, self.max_ctas = problem, num_sms - problem.options.sm_margin
        spec = select_backward_spec(problem, config)
        self.padded_rows = -(-problem.seqlen_q // ROW_PADDING) * ROW_PADDING
        heads = problem.batch * problem.num_heads
        row_blocks = self.padded_rows // ROWS_PER_WARPGROUP
        key_tiles = -(-problem.seqlen_k // spec.config.tile_n) * problem.batch * problem.num_heads_k
        if max(heads * row_blocks, key_tiles) > MAX_TILES:
            raise ValueError(
                f"q has shape {tuple(problem.q.shape)}, k {tuple(problem.k.shape)}: more than {MAX_TILES} tiles"
            )
        self.preprocess = get_kernel(PreprocessSpec(spec.dtype, spec.head_dim, spec.head_dim_v, has_lse_grad))
        self.kernel = get_kernel(spec)
        self.postprocess = get_kernel(PostprocessSpec(spec.dtype, spec.head_dim))
        self.accumulator_shape = (heads, row_blocks, ROWS_PER_WARPGROUP * spec.head_dim)
        chunks = spec.head_dim // spec.config.dq_columns
        self.chunked_shape = (heads, row_blocks, chunks, ROWS_PER_WARPGROUP * spec.config.dq_columns)
        m_blocks = -(-problem.seqlen_q // spec.config.tile_m)
        self.semaphores_shape = (heads, m_blocks) if spec.deterministic else None
        self.workspace_words = 1 + (heads * m_blocks if spec.deterministic else 0)
        self.scale = problem.softmax_scale
        self.scale_log2 = max(self.scale * LOG2_E, SMALLEST_SCALE)
        self.views = [TmaView(given) for given in (problem.q, problem.k, problem.v, *facts)]

    def __call__(self, saved: Saved, dout: torch.Tensor, grad_lse: torch.Tensor | None) -> Gradients:
        with torch.cuda.device(self.problem.device):
            return self._launch(saved, dout, grad_lse)

    def _launch(self, saved: Saved, dout: torch.Tensor, grad_lse: torch.Tensor | None) -> Gradients:
        given = saved.q, saved.k, saved.v, saved.out, dout
        q, k, v, out, dout = (
            aligned(view(tensor) if view.changes else tensor) for view, tensor in zip(self.views, given, strict=True)
        )
        p, device = self.problem, self.problem.device
        lse_log2, delta = torch.empty(
            (2, p.batch, p.num_heads, self.padded_rows), dtype=torch.float32, device=device
        ).unbind()
        accumulator = torch.empty(self.accumulator_shape, dtype=torch.float32, device=device)
        dq, dk, dv = (torch.empty(facts.shape, dtype=p.dtype, device=device) for facts in (p.q, p.k, p.v))
        workspace = torch.empty(
            self.workspace_words, dtype=torch.int32, device=device
        )  # the preprocess kernel zeroes it
        semaphores = workspace[1:].view(self.semaphores_shape) if self.semaphores_shape is not None else None
        if grad_lse is not None:
            grad_lse = grad_lse.contiguous()
        self.preprocess(out, dout, saved.lse, grad_lse, lse_log2, delta, accumulator, workspace)
        self.kernel(
            (q, k, v, dout),
            lse_log2,
            delta,
            accumulator.view(self.chunked_shape),
            (dk, dv),
            workspace[:1],
            semaphores,
            self.scale,
            self.scale_log2,
            self.max_ctas,
        )
        self.postprocess(accumulator, dq, self.scale)
        return dq, dk, dv
