"""Small problems that run under compute-sanitizer: ``python sanitizer_workload.py``. Prints how many came out right.

Inputs are made and results checked on the CPU, so that the card sees copies, fills and our kernels only.
"""

from __future__ import annotations

import torch
from extra_specs import EXTRA_SPECS

from flashhopper import launch
from flashhopper.config import ForwardConfig, KernelSpec
from flashhopper.kernel_list import forward_specs
from flashhopper.kernels.tile_scheduler import Mailbox
from flashhopper.options import AttentionOptions
from flashhopper.reference import attention

TABLE = {"table_d64": (64, False), "table_d64_causal": (64, True), "table_d128": (128, True), "table_d256": (256, True)}
EXTRA = ("ping_pong_of_3", "single", "no_tma_store")
RESERVED_BYTES = 1024  # at the beginning of shared memory, which are the system's


def workload() -> list[KernelSpec]:
    """bfloat16, so with the lazy softmax and its redo."""
    table = [spec for spec in forward_specs() if spec.dtype == "bfloat16" and spec.head_dim == spec.head_dim_v]
    chosen = [[s for s in table if (s.head_dim, s.causal) == wanted][-1] for wanted in TABLE.values()]
    assert {spec.config.items_by_shuffle for spec in chosen} == {False, True}
    return chosen + [EXTRA_SPECS[name] for name in EXTRA]


def item_words(config: ForwardConfig) -> tuple[int, int]:
    """First and end address of the items in shared memory: after the barriers of Q, K, V and the verdicts."""
    barriers = 2 * (config.num_q_stages + 2 * config.num_stages) + Mailbox.VERDICTS
    first = RESERVED_BYTES + 8 * barriers
    return first, first + 4 * Mailbox.ITEM_WORDS * config.num_q_stages


def is_right(spec: KernelSpec, seqlen_q: int, seqlen_k: int, spike: bool) -> bool:
    """One launch against fp32; with ``spike`` key 0 makes the lazy softmax redo tiles."""
    head_dim = spec.head_dim - 8  # the last columns of each row are past the tensor's end
    sizes = (seqlen_q, 2), (seqlen_k, 1), (seqlen_k, 1)
    q, k, v = (torch.randn(1, s, h, head_dim).bfloat16() for s, h in sizes)
    if spike:
        q[..., 5], k[:, 0, :, 5] = 32.0, 1e4
    on_card = (x.cuda() for x in (q, k, v))
    first, end = item_words(spec.config)
    print(f"{spec.name}: items at {first:#x} to {end:#x}", flush=True)
    out, lse = launch.forward(*on_card, AttentionOptions(causal=spec.causal), config=spec.config)
    ref, ref_lse = attention(q.float(), k.float(), v.float(), softmax_scale=head_dim**-0.5, causal=spec.causal)
    right = (out.cpu().float() - ref).abs().max() < 0.05 and torch.allclose(lse.cpu(), ref_lse, atol=1e-3, rtol=1e-5)
    print(f"{spec.name} {seqlen_q} x {seqlen_k} spike={spike}: {'right' if right else 'WRONG'}", flush=True)
    return bool(right)


def main() -> None:
    torch.manual_seed(0)
    cases = ((200, 300, False), (70, 3 * 128, True), (130, 1, False))
    results = [is_right(spec, *case) for spec in workload() for case in cases]
    torch.cuda.synchronize()
    print(f"right: {sum(results)} of {len(results)}, redone tiles: {launch.redone_tiles() > 0}")


if __name__ == "__main__":
    main()
