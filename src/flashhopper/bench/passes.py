"""What a grid run times: the forward, the backward, or both; and the implementations that have it."""

from __future__ import annotations

from dataclasses import dataclass

OURS = "ours"
OURS_DETERMINISTIC = "ours_deterministic"
OUR_NAMES = (OURS, OURS_DETERMINISTIC)
PEERS = ("fa4", "fa3", "cudnn", "fa2")
NAMES = (OURS, *PEERS)
LABELS = {
    "ours": "FlashHopper",
    "ours_deterministic": "deterministic",
    "fa4": "FA4",
    "fa3": "FA3",
    "cudnn": "cuDNN",
    "fa2": "FA2",
}


@dataclass(frozen=True)
class Pass:
    """One of the benchmark's passes. ``name`` is also its command, its result file, its markers and its picture.

    ``flop_factor`` is its work in units of the forward's two matrix products: the backward has five of the same size
    (S, dP, dV, dQ, dK).
    """

    name: str
    title: str
    flop_factor: float
    names: tuple[str, ...]
    """Implementations in the order of tables, ours first."""
    has_gradients: bool = True

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in OUR_NAMES)

    @property
    def start_marker(self) -> str:
        return f"<!-- {self.name}-table:start -->"

    @property
    def end_marker(self) -> str:
        return f"<!-- {self.name}-table:end -->"


GRADIENT_NAMES = (*OUR_NAMES, "fa4", "cudnn", "fa2")  # FA3's package on PyPI, fa3-fwd, is the forward alone
FORWARD = Pass("forward", "Attention forward", 1.0, NAMES, has_gradients=False)
BACKWARD = Pass("backward", "Attention backward", 2.5, GRADIENT_NAMES)
TRAIN = Pass("train", "Attention forward + backward", 3.5, GRADIENT_NAMES)
PASSES = {kind.name: kind for kind in (FORWARD, BACKWARD, TRAIN)}
