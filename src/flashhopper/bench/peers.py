"""The implementations that the benchmarks run: this package and whichever peers are installed."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashhopper.bench.environment import hopper_problem
from flashhopper.bench.passes import FORWARD, LABELS, OURS, OURS_DETERMINISTIC, Pass
from flashhopper.bench.timing import Candidate

Call = Callable[[], object]
GradientCall = Callable[[], tuple[torch.Tensor, ...]]  # returns dq, dk, dv


class Peer(ABC):
    """One implementation of exact attention on ``(batch, seqlen, heads, head_dim)`` tensors.

    It may want another layout: ``arrange`` gives it, once, and ``restore`` turns what comes out back.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def label(self) -> str:
        return LABELS[self.name]

    @abstractmethod
    def available(self) -> str | None:
        """None if it can run here, else the reason why not."""

    @abstractmethod
    def version(self) -> str | None:
        """The installed version, None if it is not installed."""

    @abstractmethod
    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
        """A call without arguments that runs the forward once on arranged tensors."""

    def arrange(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` in the layout that the implementation takes; a leaf of autograd's graph if ``x`` is one."""
        return x

    def restore(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of ``arrange``."""
        return x

    def prepare(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
        """A call without arguments that runs the forward once; everything that is not the forward happens here."""
        return self.call(self.arrange(q), self.arrange(k), self.arrange(v), causal)

    def prepare_backward(
        self, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], dout: torch.Tensor, causal: bool
    ) -> GradientCall:
        """A call that runs the backward alone, over a graph that is recorded here; gradients in the peer's layout."""
        q, k, v = (self.arrange(x) for x in inputs)
        dout = self.arrange(dout)
        with self.session():
            out = self._first(self.call(q, k, v, causal)())
        return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    def prepare_train(
        self, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], dout: torch.Tensor, causal: bool
    ) -> GradientCall:
        """A call that runs forward and backward; gradients in the peer's layout."""
        q, k, v = (self.arrange(x) for x in inputs)
        dout = self.arrange(dout)
        forward = self.call(q, k, v, causal)
        return lambda: torch.autograd.grad(self._first(forward()), (q, k, v), dout)

    def ragged_call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int
    ) -> Call:
        """As :meth:`call`, of a ragged batch. NotImplementedError where there is no such function."""
        raise NotImplementedError(f"{self.name} has no function for ragged batches")

    def output(self, raw: object) -> torch.Tensor:
        """The ``(batch, seqlen, heads, head_dim)`` output in what a prepared call returned."""
        return self.restore(self._first(raw))

    def _first(self, raw: object) -> torch.Tensor:
        first = raw[0] if isinstance(raw, tuple) else raw
        if not isinstance(first, torch.Tensor):
            raise TypeError(f"{self.name} returned {type(first).__name__}, expected a tensor")
        return first

    def session(self) -> AbstractContextManager[object]:
        """Entered around runs of prepared calls."""
        return nullcontext()

    def candidate(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Candidate:
        return Candidate(self.name, self.prepare(q, k, v, causal), self.session)


class PackagePeer(Peer):
    """A package that exports ``flash_attn_func(q, k, v, causal=...)``; ``modules`` are tried in order."""

    def __init__(self, name: str, modules: Sequence[str], distributions: Sequence[str], **options: Any) -> None:
        super().__init__(name)
        self.modules = tuple(modules)
        self.distributions = tuple(distributions)
        self.options = options

    def _module(self) -> str | None:
        return next((module for module in self.modules if _is_installed(module)), None)

    def available(self) -> str | None:
        module = self._module()
        if module is None:
            return f"not installed (no module {' or '.join(self.modules)})"
        problem = hopper_problem()
        if problem is not None:
            return problem
        try:
            importlib.import_module(module)
        except Exception as error:  # a peer built for another torch fails in its own way: that is its reason
            return f"import {module} failed: {type(error).__name__}: {error}"
        return None

    def version(self) -> str | None:
        for distribution in self.distributions:
            try:
                return importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
        imported = sys.modules.get(self._module() or "")  # a source tree on the path has no metadata
        return getattr(imported, "__version__", None)

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
        function, options = self.function("flash_attn_func"), self.options
        return lambda: function(q, k, v, causal=causal, **options)

    def ragged_call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int
    ) -> Call:
        function = self.function("flash_attn_varlen_func")
        lengths: dict[str, Any] = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        if "max_seqlen_q" in inspect.signature(function).parameters:  # not every version of FA4 asks for it
            lengths |= {"max_seqlen_q": max_seqlen, "max_seqlen_k": max_seqlen}
        return lambda: function(q, k, v, **lengths, **self.options)

    def function(self, name: str) -> Callable[..., object]:
        """One of the package's functions. ModuleNotFoundError if it is not installed, AttributeError if it has none."""
        module = self._module()
        if module is None:
            raise ModuleNotFoundError(f"{self.name} is not installed")
        function: Callable[..., object] = getattr(importlib.import_module(module), name)
        return function


class SdpaPeer(Peer):
    """``torch.nn.functional.scaled_dot_product_attention`` held to one backend."""

    cudnn: Any = torch.backends.cudnn  # untyped in some versions of torch

    def __init__(self, name: str, backend: SDPBackend) -> None:
        super().__init__(name)
        self.backend = backend

    def available(self) -> str | None:
        problem = hopper_problem()
        if problem is None and self.backend is SDPBackend.CUDNN_ATTENTION and not self.cudnn.is_available():
            problem = "this torch was built without cuDNN"
        return problem

    def version(self) -> str | None:
        if self.backend is SDPBackend.CUDNN_ATTENTION:
            version = self.cudnn.version() if self.cudnn.is_available() else None
            return None if version is None else f"{version // 10000}.{version // 100 % 100}.{version % 100}"
        return f"torch {torch.__version__}"

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
        attention = torch.nn.functional.scaled_dot_product_attention
        return lambda: attention(q, k, v, is_causal=causal)

    def arrange(self, x: torch.Tensor) -> torch.Tensor:
        """The layout SDPA is documented for: ``(batch, heads, seqlen, head_dim)``."""
        return x.detach().transpose(1, 2).contiguous().requires_grad_(x.requires_grad)

    def restore(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)

    def session(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = sdpa_kernel(self.backend)
        return context


def all_peers(kind: Pass = FORWARD) -> dict[str, Peer]:
    """Every implementation that has ``kind``, ours first."""
    peers: list[Peer] = [
        PackagePeer(OURS, ["flashhopper"], ["flashhopper"]),
        PackagePeer(OURS_DETERMINISTIC, ["flashhopper"], ["flashhopper"], deterministic=True),
        PackagePeer("fa4", ["flash_attn.cute"], ["flash-attn-4"]),
        PackagePeer("fa3", ["flash_attn_interface", "fa3_fwd_interface"], ["flash-attn-3", "fa3-fwd"]),
        SdpaPeer("cudnn", SDPBackend.CUDNN_ATTENTION),
        SdpaPeer("fa2", SDPBackend.FLASH_ATTENTION),
    ]
    return {peer.name: peer for peer in peers if peer.name in kind.names}


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False
