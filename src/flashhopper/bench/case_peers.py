"""Implementations of masks, softcap, sinks and ragged batches: what each is called with, and what it does not have."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from flashhopper.bench.cases import Case
from flashhopper.bench.environment import hopper_problem
from flashhopper.bench.passes import LABELS, OURS
from flashhopper.bench.peers import PackagePeer, Peer, SdpaPeer
from flashhopper.reference import visible_keys

OURS_DENSE = "ours_dense"
CASE_NAMES = (OURS, OURS_DENSE, "fa4", "fa3", "flex", "cudnn")
CASE_LABELS = {**LABELS, OURS_DENSE: "dense", "flex": "FlexAttention"}
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class CaseTensors:
    """q, k and v of a case, ``(batch, seqlen, h, d)`` or ``(total, h, d)``, and what goes with them."""

    case: Case
    inputs: Tensors
    cu_seqlens: torch.Tensor
    sink: torch.Tensor | None

    @classmethod
    def random(cls, case: Case, generator: torch.Generator) -> CaseTensors:
        """Standard normal, on the generator's device."""
        device = generator.device
        rows = (sum(case.lengths),) if case.ragged else (len(case.lengths), case.lengths[0])
        dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}[case.dtype]
        q, k, v = (
            torch.randn(*rows, case.h, case.d, generator=generator, device=device, dtype=dtype) for _ in range(3)
        )
        cu_seqlens = torch.tensor([0, *accumulate(case.lengths)], dtype=torch.int32, device=device)
        sink = torch.randn(case.h, generator=generator, device=device, dtype=dtype) if case.sink else None
        return cls(case, (q, k, v), cu_seqlens, sink)


def same(x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass(frozen=True)
class Prepared:
    """An implementation's forward on leaves in its own layout; ``arrange`` goes there, ``restore`` back."""

    forward: Callable[[], torch.Tensor]
    leaves: Tensors
    arrange: Callable[[torch.Tensor], torch.Tensor] = same
    restore: Callable[[torch.Tensor], torch.Tensor] = same


class CasePeer(ABC):
    """One implementation; ``base`` says whether and in which version it is installed."""

    def __init__(self, base: Peer, has_backward: bool = True) -> None:
        self.base = base
        self.has_backward = has_backward

    @property
    def name(self) -> str:
        return self.base.name

    def available(self) -> str | None:
        return self.base.available()

    def version(self) -> str | None:
        return self.base.version()

    def session(self) -> AbstractContextManager[object]:
        return self.base.session()

    @abstractmethod
    def prepare(self, tensors: CaseTensors) -> Prepared:
        """NotImplementedError where the implementation has no such case."""


class PackageCasePeer(CasePeer):
    """FA3's argument names. ``unbounded`` is what a window's side without bound is called."""

    base: PackagePeer

    def __init__(
        self, base: PackagePeer, *, unbounded: int | None = -1, has_sinks: bool = True, has_backward: bool = True
    ) -> None:
        super().__init__(base, has_backward)
        self.unbounded, self.has_sinks = unbounded, has_sinks

    def prepare(self, tensors: CaseTensors) -> Prepared:
        case = tensors.case
        left, right = (self.unbounded if side < 0 else side for side in case.window_size)
        options: dict[str, Any] = {"causal": case.causal, "window_size": (left, right), "softcap": case.softcap}
        if tensors.sink is not None:
            if not self.has_sinks:
                raise NotImplementedError("no sinks")
            options["learnable_sink"] = tensors.sink
        function = self.base.function("flash_attn_varlen_func" if case.ragged else "flash_attn_func")
        if case.ragged:
            options |= {"cu_seqlens_q": tensors.cu_seqlens, "cu_seqlens_k": tensors.cu_seqlens}
            if "max_seqlen_q" in inspect.signature(function).parameters:  # not every version of FA4 asks for it
                options |= {"max_seqlen_q": max(case.lengths), "max_seqlen_k": max(case.lengths)}
        q, k, v = tensors.inputs
        return Prepared(lambda: first(function(q, k, v, **options)), tensors.inputs)


class FlexPeer(CasePeer):
    """PyTorch's FlexAttention, compiled: masks as a block mask, softcap as a score_mod, sinks by its LSE."""

    def __init__(self) -> None:
        super().__init__(FlexInstallation("flex"))

    def prepare(self, tensors: CaseTensors) -> Prepared:
        torch._dynamo.reset()  # else the ninth case would run into the limit of recompilations
        arrange = self._packed if tensors.case.ragged else heads_first
        q, k, v = (arrange(x) for x in tensors.inputs)
        compiled = torch.compile(self.function(tensors, q), dynamic=False, fullgraph=True)
        restore = self._unpacked if tensors.case.ragged else rows_first
        return Prepared(lambda: compiled(q, k, v), (q, k, v), arrange, restore)

    def function(self, tensors: CaseTensors, q: torch.Tensor) -> Callable[..., torch.Tensor]:
        """The attention that is compiled, of tensors ``(batch, h, seqlen, d)``."""
        case, sink, mask = tensors.case, tensors.sink, block_mask(tensors, q.shape[2])
        score_mod = None

        if case.softcap > 0:
            softcap = case.softcap

            def score_mod(score: torch.Tensor, *indices: torch.Tensor) -> torch.Tensor:
                return softcap * torch.tanh(score / softcap)

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if sink is None:
                return first(flex_attention(q, k, v, score_mod=score_mod, block_mask=mask))
            request = AuxRequest(lse=True)
            out, aux = flex_attention(q, k, v, score_mod=score_mod, block_mask=mask, return_aux=request)
            lse: Any = aux.lse  # there, since it was asked for
            return out * torch.sigmoid(lse - sink[:, None]).unsqueeze(-1).to(out.dtype)

        return attention

    @staticmethod
    def _packed(x: torch.Tensor) -> torch.Tensor:
        return heads_first(x[None])

    @staticmethod
    def _unpacked(x: torch.Tensor) -> torch.Tensor:
        return rows_first(x)[0]


class FlexInstallation(Peer):
    """Part of torch."""

    def available(self) -> str | None:
        return hopper_problem()

    def version(self) -> str | None:
        return f"torch {torch.__version__}"

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Callable[[], object]:
        return lambda: flex_attention(q, k, v)


def block_mask(tensors: CaseTensors, seqlen: int) -> BlockMask | None:
    """FlexAttention's mask: sequences as documents of one, whose masks align as positions in the whole do."""
    case, device = tensors.case, tensors.inputs[0].device
    left, right = case.window_size
    right = 0 if case.causal else right
    if not case.ragged and left < 0 and right < 0:
        return None
    lengths = torch.tensor(case.lengths, device=device)
    document = torch.arange(len(case.lengths), device=device).repeat_interleave(lengths)

    def visible(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        seen = i == i
        if case.ragged:
            seen = document[i] == document[j]
        if left >= 0:
            seen = seen & (j >= i - left)
        if right >= 0:
            seen = seen & (j <= i + right)
        return seen

    return create_block_mask(visible, None, None, seqlen, seqlen, device=str(device))


class CudnnCasePeer(CasePeer):
    """PyTorch's SDPA held to cuDNN: windows as a boolean mask, ragged batches as nested tensors."""

    def __init__(self, base: SdpaPeer) -> None:
        super().__init__(base)

    def prepare(self, tensors: CaseTensors) -> Prepared:
        case = tensors.case
        if case.softcap > 0 or tensors.sink is not None:
            raise NotImplementedError("no softcap" if case.softcap > 0 else "no sinks")
        attention = torch.nn.functional.scaled_dot_product_attention
        if case.ragged:
            q, k, v = tensors.inputs
            offsets = tensors.cu_seqlens.long()

            def nested(x: torch.Tensor) -> torch.Tensor:
                lengths = min(case.lengths), max(case.lengths)
                result: torch.Tensor = torch.nested.nested_tensor_from_jagged(x, offsets, None, 1, *lengths)
                return result.transpose(1, 2)

            def forward() -> torch.Tensor:
                out = attention(nested(q), nested(k), nested(v), is_causal=case.causal)
                return out.transpose(1, 2).values()

            return Prepared(forward, tensors.inputs)
        q, k, v = (heads_first(x) for x in tensors.inputs)
        mask = None
        if case.window_size != (-1, -1):
            seqlen = q.shape[2]
            columns = torch.arange(seqlen, device=q.device)
            visible = visible_keys(seqlen, seqlen, device=q.device, **case.masks)
            mask = (columns >= visible.starts[:, None]) & (columns < visible.ends[:, None])
        causal = case.causal and mask is None
        return Prepared(
            lambda: attention(q, k, v, attn_mask=mask, is_causal=causal), (q, k, v), heads_first, rows_first
        )


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """``(batch, heads, seqlen, head_dim)``, a leaf if ``x`` is one that requires a gradient."""
    return x.detach().transpose(1, 2).contiguous().requires_grad_(x.requires_grad)


def rows_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2)


def first(raw: object) -> torch.Tensor:
    out = raw[0] if isinstance(raw, tuple) else raw
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"got {type(out).__name__}, expected a tensor")
    return out


def case_peers() -> dict[str, CasePeer]:
    """Every implementation, ours first; ours on dense batches is run beside them, see :mod:`case_run`."""
    fa3 = PackagePeer("fa3", ["flash_attn_interface", "fa3_fwd_interface"], ["flash-attn-3", "fa3-fwd"])
    peers: list[CasePeer] = [
        PackageCasePeer(PackagePeer(OURS, ["flashhopper"], ["flashhopper"])),
        PackageCasePeer(PackagePeer("fa4", ["flash_attn.cute"], ["flash-attn-4"]), unbounded=None),
        PackageCasePeer(fa3, has_sinks=False, has_backward=False),
        FlexPeer(),
        CudnnCasePeer(SdpaPeer("cudnn", SDPBackend.CUDNN_ATTENTION)),
    ]
    return {peer.name: peer for peer in peers}
