"""One cell's work for each pass: its tensors, what is called, how the result is checked, the memory it takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch

from flashhopper.bench.check import Check, check_gradients, check_outputs, random_inputs, random_like
from flashhopper.bench.grid import Cell
from flashhopper.bench.passes import BACKWARD, FORWARD, TRAIN, Pass
from flashhopper.bench.peers import Call, GradientCall, Peer
from flashhopper.bench.timing import Candidate

MEBIBYTE = 2.0**20


class Work(ABC):
    """A cell's tensors, shared by all implementations, and what is done with them."""

    def __init__(self, cell: Cell, generator: torch.Generator) -> None:
        self.cell = cell
        self.inputs = random_inputs(cell, generator)

    def candidate(self, peer: Peer) -> Candidate:
        return Candidate(peer.name, self.prepare(peer), peer.session)

    @abstractmethod
    def prepare(self, peer: Peer) -> Call:
        """The call that is timed."""

    @abstractmethod
    def check(self, peers: Iterable[Peer]) -> list[Check]:
        """Run each implementation once and compare its result with fp32."""

    def memory(self, peer: Peer) -> dict[str, float]:
        """MiB by what they are for; empty for a pass that keeps nothing."""
        return {}


class ForwardWork(Work):
    def prepare(self, peer: Peer) -> Call:
        return peer.prepare(*self.inputs, self.cell.causal)

    def check(self, peers: Iterable[Peer]) -> list[Check]:
        return check_outputs(self.cell, self.inputs, {peer.name: self._output(peer) for peer in peers})

    def _output(self, peer: Peer) -> Callable[[], torch.Tensor]:
        def output() -> torch.Tensor:
            call = self.prepare(peer)
            with peer.session():
                return peer.output(call())

        return output


class GradientWork(Work):
    """Inputs are leaves that require gradients; ``dout`` is random, as of a layer that follows."""

    def __init__(self, cell: Cell, generator: torch.Generator) -> None:
        super().__init__(cell, generator)
        self.dout = random_like(self.inputs[2], generator)  # self-attention: out has the shape of v
        for x in self.inputs:
            x.requires_grad_()

    @abstractmethod
    def prepare(self, peer: Peer) -> GradientCall: ...

    def check(self, peers: Iterable[Peer]) -> list[Check]:
        gradients = {peer.name: self._gradients(peer) for peer in peers}
        return check_gradients(self.cell, self.inputs, self.dout, gradients)

    def memory(self, peer: Peer) -> dict[str, float]:
        """What the forward keeps for the backward, inputs included, and the backward's peak beyond that.

        One backward over a graph of its own: the hooks that see what is saved would slow the one that is timed.
        """
        storages: dict[int, int] = {}

        def note(x: torch.Tensor) -> torch.Tensor:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x.detach()  # an output kept as it is would hold its own graph, and that the output, for good

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            backward = peer.prepare_backward(self.inputs, self.dout, self.cell.causal)
        saved = sum(storages.values())
        return {"saved_mib": _mebibytes(saved), "backward_peak_mib": _mebibytes(peak_extra_bytes(backward))}

    def _gradients(self, peer: Peer) -> Callable[[], list[torch.Tensor]]:
        def gradients() -> list[torch.Tensor]:
            call = self.prepare(peer)
            with peer.session():
                return [peer.restore(gradient) for gradient in call()]

        return gradients


class BackwardWork(GradientWork):
    def prepare(self, peer: Peer) -> GradientCall:
        return peer.prepare_backward(self.inputs, self.dout, self.cell.causal)


class TrainWork(GradientWork):
    def prepare(self, peer: Peer) -> GradientCall:
        return peer.prepare_train(self.inputs, self.dout, self.cell.causal)


def work_of(kind: Pass, cell: Cell, generator: torch.Generator) -> Work:
    works: dict[str, type[Work]] = {FORWARD.name: ForwardWork, BACKWARD.name: BackwardWork, TRAIN.name: TrainWork}
    return works[kind.name](cell, generator)


def peak_extra_bytes(call: Callable[[], Any]) -> int:
    """The most that one call has allocated at a time on the GPU, its results included."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def _mebibytes(size: int) -> float:
    return round(size / MEBIBYTE, 2)
