"""``flashhopper doctor --explain``: which kernels a dense call gets, from which row of the tables, and why."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, fields
from typing import Any, NamedTuple

import torch

from flashhopper.cli.warmup import positive
from flashhopper.config import BackwardConfig, BackwardSpec, Features, ForwardConfig, KernelSpec
from flashhopper.heuristics import (
    BACKWARD_TABLE,
    BackwardRow,
    TileRow,
    features_of,
    rows_of,
    select_backward_row,
    select_backward_spec,
    select_row,
    select_spec,
    within,
)
from flashhopper.options import NO_WINDOW, AttentionOptions
from flashhopper.problem import AttentionProblem, TensorFacts

SMS = {"H200 or H100 SXM": 132, "H100 PCIe": 114, "H20": 78}
DEFAULT_SMS = 132


class Choice(NamedTuple):
    """What one pass of a call runs, and why."""

    what: str
    row: str
    reason: str
    spec: KernelSpec | BackwardSpec
    changed: dict[str, Any]
    """Fields of the row's configuration that dtype or features of the call have changed, as they are now."""
    tile: str
    num_tiles: int
    num_ctas: int
    smem_bytes: int
    ctas_per_tile: int = 1

    @property
    def at_once(self) -> int:
        """Tiles that can be worked on at the same time."""
        return self.num_ctas // self.ctas_per_tile

    @property
    def waves(self) -> float:
        """Tiles per CTA, or per pair of them, on average."""
        return self.num_tiles / self.at_once

    @property
    def config(self) -> ForwardConfig | BackwardConfig:
        return self.spec.config

    @property
    def balance(self) -> str:
        """What the number of tiles is against the number of CTAs, one per SM."""
        tiles = f"{self.num_tiles} tile{'s' * (self.num_tiles != 1)} of {self.tile}"
        places, each = ("SMs", "each") if self.ctas_per_tile == 1 else ("pairs of SMs", "a pair")
        if self.num_tiles <= self.at_once:
            idle = self.num_ctas - self.num_tiles * self.ctas_per_tile
            return f"{tiles}, fewer than {places} or as many: {idle} of {self.num_ctas} SMs are idle"
        rounds = -(-self.num_tiles // self.at_once)
        busy = 100 * self.num_tiles / (rounds * self.at_once)
        load = f"{self.waves:.2f} {each}; tiles alike would keep them {busy:.0f} % busy"
        return f"{tiles} on {self.at_once} {places}: {load}"


def explain(problem: AttentionProblem, num_sms: int, *, has_sink: bool = False) -> list[Choice]:
    """Of forward and backward of a dense call. TypeError, ValueError or NotImplementedError for one that is refused,
    and where a side is empty, so that no kernel runs."""
    problem.validate()
    num_ctas = num_sms - problem.options.sm_margin
    if num_ctas < 1:
        raise ValueError(f"sm_margin is {problem.options.sm_margin}; of {num_sms} SMs at least 1 must be left")
    if 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k):
        raise ValueError("batch and sequence lengths must be at least 1: no kernel runs otherwise")
    features = features_of(problem, has_sink)
    return [_explain_forward(problem, num_ctas, features), _explain_backward(problem, num_ctas, features)]


def _explain_forward(problem: AttentionProblem, num_ctas: int, features: Features) -> Choice:
    row, spec = select_row(problem), select_spec(problem, features=features)
    shorter = [one.max_seqlen_k for one in rows_of(row.causal) if _dims(one) == _dims(row)]
    limits = _limits("keys", row.max_seqlen_k, shorter)
    where = f"TILE_TABLE, {_dims(row)}, {'masked' if row.causal else 'no mask'}, {limits}"
    config = spec.config
    tiles = -(-problem.seqlen_q // config.tile_m) * problem.num_heads * problem.batch
    smem = config.smem_bytes(spec.head_dim, spec.head_dim_v)
    tile, changed = f"{config.tile_m} queries", _changed(row.config, config)
    return Choice("forward", where, row.reason, spec, changed, tile, tiles, num_ctas, smem)


def _explain_backward(problem: AttentionProblem, num_ctas: int, features: Features) -> Choice:
    row, spec = select_backward_row(problem), within(select_backward_spec(problem, features=features), num_ctas)
    masks = {None: "masked or not", True: "masked", False: "no mask"}
    alike = [one for one in BACKWARD_TABLE if _dims(one) == _dims(row) and one.causal == row.causal]
    limits = _limits("queries", row.max_seqlen_q, [one.max_seqlen_q for one in alike])
    where = f"BACKWARD_TABLE, {_dims(row)}, {masks[row.causal]}, {limits}"
    config = spec.config
    tiles = -(-problem.seqlen_k // config.keys_per_tile) * problem.num_heads_k * problem.batch
    smem = config.smem_bytes(spec.head_dim, spec.head_dim_v)
    tile, changed = f"{config.keys_per_tile} keys", _changed(row.config, config)
    return Choice("backward", where, row.reason, spec, changed, tile, tiles, num_ctas, smem, config.num_ctas)


def _limits(rows: str, limit: int | None, of_rows_alike: list[int | None]) -> str:
    """Which lengths a row serves: what the shorter ones of its dims and mask leave, up to its own limit."""
    shorter = max((one for one in of_rows_alike if one is not None and (limit is None or one < limit)), default=None)
    if limit is None:
        return f"any number of {rows}" if shorter is None else f"{rows} over {shorter}"
    return f"{rows} up to {limit}" if shorter is None else f"{rows} over {shorter} up to {limit}"


def _dims(row: TileRow | BackwardRow) -> str:
    return f"head dims up to {row.head_dim} and {row.head_dim_v}"


def _changed(of_row: ForwardConfig | BackwardConfig, config: ForwardConfig | BackwardConfig) -> dict[str, Any]:
    return {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if getattr(config, field.name) != getattr(of_row, field.name)
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--explain`` and what it explains."""
    names = ", ".join(f"{name} {count}" for name, count in SMS.items())
    group = parser.add_argument_group("explain", "which configuration a dense call gets, and why; needs no GPU")
    group.add_argument("--explain", action="store_true", help="explain the call that the other arguments describe")
    group.add_argument("--batch", type=positive, default=1, metavar="N")
    group.add_argument("--seqlen", type=positive, default=4096, metavar="N", help="queries (default 4096)")
    group.add_argument("--seqlen-k", type=positive, metavar="N", help="keys, if not as many")
    group.add_argument("--heads", type=positive, default=16, metavar="N", help="of q (default 16)")
    group.add_argument("--heads-k", type=positive, metavar="N", help="of k and v, if not as many")
    group.add_argument("--head-dim", type=positive, default=128, metavar="D", help="of q and k (default 128)")
    group.add_argument("--head-dim-v", type=positive, metavar="D", help="of v, if not the same")
    group.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    group.add_argument("--causal", action="store_true")
    group.add_argument(
        "--window", type=int, nargs=2, default=NO_WINDOW, metavar=("LEFT", "RIGHT"), help="-1: unbounded"
    )
    group.add_argument("--attention-chunk", type=int, default=0, metavar="N")
    group.add_argument("--softcap", type=float, default=0.0, metavar="X")
    group.add_argument("--sink", action="store_true", help="with learnable_sink")
    group.add_argument("--deterministic", action="store_true")
    group.add_argument("--sm-margin", type=int, default=0, metavar="N")
    group.add_argument(
        "--sms", type=positive, metavar="N", help=f"of the card (default: the first Hopper card's; {names})"
    )


def problem_of(args: argparse.Namespace) -> AttentionProblem:
    """The call that command line arguments describe, on contiguous tensors."""
    device, dtype = torch.device("cuda", 0), getattr(torch, args.dtype)
    seqlen_k, heads_k = args.seqlen_k or args.seqlen, args.heads_k or args.heads

    def facts(seqlen: int, heads: int, head_dim: int) -> TensorFacts:
        row = heads * head_dim
        shape = args.batch, seqlen, heads, head_dim
        return TensorFacts(shape, (seqlen * row, row, head_dim, 1), dtype, device)

    left, right = args.window
    options = AttentionOptions(
        causal=args.causal,
        window_size=(left, right),
        attention_chunk=args.attention_chunk,
        softcap=args.softcap,
        deterministic=args.deterministic,
        sm_margin=args.sm_margin,
    )
    return AttentionProblem(
        facts(args.seqlen, args.heads, args.head_dim),
        facts(seqlen_k, heads_k, args.head_dim),
        facts(seqlen_k, heads_k, args.head_dim_v or args.head_dim),
        options,
    )


def run(args: argparse.Namespace, num_sms: int | None) -> int:
    """Print the choices for the card with ``num_sms``, unless the arguments name another number; exit code 1 if the
    call is refused."""
    sms = args.sms or num_sms or DEFAULT_SMS
    try:
        choices = explain(problem_of(args), sms, has_sink=args.sink)
    except (TypeError, ValueError, NotImplementedError) as error:
        print(f"flashhopper doctor: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps([_as_json(choice) for choice in choices], indent=2))
    else:
        print("\n\n".join(map(_as_text, choices)))
    return 0


def _as_json(choice: Choice) -> dict[str, Any]:
    report = choice._asdict() | {"kernel": choice.spec.name, "config": asdict(choice.config), "waves": choice.waves}
    del report["spec"]
    return report


def _as_text(choice: Choice) -> str:
    config = choice.config
    registers = ", ".join(f"{name} {count}" for name, count in config.registers()._asdict().items())
    lines = [
        ("kernel", choice.spec.name),
        ("row", choice.row),
        ("reason", choice.reason),
        ("configuration", ", ".join(f"{name}={value}" for name, value in asdict(config).items())),
        ("shared memory", f"{choice.smem_bytes / 1024:.0f} KiB of 227 KiB"),
        ("registers", registers),
        ("tiles", choice.balance),
    ]
    if choice.changed:
        changes = ", ".join(f"{name}={value}" for name, value in choice.changed.items())
        lines.insert(3, ("not as the row", f"{changes}: for this dtype or these features"))
    return "\n".join([choice.what, *(f"  {name:15}{value}" for name, value in lines)])
