"""The kernels that quantise to FP8: the specialisations they are built for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flashhopper.config.common import E4M3, Dtype

ScaleKind = Literal["power_of_two", "amax"]


def _quantize_name(spec: QuantizeRowsSpec | ValueScalesSpec | QuantizeValuesSpec) -> str:
    """For the names of kernels: what is not usual about the batch and the result."""
    return ("_ragged" if spec.ragged else "") + ("" if spec.out_dtype == E4M3 else f"_{spec.out_dtype}")


@dataclass(frozen=True)
class QuantizeRowsSpec:
    """The kernel that quantises Q or K; ``head_dim`` is the tensor's own, ``rows`` share a scale."""

    dtype: Dtype
    head_dim: int
    rows: int
    scales: ScaleKind
    hadamard: bool
    ragged: bool = False
    out_dtype: Dtype = E4M3

    @property
    def name(self) -> str:
        flags = ("_hadamard" if self.hadamard else "") + _quantize_name(self)
        return f"quantize_rows_{self.dtype}_d{self.head_dim}_{self.rows}_{self.scales}{flags}"


@dataclass(frozen=True)
class ValueStatisticsSpec:
    """The kernel that takes sums, minima and maxima of V's channels."""

    dtype: Dtype
    head_dim: int
    ragged: bool = False

    @property
    def name(self) -> str:
        return f"value_statistics_{self.dtype}_d{self.head_dim}{'_ragged' if self.ragged else ''}"


@dataclass(frozen=True)
class ValueScalesSpec:
    """The kernel that turns statistics into scales and means of V's channels."""

    dtype: Dtype
    head_dim: int
    scales: ScaleKind
    center: bool
    ragged: bool = False
    out_dtype: Dtype = E4M3
    """Of V once it is quantised."""

    @property
    def name(self) -> str:
        flags = ("_centred" if self.center else "") + _quantize_name(self)
        return f"value_scales_{self.dtype}_d{self.head_dim}_{self.scales}{flags}"


@dataclass(frozen=True)
class QuantizeValuesSpec:
    """The kernel that converts V and transposes it; with dtype e4m3 it transposes alone."""

    dtype: Dtype
    head_dim: int
    ragged: bool = False
    out_dtype: Dtype = E4M3

    @property
    def name(self) -> str:
        return f"quantize_values_{self.dtype}_d{self.head_dim}{_quantize_name(self)}"


QuantizeSpec = QuantizeRowsSpec | ValueStatisticsSpec | ValueScalesSpec | QuantizeValuesSpec
