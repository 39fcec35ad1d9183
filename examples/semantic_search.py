"""Semantic search with a real sentence encoder in Transformers, on ``attn_implementation="flashhopper"``.

Reads this project's documentation (or the files named with --file), finds the passages nearest to a question, and
compares encoder and speed with the same model on Transformers' eager attention. Runs on a Hopper GPU or on any CPU.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill, indent

import torch
import torch.nn.functional as F
from minilm import Batch, MiniLM
from passages import MIN_WORDS, Passage, project_files, read_passages
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from flashhopper import flash_attn_func
from flashhopper.bench.environment import hopper_problem
from flashhopper.bench.grid import Cell
from flashhopper.bench.timing import Candidate, CudaClock, Plan, measure, medians

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "Why are the keys visited from the last block to the first?"
LONG_SEQUENCE = Cell("bfloat16", d=128, causal=True, s=16384, b=1, h=16)
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2}  # rounding of the dtype, amplified by 6 layers
IMPLEMENTATIONS = OURS, EAGER = "flashhopper", "eager"
SEED = 0


@dataclass
class Encoded:
    """All passages by one implementation of attention."""

    embeddings: torch.Tensor
    seconds: float = 0.0


def main() -> int:
    options = parse_arguments()
    console = Console(highlight=False, soft_wrap=True)
    try:
        files = options.file or project_files(ROOT)
        passages = [passage for path in files for passage in read_passages(path)]
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        console.print(Text(f"cannot read the text to search: {error}", style="red"))
        return 2
    if not passages:
        console.print(f"[red]nothing to search: the files hold no text of {MIN_WORDS} words or more[/]")
        return 2

    no_hopper = hopper_problem()
    device, dtype = ("cpu", torch.float32) if no_hopper else ("cuda", torch.float16)
    model = MiniLM.load(device, dtype)
    encodings = model.tokenize([passage.text for passage in passages])
    lengths = [len(encoding.ids) for encoding in encodings]
    cut = sum(bool(encoding.overflowing) for encoding in encodings)

    console.print("[bold]FlashHopper: semantic search[/]")
    fact(console, "device", f"CPU ({no_hopper})" if no_hopper else torch.cuda.get_device_name())
    path = "CPU reference, not the kernels" if no_hopper else "Hopper kernels"
    fact(console, "attention", f'attn_implementation="flashhopper": {path}')
    fact(console, "encoder", f"all-MiniLM-L6-v2, 6 layers, 12 heads of 32, {str(dtype).removeprefix('torch.')}")
    fact(
        console, "text", f"{len(passages)} passages (files: {len(files)}), {min(lengths)} to {max(lengths)} tokens each"
    )
    if cut:
        fact(console, "", f"{cut} of them longer: the rest of each was not read")

    with console.status("compiling"):
        question = model.embed([options.question])[0].cpu()
        model.embed([options.question, f"{options.question} {options.question}"])  # padded: another kernel
    encoded = encode(console, model, model.batches(encodings))
    ours, eager = encoded[OURS], encoded[EAGER]
    show_hits(console, options.question, passages, ours.embeddings @ question, options.top)

    difference = (ours.embeddings - eager.embeddings).abs().max().item()
    console.print("[bold]Largest difference to eager attention[/]")
    fact(console, "embeddings", f"{difference:.1e} (unit vectors of {model.width})")
    console.print("\n[bold]Speed[/] (whole model, batches in turns)")
    for name, result in encoded.items():
        fact(console, name, f"{len(passages) / result.seconds:,.0f} passages/s ({result.seconds:.2f} s)")
    if no_hopper is None:
        show_long_sequence(console)
    if not difference <= TOLERANCES[dtype]:
        console.print(f"\n[bold red]FAILED: differences above {TOLERANCES[dtype]:.0e}[/]")
        return 1
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--question", default=QUESTION, help="what to look for (default: %(default)s)")
    parser.add_argument("--file", type=Path, action="append", help="search this file instead (may be repeated)")
    parser.add_argument("--top", type=int, default=5, help="hits to show (default: %(default)s)")
    options = parser.parse_args()
    if options.top < 1:
        parser.error(f"--top is {options.top}; accepted is a number of at least 1")
    return options


def fact(console: Console, name: str, value: str) -> None:
    console.print(Text.assemble((f"  {name:<18}", "dim"), value))


def encode(console: Console, model: MiniLM, batches: list[Batch]) -> dict[str, Encoded]:
    """All passages by each implementation, batch by batch in turns; the first batch is run once before."""
    number = sum(len(batch.rows) for batch in batches)
    encoded = {name: Encoded(torch.empty(number, model.width)) for name in IMPLEMENTATIONS}
    columns = (TextColumn("  {task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("encoding", total=number)
        for turn, batch in enumerate([batches[0], *batches]):
            for name, result in encoded.items():
                model.use(name)
                started = time.perf_counter()
                result.embeddings[batch.rows] = model.forward(batch).cpu()  # waits for the GPU
                result.seconds += (time.perf_counter() - started) * (turn > 0)
            progress.advance(task, len(batch.rows) * (turn > 0))
    model.use(OURS)
    return encoded


def show_hits(console: Console, question: str, passages: list[Passage], scores: torch.Tensor, top: int) -> None:
    width = max(20, min(console.width, 110) - 9)
    console.print(Text.assemble(("\nQuestion: ", "bold"), question, "\n"))
    for score, index in zip(*scores.topk(min(top, len(passages))), strict=True):
        passage = passages[int(index)]
        path = passage.path.relative_to(ROOT) if passage.path.is_relative_to(ROOT) else passage.path
        console.print(Text.assemble(f"  {score:.3f}  ", (f"{path}:{passage.line}", "cyan")))
        console.print(Text(indent(fill(passage.text, width), " " * 9) + "\n"))


def show_long_sequence(console: Console) -> None:
    """TFLOPS of one long causal call, sampled in turns with PyTorch's attention."""
    shape = (LONG_SEQUENCE.b, LONG_SEQUENCE.s, LONG_SEQUENCE.h, LONG_SEQUENCE.d)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q_heads, k_heads, v_heads = (x.transpose(1, 2) for x in (q, k, v))
    candidates = [
        Candidate("flash_attn_func", lambda: flash_attn_func(q, k, v, causal=True)),
        Candidate("torch SDPA", lambda: F.scaled_dot_product_attention(q_heads, k_heads, v_heads, is_causal=True)),
    ]
    with torch.inference_mode():
        times = medians(measure(candidates, Plan(), CudaClock(), random.Random(SEED)))
    console.print(f"\n[bold]One long call[/] ({LONG_SEQUENCE}; CUDA events, medians)")
    for name, milliseconds in times.items():
        fact(console, name, f"{LONG_SEQUENCE.tflops(milliseconds):6.0f} TFLOPS  {milliseconds:.2f} ms")


if __name__ == "__main__":
    sys.exit(main())
