"""One attention call as a value: what was asked, and the only place where it is validated."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashhopper.config import Dtype
from flashhopper.options import AttentionOptions, Mask, check_options, mask_of

MAX_HEAD_DIM = 256
MAX_EXTENT = 2**31 - 1024  # rows, up to the end of the last tile, and heads are 32-bit; offsets in elements 64-bit
MAX_WINDOW_ROWS = 2**30 - 1024  # sums of a position and a window's sides must fit 32 bits
DTYPES: dict[torch.dtype, Dtype] = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
CPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class TensorFacts(NamedTuple):
    """What validation and the launch need to know of a tensor, without its data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorFacts:
        # As cls(...) does it, but half a microsecond sooner; every call makes three.
        return tuple.__new__(cls, (tensor.shape, tensor.stride(), tensor.dtype, tensor.device))


class RaggedTensors(NamedTuple):
    """Where the sequences of a ragged batch lie: FA3's arguments of these names."""

    max_seqlen_q: int
    max_seqlen_k: int
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    seqused_q: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None


class RaggedFacts(NamedTuple):
    """:class:`RaggedTensors` without the data: nothing is read from a GPU."""

    max_seqlen_q: int
    max_seqlen_k: int
    cu_seqlens_q: TensorFacts
    cu_seqlens_k: TensorFacts
    seqused_q: TensorFacts | None
    seqused_k: TensorFacts | None

    @classmethod
    def of(cls, ragged: RaggedTensors) -> RaggedFacts:
        """TypeError for a length that is not an int or lengths that are not a tensor; checks nothing else."""
        for name in ("max_seqlen_q", "max_seqlen_k"):
            value = getattr(ragged, name)
            if not isinstance(value, (int, torch.SymInt)) or isinstance(
                value, bool
            ):  # here: as part of a plan's key, True is 1
                raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        cu_seqlens = [_lengths_facts(name, getattr(ragged, name)) for name in ("cu_seqlens_q", "cu_seqlens_k")]
        seqused = [
            None if value is None else _lengths_facts(name, value, " or None")
            for name, value in (("seqused_q", ragged.seqused_q), ("seqused_k", ragged.seqused_k))
        ]
        return cls(ragged.max_seqlen_q, ragged.max_seqlen_k, *cu_seqlens, *seqused)

    @property
    def batch(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1

    def check(self, device: torch.device) -> None:
        """TypeError or ValueError unless the lengths fit each other and lie on q's device."""
        for name, value in (("max_seqlen_q", self.max_seqlen_q), ("max_seqlen_k", self.max_seqlen_k)):
            if exceeds(value) or value < 0:
                raise ValueError(f"{name} is {value}; accepted are lengths from 0 to {MAX_EXTENT}")
        first = self.cu_seqlens_q.shape
        if len(first) != 1 or first[0] == 0:
            raise ValueError(f"cu_seqlens_q has shape {tuple(first)}; it must be (batch + 1,)")
        for name, facts, expected in (
            ("cu_seqlens_q", self.cu_seqlens_q, first[0]),
            ("cu_seqlens_k", self.cu_seqlens_k, first[0]),
            ("seqused_q", self.seqused_q, first[0] - 1),
            ("seqused_k", self.seqused_k, first[0] - 1),
        ):
            if facts is None:
                continue
            if facts.dtype != torch.int32:
                raise TypeError(f"{name} has dtype {facts.dtype}; accepted is torch.int32")
            if facts.device != device:
                raise ValueError(f"{name} is on {facts.device}, q on {device}: all must be on the same device")
            if tuple(facts.shape) != (expected,):
                raise ValueError(
                    f"{name} has shape {tuple(facts.shape)}, cu_seqlens_q {tuple(first)}: it must be ({expected},)"
                )
            if facts.stride[0] != 1 and expected > 1:
                raise ValueError(f"{name} has strides {facts.stride}; it must be contiguous")


def _lengths_facts(name: str, value: object, otherwise: str = "") -> TensorFacts:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor{otherwise}, got {type(value).__name__}")
    return TensorFacts.of(value)


class SoftmaxTensors(NamedTuple):
    """What takes part in the softmax beside q·k: the public functions' arguments of these names."""

    learnable_sink: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None


NO_SOFTMAX_TENSORS = SoftmaxTensors()


class AttentionProblem(NamedTuple):
    """One attention call: hashable, printable, and valid once :meth:`validate` has returned.

    Shapes of a dense one: q ``(batch, seqlen_q, heads, head_dim)``, k ``(batch, seqlen_k, heads_k, head_dim)``, v
    ``(batch, seqlen_k, heads_k, head_dim_v)``. Of a ragged one: q ``(total_q, heads, head_dim)``, k ``(total_k,
    heads_k, head_dim)``, v ``(total_k, heads_k, head_dim_v)``; its ``seqlen_q`` and ``seqlen_k`` are the bounds
    ``max_seqlen_q`` and ``max_seqlen_k``.
    """

    q: TensorFacts
    k: TensorFacts
    v: TensorFacts
    options: AttentionOptions
    ragged: RaggedFacts | None = None

    @classmethod
    def from_tensors(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: AttentionOptions,
        ragged: RaggedTensors | None = None,
    ) -> AttentionProblem:
        """Gather the facts of a call. Raises TypeError if q, k, v or lengths are no tensors; checks nothing else."""
        try:
            facts = TensorFacts.of(q), TensorFacts.of(k), TensorFacts.of(v)
        except (AttributeError, TypeError):
            for name, value in (("q", q), ("k", k), ("v", v)):
                if not isinstance(value, torch.Tensor):
                    raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}") from None
            raise
        return cls(*facts, options, None if ragged is None else RaggedFacts.of(ragged))

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.ragged is None else self.ragged.batch

    @property
    def seqlen_q(self) -> int:
        return self.q.shape[1] if self.ragged is None else self.ragged.max_seqlen_q

    @property
    def seqlen_k(self) -> int:
        return self.k.shape[1] if self.ragged is None else self.ragged.max_seqlen_k

    @property
    def num_heads(self) -> int:
        return self.q.shape[-2]

    @property
    def num_heads_k(self) -> int:
        return self.k.shape[-2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def head_dim_v(self) -> int:
        return self.v.shape[-1]

    @property
    def out_shape(self) -> tuple[int, ...]:
        """``(batch, seqlen_q, heads, head_dim_v)``, or ``(total_q, heads, head_dim_v)``."""
        return *self.q.shape[:-1], self.head_dim_v

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """``(batch, heads, seqlen_q)``, or ``(heads, total_q)``."""
        return *self.q.shape[:-3], self.num_heads, self.q.shape[-3]

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def softmax_scale(self) -> float:
        """The factor on q·k: as given, or ``head_dim ** -0.5``."""
        scale = self.options.softmax_scale
        return self.head_dim**-0.5 if scale is None else float(scale)

    def validate(self) -> AttentionProblem:
        """Return self, or raise one error that names the argument, what was got and what is accepted.

        TypeError: a wrong type or dtype. ValueError: shapes, ranges, devices. NotImplementedError: a combination that
        the support table in the README lists as not there yet.
        """
        self._check_dtypes_and_devices()
        self._check_shapes()
        if self.ragged is not None:
            self.ragged.check(self.device)
        self._check_options()
        return self

    def _tensors(self) -> tuple[tuple[str, TensorFacts], ...]:
        return ("q", self.q), ("k", self.k), ("v", self.v)

    def _check_dtypes_and_devices(self) -> None:
        for name, facts in self._tensors():
            if facts.device.type not in ("cpu", "cuda"):
                raise ValueError(f"{name} is on device {facts.device}; accepted are cpu and cuda tensors")
            if facts.device != self.q.device:
                raise ValueError(f"{name} is on {facts.device}, q on {self.q.device}: all must be on the same device")
            accepted = CPU_DTYPES if facts.device.type == "cpu" else tuple(DTYPES)
            if facts.dtype not in accepted:
                names = ", ".join(str(dtype) for dtype in accepted)
                raise TypeError(f"{name} has dtype {facts.dtype}; accepted on {facts.device.type} are {names}")
            if facts.dtype != self.q.dtype:
                raise TypeError(f"{name} has dtype {facts.dtype}, q has {self.q.dtype}: all must have the same dtype")

    def _check_shapes(self) -> None:
        layout = "batch, seqlen, heads, head_dim" if self.ragged is None else "total, heads, head_dim"
        dimensions = layout.count(",") + 1
        for name, facts in self._tensors():
            if len(facts.shape) != dimensions:
                raise ValueError(f"{name} must have {dimensions} dimensions ({layout}), got shape {tuple(facts.shape)}")
            if any(map(exceeds, facts.shape)):
                raise ValueError(f"{name} has shape {tuple(facts.shape)}; each extent may be at most {MAX_EXTENT}")
        for name, facts in self._tensors():
            if self.ragged is None and facts.shape[0] != self.batch:
                raise ValueError(f"{name} has batch size {facts.shape[0]}, q has {self.batch}: they must be equal")
        for dim, what in ((-3, "seqlen" if self.ragged is None else "total length"), (-2, "heads")):
            if self.v.shape[dim] != self.k.shape[dim]:
                raise ValueError(f"v has {what} {self.v.shape[dim]}, k has {self.k.shape[dim]}: they must be equal")
        if self.k.shape[-1] != self.head_dim:
            raise ValueError(f"k has head_dim {self.k.shape[-1]}, q has {self.head_dim}: they must be equal")
        for name, facts in (("q", self.q), ("v", self.v)):
            head_dim = facts.shape[-1]
            if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
                raise ValueError(
                    f"{name} has head_dim {head_dim}; accepted are multiples of 8 from 8 to {MAX_HEAD_DIM}"
                )
        if self.num_heads_k == 0 or self.num_heads == 0:
            raise ValueError(f"q has {self.num_heads} heads, k has {self.num_heads_k}: at least 1 each is needed")
        if self.num_heads % self.num_heads_k:
            raise ValueError(
                f"q has {self.num_heads} heads, k has {self.num_heads_k}: q's must be a multiple of k's (GQA/MQA)"
            )
        for name, facts in self._tensors():
            if facts.stride[-1] != 1:
                raise ValueError(
                    f"{name} has strides {facts.stride}; the last dimension (head_dim) must be contiguous (stride 1)"
                )

    def _check_options(self) -> None:
        check_options(self.options)
        limited = self.device.type == "cuda" and any(
            exceeds(rows, MAX_WINDOW_ROWS) for rows in (self.rows_q, self.rows_k)
        )
        if limited and (self.mask.window is not None or self.ragged is not None):
            for name, rows in (("q", self.rows_q), ("k", self.rows_k)):
                if exceeds(rows, MAX_WINDOW_ROWS):
                    raise ValueError(
                        f"{name} has {rows} rows; at most {MAX_WINDOW_ROWS} with windows, chunks or cu_seqlens"
                    )

    @property
    def rows_q(self) -> int:
        """Extent of q along the sequence: seqlen_q, or the total of a ragged batch."""
        return self.q.shape[-3]

    @property
    def rows_k(self) -> int:
        return self.k.shape[-3]

    @property
    def mask(self) -> Mask:
        return mask_of(self.options, self.seqlen_q, self.seqlen_k)

    def check_softmax_tensors(self, tensors: SoftmaxTensors) -> None:
        """TypeError, ValueError or NotImplementedError unless these fit the problem."""
        if tensors.learnable_sink is not None:
            self._check_sink(tensors.learnable_sink)
        if tensors.alibi_slopes is not None:
            self._check_slopes(tensors.alibi_slopes)

    def _check_sink(self, sink: torch.Tensor) -> None:
        if not isinstance(sink, torch.Tensor):
            raise TypeError(f"learnable_sink must be a torch.Tensor or None, got {type(sink).__name__}")
        if not sink.dtype.is_floating_point:
            raise TypeError(f"learnable_sink has dtype {sink.dtype}; accepted are floating-point types")
        if tuple(sink.shape) != (self.num_heads,):
            raise ValueError(
                f"learnable_sink has shape {tuple(sink.shape)}; one number per head of q: ({self.num_heads},)"
            )
        if sink.device != self.device:
            raise ValueError(f"learnable_sink is on {sink.device}, q on {self.device}: all must be on the same device")

    def _check_slopes(self, slopes: torch.Tensor) -> None:
        if not isinstance(slopes, torch.Tensor):
            raise TypeError(f"alibi_slopes must be a torch.Tensor or None, got {type(slopes).__name__}")
        if slopes.dtype != torch.float32:
            raise TypeError(f"alibi_slopes has dtype {slopes.dtype}; accepted is torch.float32")
        if tuple(slopes.shape) not in ((self.num_heads,), (self.batch, self.num_heads)):
            raise ValueError(
                f"alibi_slopes has shape {tuple(slopes.shape)}; accepted are (heads,), here ({self.num_heads},), and"
                f" (batch, heads), here ({self.batch}, {self.num_heads})"
            )
        if slopes.device != self.device:
            raise ValueError(f"alibi_slopes is on {slopes.device}, q on {self.device}: all must be on the same device")
        if slopes.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError("alibi_slopes requires a gradient, which is not there yet; detach it")


def exceeds(extent: int | torch.SymInt, limit: int = MAX_EXTENT) -> bool:
    """Never of a symbolic extent, whose range the question would narrow for good: the call itself will ask."""
    return isinstance(extent, int) and extent > limit


def split_qkv(
    qkv: torch.Tensor, num_heads_q: int | None, rows: str = "batch, seqlen"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of q, k and v in a packed tensor whose dimensions before the heads are ``rows``; the errors of
    :func:`flash_attn_qkvpacked_func`.
    """
    if not isinstance(qkv, torch.Tensor):
        raise TypeError(f"qkv must be a torch.Tensor, got {type(qkv).__name__}")
    shape, at = tuple(qkv.shape), rows.count(",") + 1
    if qkv.dim() == at + 3:
        if shape[at] != 3:
            raise ValueError(f"qkv has shape {shape}; with {at + 3} dimensions it is ({rows}, 3, heads, head_dim)")
        if num_heads_q is not None:
            raise ValueError(f"num_heads_q is {num_heads_q}; with qkv of {at + 3} dimensions it must be None")
        q, k, v = qkv.unbind(at)
        return q, k, v
    if qkv.dim() != at + 2:
        raise ValueError(f"qkv has shape {shape}; accepted are {at + 3} dimensions, or {at + 2} with num_heads_q")
    if not isinstance(num_heads_q, int) or isinstance(num_heads_q, bool):
        raise TypeError(f"num_heads_q must be an int for qkv of {at + 2} dimensions, got {type(num_heads_q).__name__}")
    rest = shape[at] - num_heads_q
    heads_k, odd = rest // 2, rest % 2  # not divmod, which symbolic sizes do not have
    if num_heads_q < 1 or heads_k < 1 or odd:
        raise ValueError(
            f"qkv has shape {shape} with {shape[at]} heads; num_heads_q={num_heads_q} leaves no k and v alike"
        )
    q, k, v = qkv.split([num_heads_q, heads_k, heads_k], dim=at)
    return q, k, v
