"""What a kernel has beside plain and causal attention."""

from __future__ import annotations

from dataclasses import dataclass, fields

from flashhopper.config.common import ConfigError
from flashhopper.programs import Program, TensorType
from flashhopper.slopes import scales_gradients


@dataclass(frozen=True)
class Features:
    """What a kernel has beside plain and causal attention. Each costs something, so each is compiled in on request."""

    window: bool = False
    """A row sees a run of keys around its own position: ``window_size``."""
    chunk: bool = False
    """A row sees the keys of its chunk: ``attention_chunk``. Comes with ``window``."""
    softcap: bool = False
    alibi: bool = False
    sink: bool = False
    """A learnable sink in the denominator. The backward needs only the LSE that contains it."""
    ragged: bool = False
    """Sequences one after another in one tensor: ``cu_seqlens``."""
    score_mod: Program | None = None
    mask_mod: Program | None = None

    def __post_init__(self) -> None:
        if self.chunk and not self.window:
            raise ConfigError("chunk without window: a chunk is cut out of a window, which may be unbounded")

    @property
    def names(self) -> list[str]:
        return [field.name for field in fields(self) if getattr(self, field.name)]

    @property
    def has_mods(self) -> bool:
        """Whether users' functions are traced into the kernel."""
        return self.score_mod is not None or self.mask_mod is not None

    @property
    def mod_tensors(self) -> tuple[TensorType, ...]:
        """What those functions read."""
        program = self.score_mod or self.mask_mod
        return () if program is None else program.tensors

    @property
    def scales_gradients(self) -> bool:
        """Whether dS has a factor of its own for each score."""
        return self.softcap or (self.score_mod is not None and scales_gradients(self.score_mod))


SWITCHES = tuple(field.name for field in fields(Features) if field.default is False)
"""The features that are on or off."""


PLAIN = Features()
FP8_FEATURES = ("window", "chunk", "ragged")


def mask_name(features: Features, causal: bool) -> str:
    """For the names of kernels: ``causal``, ``window_softcap``, ``full_ragged``."""
    mask = [] if features.window else ["causal" if causal else "full"]
    return "_".join(mask + features.names)


def check_features(features: Features, causal: bool) -> None:
    if features.window and causal:
        raise ConfigError("causal with a window: a causal mask is a window that ends at the row's own position")
