"""Train a small GPT twice, its attention ``flash_attn_func`` and plain PyTorch, and see that the losses agree.

Same initial weights, same batches, taking turns step by step. What rounding alone does to such a training is measured
by further runs. Ends with exit code 1 if the difference is larger. Runs on a Hopper GPU or on any CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, ModelConfig, flash_attention, math_attention, rounded_attention
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from training import (
    Finding,
    Run,
    TrainingConfig,
    batches,
    compare_curves,
    compare_gradients,
    default_text,
    sample,
    smoothed,
)

from flashhopper import __version__
from flashhopper.bench.environment import describe_machine, hopper_problem

ROOT = Path(__file__).resolve().parent.parent
OURS, REFERENCE, ROUNDED, REPEATED = "flash_attn_func", "SDPA math", "rounding", "trained again"
CANNOT_RUN = 2
DEFAULTS: dict[str, dict[str, Any]] = {  # by device; under a minute on two CPU cores
    "cpu": {"layers": 2, "heads": 2, "head_dim": 32, "seqlen": 128, "batch": 4, "steps": 250, "lr": 6e-3},
    "cuda": {"layers": 4, "heads": 6, "head_dim": 128, "seqlen": 2048, "batch": 8, "steps": 200, "lr": 1e-3},
}
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
SAMPLE_BYTES = 200


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    console = Console(highlight=False, soft_wrap=True)
    try:
        text = options.text.read_bytes() if options.text else default_text(ROOT)
    except (OSError, UnicodeDecodeError) as error:
        console.print(Text(f"cannot read the text to learn: {error}", style="red"))
        return CANNOT_RUN
    if len(text) <= options.seqlen:
        console.print(f"[red]the text has {len(text)} bytes; a sequence needs {options.seqlen + 1}[/]")
        return CANNOT_RUN
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it PyTorch refuses matrix products
        torch.use_deterministic_algorithms(True)

    shape = ModelConfig(options.layers, options.heads, options.heads_k, options.head_dim)
    dtype = getattr(torch, options.dtype)
    config = TrainingConfig(options.seqlen, options.batch, options.steps, options.lr, options.seed, dtype)
    model = GPT(shape, options.seed).to(options.device)
    introduce(console, options, sum(weight.numel() for weight in model.parameters()), len(text))
    runs = make_runs(model, config, options)
    data = batches(text, config)
    try:
        train(console, runs, data)
        findings = judge(runs, next(data).to(options.device))
        sampled = sample(runs[OURS], options.prompt.encode(), SAMPLE_BYTES).decode(errors="replace")
    except torch.OutOfMemoryError:
        console.print("[red]out of memory: SDPA math keeps every score; take a smaller --batch or --seqlen[/]")
        return CANNOT_RUN

    repeats = runs[REPEATED].losses == runs[OURS].losses if REPEATED in runs else None
    passed = all(finding.within_noise for finding in findings) and repeats is not False
    show_losses(console, runs)
    show_speed(console, runs)
    show_verdict(console, findings, repeats)
    console.print(Text.assemble(("\nThe model writes", "bold"), f" (after {options.prompt!r})\n"))
    console.print(Text(sampled, style="cyan"))
    if options.output:
        result = {
            **describe_machine(),
            "device": device_name(options),
            "flashhopper": __version__,
            "model": asdict(shape),
            "training": asdict(config) | {"dtype": options.dtype, "deterministic": options.deterministic},
            "text": {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()},
            "runs": {
                name: {"tokens_per_second": run.tokens_per_second, "losses": run.losses} for name, run in runs.items()
            },
            "findings": [asdict(finding) | {"bound": finding.bound} for finding in findings],
            "repeats": repeats,
            "passed": passed,
            "sample": sampled,
        }
        write(console, result, options.output)
        plot(console, runs, findings[0].bound, options.output.with_suffix(".png"))
    return 0 if passed else 1


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    no_hopper = hopper_problem()
    default_device = "cpu" if no_hopper else "cuda"
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default_device, help="default: %(default)s")
    for name, value in DEFAULTS["cpu"].items():
        text = f"default: {value} on a CPU, {DEFAULTS['cuda'][name]} on a GPU"
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), help=text)
    parser.add_argument("--heads-k", type=int, help="heads of keys and values, for GQA (default: as --heads)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    parser.add_argument("--noise-runs", type=int, default=2, help="that show what rounding does (default: %(default)s)")
    parser.add_argument("--deterministic", action="store_true", help="train ours twice: the same bits are expected")
    parser.add_argument("--text", type=Path, help="learn from this file instead")
    parser.add_argument("--prompt", default="The ", help="beginning of the sample (default: %(default)r)")
    parser.add_argument("--output", type=Path, help="write this JSON file, and a PNG beside it if there is matplotlib")
    options = parser.parse_args(arguments)
    for name, value in (DEFAULTS[options.device] | {"dtype": DTYPES[options.device]}).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.heads_k = options.heads_k or options.heads
    for name in ("layers", "heads", "heads_k", "head_dim", "seqlen", "batch", "steps", "lr", "noise_runs"):
        if not getattr(options, name) > 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; accepted is a number above 0")
    if options.heads % options.heads_k:
        parser.error(f"--heads {options.heads} is no multiple of --heads-k {options.heads_k}")
    if options.head_dim % 8 or options.head_dim > 256:
        parser.error(f"--head-dim is {options.head_dim}; accepted are multiples of 8 to 256")
    if not options.prompt:
        parser.error("--prompt is empty; accepted is a text of at least one character")
    if options.device == "cuda" and no_hopper:
        parser.error(f"--device cuda needs a Hopper GPU: {no_hopper}")
    if options.device == "cuda" and options.dtype != "bfloat16":
        parser.error(f"--dtype is {options.dtype}; accepted on a GPU is bfloat16")
    return options


def fact(console: Console, name: str, value: str) -> None:
    console.print(Text.assemble((f"  {name:<18}", "dim"), value))


def device_name(options: argparse.Namespace) -> str:
    return torch.cuda.get_device_name() if options.device == "cuda" else "cpu"


def introduce(console: Console, options: argparse.Namespace, weights: int, text_bytes: int) -> None:
    console.print("[bold]FlashHopper: train a GPT[/]")
    fact(
        console,
        "device",
        device_name(options) if options.device == "cuda" else f"CPU ({hopper_problem() or 'as asked'})",
    )
    path = "Hopper kernels" if options.device == "cuda" else "CPU reference, not the kernels"
    fact(console, "attention", f"flash_attn_func: {path}")
    heads = f"{options.heads} heads of {options.head_dim}"
    if options.heads_k != options.heads:
        heads += f" (keys and values: {options.heads_k})"
    precision = "bfloat16 autocast" if options.dtype == "bfloat16" else options.dtype
    fact(console, "model", f"{options.layers} layers, {heads}, {weights:,} weights, {precision}")
    fact(console, "text", f"{text_bytes:,} bytes ({options.text or 'this project’s pages and Python’s help topics'})")
    fact(console, "training", f"{options.steps} steps of {options.batch} × {options.seqlen} bytes, seed {options.seed}")


def make_runs(model: GPT, config: TrainingConfig, options: argparse.Namespace) -> dict[str, Run]:
    """By name: ours, the reference, runs for the noise, and on request ours once more."""
    attentions = {OURS: flash_attention(options.deterministic), REFERENCE: math_attention}
    for number in range(1, options.noise_runs + 1):
        generator = torch.Generator(options.device).manual_seed(options.seed + number)
        attentions[f"{ROUNDED} {number}"] = rounded_attention(generator)
    if options.deterministic:
        attentions[REPEATED] = attentions[OURS]
    return {name: Run(name, attention, model, config) for name, attention in attentions.items()}


def judge(runs: dict[str, Run], batch: torch.Tensor) -> list[Finding]:
    ours, reference = runs[OURS], runs[REFERENCE]
    noisy = [run for name, run in runs.items() if name.startswith(ROUNDED)]
    return [compare_curves(ours, reference, noisy), compare_gradients(ours, reference, noisy, batch)]


def train(console: Console, runs: dict[str, Run], data: Iterator[torch.Tensor]) -> None:
    """All runs in turns, step by step: the same batch, and the same state of the machine."""
    columns = (
        TextColumn("  {task.description:<18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[losses]}"),
    )
    ours, steps = runs[OURS], runs[OURS].config.steps
    started = time.perf_counter()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=steps, losses="compiling" if ours.device.type == "cuda" else "")
        for _, batch in zip(range(steps), data, strict=False):
            tokens = batch.to(ours.device)
            for run in runs.values():
                run.step(tokens)
            losses = f"loss {ours.losses[-1]:.3f} and {runs[REFERENCE].losses[-1]:.3f}"
            progress.update(task, advance=1, losses=losses)
    fact(console, "time", f"{time.perf_counter() - started:.1f} s for {len(runs)} trainings\n")


def show_losses(console: Console, runs: dict[str, Run], rows: int = 10) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("  step", justify="right")
    for name in runs:
        table.add_column(name, justify="right")
    curves = {name: smoothed(run.losses).tolist() for name, run in runs.items()}
    points = len(curves[OURS])
    window = len(runs[OURS].losses) - points + 1
    for point in sorted({round(row * (points - 1) / (rows - 1)) for row in range(rows)}):
        table.add_row(str(point + window), *(f"{curve[point]:.4f}" for curve in curves.values()))
    console.print(f"[bold]Loss[/] (nats per byte, mean of the last {window} steps; a guess among 256 is 5.5452)")
    console.print(table)


def show_speed(console: Console, runs: dict[str, Run]) -> None:
    console.print("\n[bold]Speed[/] (whole training step, median)")
    for name in (OURS, REFERENCE):
        fact(console, name, f"{runs[name].tokens_per_second:,.0f} tokens/s")


def show_verdict(console: Console, findings: list[Finding], repeats: bool | None) -> None:
    console.print("\n[bold]Largest difference to SDPA math[/] (in parentheses: by rounding alone, and the bound)")
    for finding in findings:
        verdict = "[green]within noise[/]" if finding.within_noise else "[bold red]BEYOND NOISE[/]"
        numbers = f"{finding.difference:.1e} ({finding.noise:.1e}, {finding.bound:.1e})"
        console.print(f"  {finding.what}: {numbers}  {verdict}")
    if repeats is not None:
        console.print(f"  trained again: {'[green]the same bits[/]' if repeats else '[bold red]OTHER LOSSES[/]'}")


def write(console: Console, result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    console.print(Text(f"\nwrote {path}"))


def plot(console: Console, runs: dict[str, Run], bound: float, path: Path) -> None:
    try:
        from loss_plot import plot_losses
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        console.print("no PNG: matplotlib is not installed")
        return
    plot_losses({name: run.losses for name, run in runs.items()}, (OURS, REFERENCE), bound, path)
    console.print(Text(f"wrote {path}"))


if __name__ == "__main__":
    sys.exit(main())
