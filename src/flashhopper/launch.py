"""From a call to a launched kernel: plan once for all calls that are alike, then only allocate and call."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from flashhopper import current
from flashhopper.compiler import get_kernel
from flashhopper.config import PLAIN, ForwardConfig
from flashhopper.device import hopper_multiprocessors
from flashhopper.heuristics import features_of, select_spec
from flashhopper.launch_schedule import MAX_TILES, Schedule
from flashhopper.mod_call import Mods
from flashhopper.options import AttentionOptions
from flashhopper.plan import EmptyPlan, ForwardResult, Plan, ReferencePlan
from flashhopper.plan_key import PLAIN_TENSORS, Key, call_key, remember
from flashhopper.problem import NO_SOFTMAX_TENSORS, AttentionProblem, RaggedTensors, SoftmaxTensors, TensorFacts
from flashhopper.programs import Program
from flashhopper.tma_view import TMA_ALIGNMENT, TmaView, aligned

LOG2_E = 1.4426950408889634
# A scale of 0 would turn a masked score's -inf into NaN. This one gives every score below 1e23 a weight of 1 as well.
SMALLEST_SCALE = 1e-30
UNBOUNDED = 2**30  # as kernels/block_range.py has it; that loads cutlass


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    config: ForwardConfig | None = None,
    ragged: RaggedTensors | None = None,
    softmax_tensors: SoftmaxTensors = NO_SOFTMAX_TENSORS,
    mods: Mods | None = None,
) -> ForwardResult:
    """Attention without autograd on CUDA tensors, with it on CPU tensors; ``config`` overrides the tile table.

    Returns out ``(batch, seqlen_q, heads, head_dim_v)`` in q's dtype and LSE ``(batch, heads, seqlen_q)`` fp32; of a
    ragged batch ``(total_q, heads, head_dim_v)`` and ``(heads, total_q)``.
    """
    if config is None:
        plan = known_plan(q, k, v, options, softmax_tensors, ragged, mods)
        if plan is None:
            plan = new_plan(q, k, v, options, softmax_tensors, ragged, mods)
    else:
        plan = _configured_plan(*_validated(q, k, v, options, softmax_tensors, ragged, mods), config)
    return plan(q, k, v, softmax_tensors, ragged, mods)


class Given(NamedTuple):
    """Which of the softmax's tensors a call has, and what it computes of its scores."""

    sink: bool
    alibi: bool
    score_mod: Program | None = None
    mask_mod: Program | None = None


_plans: dict[Key, Plan] = {}


def known_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    softmax_tensors: SoftmaxTensors,
    ragged: RaggedTensors | None,
    mods: Mods | None = None,
) -> Plan | None:
    """The plan of earlier calls like this one, which is as valid as they were; None if there was none. Checks nothing,
    and no plan is known for subclasses of tensors."""
    try:
        key = call_key(q, k, v, options, softmax_tensors, ragged)
        return _plans.get(key if mods is None else (key, mods.key))
    except (AttributeError, RuntimeError, TypeError, ValueError):  # no such facts, or not hashable: a plan will say why
        return None


def new_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    softmax_tensors: SoftmaxTensors,
    ragged: RaggedTensors | None,
    mods: Mods | None = None,
) -> Plan:
    """Validate, choose and compile; the plan is known from then on. Errors are raised again by every such call."""
    plan = make_plan(*_validated(q, k, v, options, softmax_tensors, ragged, mods))
    if all(type(x) in PLAIN_TENSORS for x in (q, k, v)):
        key = call_key(q, k, v, options, softmax_tensors, ragged)
        remember(_plans, key if mods is None else (key, mods.key), plan)
    return plan


def _validated(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    softmax_tensors: SoftmaxTensors,
    ragged: RaggedTensors | None,
    mods: Mods | None = None,
) -> tuple[AttentionProblem, Given | None]:
    problem = AttentionProblem.from_tensors(q, k, v, options, ragged).validate()
    return problem, given(problem, softmax_tensors, mods)


def given(problem: AttentionProblem, tensors: SoftmaxTensors, mods: Mods | None = None) -> Given | None:
    """None without any. Checks them against a validated problem."""
    if tensors.learnable_sink is None and tensors.alibi_slopes is None and mods is None:
        return None
    problem.check_softmax_tensors(tensors)
    functions: tuple[Program | None, Program | None] = (None, None)
    if mods is not None:
        mods.check_device(problem.device)
        functions = mods.score, mods.mask
    return Given(tensors.learnable_sink is not None, tensors.alibi_slopes is not None, *functions)


def make_plan(problem: AttentionProblem, has: Given | None = None, config: ForwardConfig | None = None) -> Plan:
    """For a validated problem. Of a ragged one it serves all lengths with the same :func:`call_key`."""
    if problem.device.type == "cpu":
        return ReferencePlan(problem)
    num_sms = hopper_multiprocessors(problem.device)
    if problem.options.sm_margin >= num_sms:
        raise ValueError(
            f"sm_margin is {problem.options.sm_margin}; the card has {num_sms} SMs, at least 1 must be left"
        )
    has_keys = problem.rows_k > 0 or (problem.ragged is not None and has is not None and has.sink)
    if problem.batch == 0 or problem.rows_q == 0 or not has_keys:
        return EmptyPlan(problem)
    kind = _DensePlan if problem.ragged is None else _RaggedPlan
    return kind(problem, num_sms, config, has)


_configured_plan = lru_cache(maxsize=256)(make_plan)


Layout = tuple[tuple[int, ...], tuple[int, ...]]


def compact(shape: tuple[int, ...]) -> Layout:
    """Shape and strides of a contiguous tensor, for ``current.empty_strided``."""
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * max(extent, 1))
    return tuple(shape), tuple(reversed(strides))


class KernelScales(NamedTuple):
    """The factors that the kernels get: what scores are multiplied with, for the softmax in base 2."""

    scale_log2: float
    softcap: float | None
    """softmax_scale / softcap, the factor in front of tanh; ``scale_log2`` then is softcap · log2(e)."""
    unit: float | None = None
    """With a score_mod, which takes and gives natural units: the factor in front of it; ``scale_log2`` then is
    log2(e)."""

    @classmethod
    def of(cls, problem: AttentionProblem, has_score_mod: bool = False) -> KernelScales:
        cap = float(problem.options.softcap)
        scale_log2 = max((cap or problem.softmax_scale) * LOG2_E, SMALLEST_SCALE)
        softcap = problem.softmax_scale / cap if cap else None
        if has_score_mod:
            return cls(LOG2_E, softcap, scale_log2 / LOG2_E)
        return cls(scale_log2, softcap)

    def slopes(self, alibi_slopes: torch.Tensor, batch: int) -> torch.Tensor:
        """``(batch, heads)``: what a key's distance adds to its score before ``unit`` and ``scale_log2``."""
        scaled = alibi_slopes.detach() * (-LOG2_E / (self.scale_log2 * (self.unit or 1.0)))
        return scaled.contiguous().expand(batch, -1) if scaled.dim() == 1 else scaled.contiguous()


def kernel_tensors(mods: Mods | None) -> tuple[torch.Tensor, ...] | None:
    """Those of the call's functions as the kernels take them, any strides: at least one dimension and one element."""
    if mods is None or not mods.tensors:
        return None
    return tuple(_kernel_tensor(x.detach()) for x in mods.tensors)


def _kernel_tensor(x: torch.Tensor) -> torch.Tensor:
    if x.numel() == 0:  # whose element it would be is a pair that does not exist
        x = x.new_zeros([max(extent, 1) for extent in x.shape])
    if x.dtype == torch.bool:
        x = x.view(torch.uint8)
    return x if x.dim() else x.view(1)


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


class _KernelPlan(Plan):
    """A compiled kernel and its arguments but for tensors."""

    kernel: Callable[..., Any]

    def __init__(self, problem: AttentionProblem, num_sms: int, config: ForwardConfig | None, has: Given | None):
        super().__init__(problem)
        features = features_of(problem, *(has or ()))
        self.spec = select_spec(problem, config, features)
        self.is_plain = features == PLAIN
        self.device_index, self.dtype = problem.device.index, problem.dtype
        self.scales = KernelScales.of(problem, features.score_mod is not None)
        self.window = kernel_window(problem)
        self.scale_log2 = self.scales.scale_log2
        self.max_ctas = num_sms - problem.options.sm_margin

    def _feature_args(
        self,
        tensors: SoftmaxTensors,
        batch: int,
        sequences: tuple[torch.Tensor, torch.Tensor] | None,
        mods: Mods | None,
    ) -> tuple[Any, ...]:
        """In the order of ``kernels.features.FeatureArgs``."""
        slopes = sink = None
        if tensors.alibi_slopes is not None:
            slopes = self.scales.slopes(tensors.alibi_slopes, batch)
        if tensors.learnable_sink is not None:
            sink = tensors.learnable_sink.detach().float().contiguous()
        return self.window, self.scales.softcap, slopes, sink, sequences, self.scales.unit, kernel_tensors(mods)


class _DensePlan(_KernelPlan):
    def __init__(self, problem: AttentionProblem, num_sms: int, config: ForwardConfig | None, has: Given | None):
        super().__init__(problem, num_sms, config, has)
        tile_m = self.spec.config.tile_m
        num_tiles = -(-problem.seqlen_q // tile_m) * problem.num_heads * problem.batch
        if num_tiles > MAX_TILES:
            raise ValueError(
                f"q has shape {tuple(problem.q.shape)}, {num_tiles} tiles of {tile_m} rows; at most {MAX_TILES} are"
                " accepted"
            )
        self.kernel = get_kernel(self.spec)
        self.batch = problem.batch
        self.out_shape, self.out_strides = compact(problem.out_shape)
        self.lse_shape, self.lse_strides = compact(problem.lse_shape)
        views = [TmaView(facts) for facts in problem[:3]]
        self.views = views if any(view.changes for view in views) else None

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_tensors: SoftmaxTensors = NO_SOFTMAX_TENSORS,
        ragged: RaggedTensors | None = None,
        mods: Mods | None = None,
    ) -> ForwardResult:
        if self.device_index != current.device():
            with torch.cuda.device(self.device_index):
                return self(q, k, v, softmax_tensors, None, mods)
        if self.views is not None:
            q, k, v = (view(tensor) for view, tensor in zip(self.views, (q, k, v), strict=True))
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % TMA_ALIGNMENT:
            q, k, v = map(aligned, (q, k, v))
        out = current.empty_strided(self.out_shape, self.out_strides, self.dtype)
        lse = current.empty_strided(self.lse_shape, self.lse_strides, torch.float32)
        features = None if self.is_plain else self._feature_args(softmax_tensors, self.batch, None, mods)
        workspace = scheduler_workspace(self.device_index)
        self.kernel(q, k, v, out, lse, workspace, self.scale_log2, self.max_ctas, features)
        return out, lse


class _RaggedPlan(_KernelPlan):
    """Knows nothing of how many rows and sequences there are."""

    def __init__(self, problem: AttentionProblem, num_sms: int, config: ForwardConfig | None, has: Given | None):
        super().__init__(problem, num_sms, config, has)
        if problem.ragged is None:
            raise TypeError("a dense problem has no schedule")
        self.schedule = Schedule(
            problem.ragged, by_keys=False, tile_rows=self.spec.config.tile_m, heads=problem.num_heads
        )
        self.schedule.max_tiles(problem.rows_q, problem.batch)
        self.kernel = get_kernel(self.spec)
        self.has_keys = problem.rows_k > 0
        self.heads, self.head_dim_v = problem.num_heads, problem.head_dim_v
        views = [TmaView(with_batch(facts)) for facts in problem[:3]]
        self.views = views if any(view.changes for view in views) else None

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_tensors: SoftmaxTensors = NO_SOFTMAX_TENSORS,
        ragged: RaggedTensors | None = None,
        mods: Mods | None = None,
    ) -> ForwardResult:
        if ragged is None:
            raise TypeError("the plan of a ragged batch needs its lengths")
        if self.device_index != current.device():
            with torch.cuda.device(self.device_index):
                return self(q, k, v, softmax_tensors, ragged, mods)
        total, heads, dim = q.shape[0], self.heads, self.head_dim_v
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        if self.views is not None:
            q, k, v = (view(tensor) for view, tensor in zip(self.views, (q, k, v), strict=True))
        if not self.has_keys:  # all that is left of the softmax is the sink; TMA needs a row to look at
            k, v = (tensor.new_zeros((1, 1, *tensor.shape[2:])) for tensor in (k, v))
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % TMA_ALIGNMENT:
            q, k, v = map(aligned, (q, k, v))
        row = heads * dim
        out = current.empty_strided((total, heads, dim), (row, dim, 1), self.dtype)
        lse = current.empty_strided((heads, total), (total, 1), torch.float32)
        sequences = self.schedule(ragged, total)
        features = self._feature_args(softmax_tensors, ragged.cu_seqlens_q.shape[0] - 1, sequences, mods)
        workspace = scheduler_workspace(self.device_index)
        as_batch = out.unsqueeze(0), lse.unsqueeze(0)
        self.kernel(q, k, v, *as_batch, workspace, self.scale_log2, self.max_ctas, features)
        return out, lse


_WORKSPACES: dict[tuple[int, int], torch.Tensor] = {}


def scheduler_workspace(device_index: int) -> torch.Tensor:
    """The scheduler's int32 (4,), zeroed once; the last CTA of each launch resets it.

    One per stream, whose launches follow each other. A captured launch gets its own, zeroed by the graph: graphs
    captured on one stream may be replayed at once on several.
    """
    if current.is_capturing():
        return torch.zeros(4, dtype=torch.int32, device=torch.device("cuda", device_index))
    key = device_index, current.raw_stream(device_index)
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
