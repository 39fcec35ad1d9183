"""From a validated problem to a launched kernel: plan once per problem, then only allocate and call."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from flashhopper import reference, reference_varlen
from flashhopper.compiler import get_kernel
from flashhopper.config import PLAIN, ForwardConfig, ScheduleSpec
from flashhopper.device import hopper_multiprocessors
from flashhopper.heuristics import features_of, select_spec
from flashhopper.problem import (
    AttentionOptions,
    AttentionProblem,
    RaggedFacts,
    RaggedTensors,
    SoftmaxTensors,
    TensorFacts,
)
from flashhopper.tma_view import TMA_ALIGNMENT, TmaView, aligned

LOG2_E = 1.4426950408889634
# A scale of 0 would turn a masked score's -inf into NaN. This one gives every score below 1e23 a weight of 1 as well.
SMALLEST_SCALE = 1e-30
NO_SOFTMAX_TENSORS = SoftmaxTensors()
UNBOUNDED, RECORD_WORDS = 2**30, 8  # as kernels/block_range.py and kernels/ragged.py have them; those load cutlass
MAX_TILES = 2**31 - 2**16  # tile numbers are 32-bit, and each CTA may claim a few past the end

ForwardResult = tuple[torch.Tensor, torch.Tensor]


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    config: ForwardConfig | None = None,
    ragged: RaggedTensors | None = None,
    softmax_tensors: SoftmaxTensors = NO_SOFTMAX_TENSORS,
) -> ForwardResult:
    """Attention without autograd on CUDA tensors, with it on CPU tensors; ``config`` overrides the tile table.

    Returns out ``(batch, seqlen_q, heads, head_dim_v)`` in q's dtype and LSE ``(batch, heads, seqlen_q)`` fp32; of a
    ragged batch ``(total_q, heads, head_dim_v)`` and ``(heads, total_q)``.
    """
    problem = AttentionProblem.from_tensors(q, k, v, options, ragged)
    if ragged is None and not any(t is not None for t in softmax_tensors):
        return _plan_of(problem, config, None)(q, k, v)
    plan = _plan_of(problem, config, given(problem, softmax_tensors))
    return plan(q, k, v, softmax_tensors, ragged)


class Given(NamedTuple):
    """Which of the softmax's tensors a call has."""

    sink: bool
    alibi: bool


def given(problem: AttentionProblem, tensors: SoftmaxTensors) -> Given | None:
    """None without any. Checks them: they are not part of a plan's key."""
    if tensors.learnable_sink is None and tensors.alibi_slopes is None:
        return None
    problem.validate()
    problem.check_softmax_tensors(tensors)
    return Given(tensors.learnable_sink is not None, tensors.alibi_slopes is not None)


def types_of(options: AttentionOptions) -> tuple[type, ...]:
    """For the keys of plans: 1 == True, but only one of them is a valid ``causal`` or side of a window."""
    return tuple(map(type, options + options.window_size))


def _plan_of(
    problem: AttentionProblem, config: ForwardConfig | None, has: Given | None
) -> Callable[..., ForwardResult]:
    try:
        return _plan(problem, types_of(problem.options), config, has)
    except TypeError:
        problem.validate()  # an unhashable option; this names it
        raise


@lru_cache(maxsize=4096)
def _plan(
    problem: AttentionProblem, option_types: tuple[type, ...], config: ForwardConfig | None, has: Given | None
) -> Callable[..., ForwardResult]:
    """Validate, choose and compile; cached by the problem itself. Errors are not cached."""
    problem.validate()
    if problem.device.type == "cpu":
        return _ReferencePlan(problem)
    num_sms = hopper_multiprocessors(problem.device)
    if problem.options.sm_margin >= num_sms:
        raise ValueError(
            f"sm_margin is {problem.options.sm_margin}; the card has {num_sms} SMs, at least 1 must be left"
        )
    has_keys = problem.rows_k > 0 or (problem.ragged is not None and has is not None and has.sink)
    if problem.batch == 0 or problem.rows_q == 0 or not has_keys:
        return _EmptyPlan(problem)
    return _KernelPlan(problem, num_sms, config, has)


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
    """No query or no key: out is 0 and LSE that of no key wherever there is a row at all."""

    def __init__(self, problem: AttentionProblem):
        self.problem = problem

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_tensors: SoftmaxTensors = NO_SOFTMAX_TENSORS,
        ragged: RaggedTensors | None = None,
    ) -> ForwardResult:
        p = self.problem
        out = q.new_zeros(p.out_shape)
        lse = q.new_full(p.lse_shape, -torch.inf, dtype=torch.float32)
        if softmax_tensors.learnable_sink is not None and ragged is None:
            lse.copy_(softmax_tensors.learnable_sink.detach()[:, None].expand(p.lse_shape))
        return out, lse


class KernelScales(NamedTuple):
    """The factors that the kernels get: what scores are multiplied with, for the softmax in base 2."""

    scale_log2: float
    softcap: float | None
    """softmax_scale / softcap, the factor in front of tanh; ``scale_log2`` then is softcap · log2(e)."""

    @classmethod
    def of(cls, problem: AttentionProblem) -> KernelScales:
        cap = float(problem.options.softcap)
        if cap == 0.0:
            return cls(max(problem.softmax_scale * LOG2_E, SMALLEST_SCALE), None)
        return cls(max(cap * LOG2_E, SMALLEST_SCALE), problem.softmax_scale / cap)

    def slopes(self, alibi_slopes: torch.Tensor, batch: int) -> torch.Tensor:
        """``(batch, heads)``: what a key's distance adds to its score before ``scale_log2``."""
        scaled = alibi_slopes.detach() * (-LOG2_E / self.scale_log2)
        return scaled.contiguous().expand(batch, -1) if scaled.dim() == 1 else scaled.contiguous()


def kernel_window(problem: AttentionProblem) -> tuple[int, int, int] | None:
    """Left, right and chunk as the kernels take them."""
    window = problem.mask.window
    if window is None:
        return None
    left, right, chunk = (min(side, UNBOUNDED) if side >= 0 else UNBOUNDED for side in window)
    return left, right, max(chunk, 1)


def with_batch(facts: TensorFacts) -> TensorFacts:
    """The facts of ``tensor.unsqueeze(0)``: kernels take packed sequences as a batch of 1."""
    return facts._replace(shape=(1, *facts.shape), stride=(facts.shape[0] * facts.stride[0], *facts.stride))


class Schedule:
    """Launches the schedule kernel for one side of a ragged batch, which is cut into tiles of ``tile_rows`` rows."""

    def __init__(self, ragged: RaggedFacts, *, by_keys: bool, total_rows: int, tile_rows: int, heads: int):
        self.by_keys, self.batch, self.sizes = by_keys, ragged.batch, (total_rows, tile_rows, heads)
        used_q, used_k = ragged.seqused_q is not None, ragged.seqused_k is not None
        self.kernel = get_kernel(ScheduleSpec(used_k, used_q) if by_keys else ScheduleSpec(used_q, used_k))
        self.max_tiles = (total_rows // tile_rows + 2 * self.batch) * heads
        if self.max_tiles > MAX_TILES:
            raise ValueError(f"{total_rows} rows in {self.batch} sequences are more than {MAX_TILES} tiles")

    def __call__(self, ragged: RaggedTensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Records and first tiles of the sequences, see ``kernels/ragged.py``."""
        rows, others = (ragged.cu_seqlens_q, ragged.seqused_q), (ragged.cu_seqlens_k, ragged.seqused_k)
        if self.by_keys:
            rows, others = others, rows
        sequences = 2 * self.batch
        records = torch.empty((sequences, RECORD_WORDS), dtype=torch.int32, device=rows[0].device)
        first_tiles = torch.empty(sequences + 1, dtype=torch.int32, device=rows[0].device)
        self.kernel(rows[0], others[0], rows[1], others[1], records.view(-1), first_tiles, *self.sizes)
        return records.view(-1), first_tiles


class _KernelPlan:
    """A compiled kernel and all that does not change between two calls with the same problem."""

    def __init__(self, problem: AttentionProblem, num_sms: int, config: ForwardConfig | None, has: Given | None):
        self.features = features_of(problem, *(has or ()))
        spec = select_spec(problem, config, self.features)
        tile_m = spec.config.tile_m
        self.schedule: Schedule | None = None
        facts: tuple[TensorFacts, ...] = (problem.q, problem.k, problem.v)
        if problem.ragged is not None:
            self.schedule = Schedule(
                problem.ragged, by_keys=False, total_rows=problem.rows_q, tile_rows=tile_m, heads=problem.num_heads
            )
            facts = tuple(map(with_batch, facts))
        num_tiles = -(-problem.seqlen_q // tile_m) * problem.num_heads * problem.batch
        if problem.ragged is None and num_tiles > MAX_TILES:
            raise ValueError(
                f"q has shape {tuple(problem.q.shape)}, {num_tiles} tiles of {tile_m} rows; at most {MAX_TILES} are"
                " accepted"
            )
        self.kernel: Callable[..., Any] = get_kernel(spec)
        self.problem = problem
        self.device, self.device_index, self.dtype = problem.device, problem.device.index, problem.dtype
        self.out_shape, self.lse_shape = problem.out_shape, problem.lse_shape
        self.has_keys = problem.rows_k > 0
        self.scales, self.window = KernelScales.of(problem), kernel_window(problem)
        self.max_ctas = num_sms - problem.options.sm_margin
        views = [TmaView(given) for given in facts]
        self.views = views if any(view.changes for view in views) else None

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_tensors: SoftmaxTensors = NO_SOFTMAX_TENSORS,
        ragged: RaggedTensors | None = None,
    ) -> ForwardResult:
        if self.device_index != torch.cuda.current_device():
            with torch.cuda.device(self.device_index):
                return self._launch(q, k, v, softmax_tensors, ragged)
        return self._launch(q, k, v, softmax_tensors, ragged)

    def _launch(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_tensors: SoftmaxTensors,
        ragged: RaggedTensors | None,
    ) -> ForwardResult:
        if ragged is not None:
            q, k, v = (tensor.unsqueeze(0) for tensor in (q, k, v))
        if self.views is not None:
            q, k, v = (view(tensor) for view, tensor in zip(self.views, (q, k, v), strict=True))
        if not self.has_keys:  # all that is left of the softmax is the sink; TMA needs a row to look at
            k, v = (tensor.new_zeros((1, 1, *tensor.shape[2:])) for tensor in (k, v))
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % TMA_ALIGNMENT:
            q, k, v = map(aligned, (q, k, v))
        out = torch.empty(self.out_shape, dtype=self.dtype, device=self.device)
        lse = torch.empty(self.lse_shape, dtype=torch.float32, device=self.device)
        workspace = scheduler_workspace(self.device_index)
        if self.features == PLAIN:
            self.kernel(q, k, v, out, lse, workspace, self.scales.scale_log2, self.max_ctas, None)
            return out, lse
        as_batch = (out.unsqueeze(0), lse.unsqueeze(0)) if ragged is not None else (out, lse)
        features = self._feature_args(softmax_tensors, ragged)
        self.kernel(q, k, v, *as_batch, workspace, self.scales.scale_log2, self.max_ctas, features)
        return out, lse

    def _feature_args(self, tensors: SoftmaxTensors, ragged: RaggedTensors | None) -> tuple[Any, ...]:
        """In the order of ``kernels.features.FeatureArgs``."""
        slopes = sink = sequences = None
        if tensors.alibi_slopes is not None:
            slopes = self.scales.slopes(tensors.alibi_slopes, self.problem.batch)
        if tensors.learnable_sink is not None:
            sink = tensors.learnable_sink.detach().float().contiguous()
        if self.schedule is not None and ragged is not None:
            sequences = self.schedule(ragged)
        return self.window, self.scales.softcap, slopes, sink, sequences


_WORKSPACES: dict[tuple[int, int], torch.Tensor] = {}


def scheduler_workspace(device_index: int) -> torch.Tensor:
    """The scheduler's int32 (4,), zeroed once; the last CTA of each launch resets it.

    One per stream, whose launches follow each other. A captured launch gets its own, zeroed by the graph: graphs
    captured on one stream may be replayed at once on several.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(4, dtype=torch.int32, device=torch.device("cuda", device_index))
    key = device_index, torch._C._cuda_getCurrentRawStream(device_index)
    workspace = _WORKSPACES.get(key)
    if workspace is None:
        workspace = _WORKSPACES[key] = _lasting_zeros(device_index)
    return workspace


def _lasting_zeros(device_index: int) -> torch.Tensor:
    """From the common memory pool, even where this thread's or stream's allocations go to another (``torch.compile``
    does that before it captures a graph) that must not hold what outlives the call."""

    def allocate() -> tuple[torch.Tensor, torch.cuda.Event]:
        with torch.cuda.stream(torch.cuda.Stream(device_index)):
            zeros = torch.zeros(4, dtype=torch.int32, device=torch.device("cuda", device_index))
            return zeros, torch.cuda.current_stream(device_index).record_event()

    with ThreadPoolExecutor(1) as other_thread:
        zeros, is_zero = other_thread.submit(allocate).result()
    torch.cuda.current_stream(device_index).wait_event(is_zero)
    return zeros


def redone_tiles(device_index: int = 0) -> int:
    """How many tiles the lazy softmax has redone on a device so far, outside graphs; synchronises. For tests."""
    return sum(int(w[2]) for (index, _), w in _WORKSPACES.items() if index == device_index)
