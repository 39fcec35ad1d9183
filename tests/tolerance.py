"""How close a result must come to the reference: section 5 of the design, shared by unit and GPU tests."""

from __future__ import annotations

import torch

SCORE_ULPS = 16  # error of a score, a sum of head_dim products in fp32, in units of its last place; 8 were seen
CANCELLED = 1e-5  # 16 ulps of the sums dO·V and rowsum(dO ∘ O) of normal values, whose difference may have to be 0


def tolerance(reference: torch.Tensor, same_math_low_precision: torch.Tensor, factor: float = 2) -> float:
    """The largest error allowed: ``factor`` times the error plain PyTorch makes, plus twice the rounding of the values.

    ``reference`` is R in fp32 or fp64; ``same_math_low_precision`` is T, the same math in the dtype of the inputs. The
    second term is ``(R + 0.3 - 0.3) - R`` in T's dtype: what any implementation loses by storing values of R's size.
    """
    dtype = same_math_low_precision.dtype
    stored = reference.to(dtype)
    rounding = largest_error(stored + 0.3 - 0.3, stored)
    return factor * largest_error(same_math_low_precision, reference) + 2 * rounding


def assert_close_to_reference(
    x: torch.Tensor, ref: torch.Tensor, same_math_low_precision: torch.Tensor, factor: float = 2
) -> None:
    """``max|X - R| <= factor · max|T - R| + 2 · max|(R + 0.3 - 0.3) - R|``; X must be finite where R is."""
    assert x.shape == ref.shape == same_math_low_precision.shape, (x.shape, ref.shape, same_math_low_precision.shape)
    wrong = int((x.isfinite() != ref.isfinite()).sum())
    assert wrong == 0, f"{wrong} of {x.numel()} values are not finite where the reference is, or the reverse"
    error, allowed = largest_error(x, ref), tolerance(ref, same_math_low_precision, factor)
    assert error <= allowed, f"largest error {error:.3e}, allowed {allowed:.3e}"


def assert_close_on_average(
    x: torch.Tensor, ref: torch.Tensor, same_math_low_precision: torch.Tensor, factor: float = 1
) -> None:
    """The root mean square error: at most ``factor`` times plain PyTorch's, plus half a unit in R's last place.

    The rule above allows every element what the largest needs; an error that all elements share shows here. The last
    term is what fp32 sums of many products that cancel each other leave.
    """
    eps = torch.finfo(same_math_low_precision.dtype).eps
    error = root_mean_square(x.double() - ref.double())
    allowed = factor * root_mean_square(same_math_low_precision.double() - ref.double())
    allowed += eps / 2 * root_mean_square(ref.double()) + CANCELLED
    assert error <= allowed, f"root mean square error {error:.3e}, allowed {allowed:.3e}"


def assert_within_own_roundings(x: torch.Tensor, ref: torch.Tensor, ref_lse: torch.Tensor, v: torch.Tensor) -> None:
    """An output within what the kernel's own roundings allow, for adversarial inputs.

    There the rule above says little. T may be exact by luck: where one key takes all, its P is 1, while a large or a
    lazy reference leaves another P to round. Or T is useless: large scores in bf16. The kernel rounds P and O to V's
    dtype, each by half a unit in the last place, and the scores to fp32.
    """
    assert x.isfinite().all(), f"{int((~x.isfinite()).sum())} of {x.numel()} values are not finite"
    largest_logit = largest_error(ref_lse, torch.zeros_like(ref_lse))
    allowed = torch.finfo(v.dtype).eps + SCORE_ULPS * torch.finfo(torch.float32).eps * largest_logit
    error = largest_error(x, ref) / v.abs().max().item()
    assert error <= allowed, f"largest error {error:.3e} of the largest value of v, allowed {allowed:.3e}"


def assert_lse_close(lse: torch.Tensor, ref: torch.Tensor, atol: float = 1e-3) -> None:
    """Absolute error of at most ``atol``, plus what fp32 scores of that size lose; -inf in the same places."""
    assert lse.shape == ref.shape, (lse.shape, ref.shape)
    assert lse.dtype == torch.float32, lse.dtype
    rtol = SCORE_ULPS * torch.finfo(torch.float32).eps
    torch.testing.assert_close(lse.double(), ref.double(), atol=atol, rtol=rtol)


def largest_error(x: torch.Tensor, y: torch.Tensor) -> float:
    """Over the values where both are finite; 0 where there are none."""
    both = x.isfinite() & y.isfinite()
    error = (x.double() - y.double())[both].abs()
    return error.max().item() if error.numel() else 0.0


def root_mean_square(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item() if x.numel() else 0.0
