"""Training the same GPT side by side with several attention functions, and judging whether they differ."""

from __future__ import annotations

import copy
import math
import pydoc_data.topics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from gpt import GPT, Attention

WARM_UP = 0.1  # of all steps
LAST_LR = 0.1  # of the highest
# Tried on a CPU: the roundings of a bf16 kernel come to at most 1.0 times the noise, the CPU's own in fp32 to 2.2. In
# bf16 a softmax scale 5 % off comes to 4.6 or more and gradients of q 10 % off to 9, in fp32 even 1 % to hundreds.
NOISE_FACTOR = 4.0
LEAST_NOISE = torch.finfo(torch.float32).eps  # losses and gradients are fp32 numbers, whatever was rounded before


@dataclass(frozen=True)
class TrainingConfig:
    seqlen: int
    batch: int
    steps: int
    lr: float
    seed: int
    dtype: torch.dtype
    """bfloat16: autocast over fp32 weights; else the weights' own."""

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        warm_up = max(round(self.steps * WARM_UP), 1)
        if step < warm_up:
            return self.lr * (step + 1) / warm_up
        progress = (step - warm_up) / max(self.steps - warm_up, 1)
        return self.lr * (LAST_LR + (1 - LAST_LR) * (1 + math.cos(math.pi * progress)) / 2)

    def autocast(self, device: torch.device) -> AbstractContextManager[None]:
        return torch.autocast(device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)


def default_text(root: Path) -> bytes:
    """The project's Markdown, and the language reference that Python's ``help()`` shows."""
    pages = [path.read_text(encoding="utf-8") for path in sorted([*root.glob("*.md"), *root.glob("docs/*.md")])]
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    return "\n\n".join(pages + topics).encode()


def batches(text: bytes, config: TrainingConfig) -> Iterator[torch.Tensor]:
    """Without end: ``(batch, seqlen + 1)`` bytes from random places. The seed alone decides which."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(config.seed)
    while True:
        starts = torch.randint(len(data) - config.seqlen, (config.batch, 1), generator=generator)
        yield data[starts + torch.arange(config.seqlen + 1)].long()


@dataclass
class Run:
    """One model in training, with what it noted on the way."""

    name: str
    attention: Attention
    model: GPT
    config: TrainingConfig
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = copy.deepcopy(self.model)
        self.device = self.model.embedding.weight.device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(self, tokens: torch.Tensor) -> None:
        self._synchronize()
        started = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate(len(self.losses))
        loss = next_byte_loss(self.model, tokens, self.attention, self.config)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self._synchronize()
        self.seconds.append(time.perf_counter() - started)
        self.losses.append(loss.item())

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def tokens_per_second(self) -> float:
        """By the median step: the first compiles kernels."""
        return self.config.batch * self.config.seqlen / median(self.seconds)


def next_byte_loss(model: GPT, tokens: torch.Tensor, attention: Attention, config: TrainingConfig) -> torch.Tensor:
    """Mean negative log-likelihood in nats of every byte but the first of each sequence."""
    with config.autocast(tokens.device):
        logits = model(tokens[:, :-1], attention)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.flatten(0, 1).to(wide), tokens[:, 1:].flatten())


Gradients = dict[str, torch.Tensor]


def gradients(model: GPT, tokens: torch.Tensor, attention: Attention, config: TrainingConfig) -> Gradients:
    """Of every weight, by its name."""
    loss = next_byte_loss(model, tokens, attention, config)
    parameters = dict(model.named_parameters())
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def smoothed(losses: list[float]) -> torch.Tensor:
    """Means over a twentieth of the run, one per step from the first that has them all."""
    values = torch.tensor(losses, dtype=torch.float64)
    return values.unfold(0, max(len(losses) // 20, 1), 1).mean(dim=-1)


@dataclass(frozen=True)
class Finding:
    """A difference to training with ``math_attention``, beside what rounding alone does to it."""

    what: str
    difference: float
    noise: float

    @property
    def bound(self) -> float:
        return NOISE_FACTOR * self.noise

    def ratio(self) -> float:
        """Infinite for NaN, which compares with nothing."""
        ratio = self.difference / self.noise
        return math.inf if math.isnan(ratio) else ratio

    @property
    def within_noise(self) -> bool:
        return self.difference <= self.bound  # False for NaN


def compare_curves(ours: Run, reference: Run, noisy: list[Run]) -> Finding:
    """Largest difference between smoothed losses."""

    def distance(run: Run) -> float:
        return (smoothed(run.losses) - smoothed(reference.losses)).abs().max().item()

    least = LEAST_NOISE * max(reference.losses)
    return Finding("smoothed loss", distance(ours), max(least, *(distance(run) for run in noisy)))


def compare_gradients(ours: Run, reference: Run, noisy: list[Run], tokens: torch.Tensor) -> Finding:
    """The gradient that differs most, as a share of its noise: with what ``ours`` has learned, on one batch.

    Sharper than the curves: a training goes on learning with gradients that are somewhat wrong.
    """
    by_run = [gradients(ours.model, tokens, run.attention, ours.config) for run in (reference, ours, *noisy)]
    findings = []
    for name, exact in by_run[0].items():
        differences = [(grads[name] - exact).norm() / exact.norm() for grads in by_run[1:]]
        noise = max(LEAST_NOISE, *(difference.item() for difference in differences[1:]))
        findings.append(Finding(f"gradient of {name}", differences[0].item(), noise))
    return max(findings, key=Finding.ratio)


@torch.no_grad()
def sample(run: Run, prompt: bytes, length: int, temperature: float = 0.7) -> bytes:
    """The prompt and ``length`` more bytes. Contexts are padded at their end, which a causal model does not see."""
    generator = torch.Generator().manual_seed(run.config.seed)
    text = bytearray(prompt)
    window = torch.zeros(1, run.config.seqlen, dtype=torch.long)
    for _ in range(length):
        context = text[-run.config.seqlen :]
        window[0, : len(context)] = torch.tensor(list(context))
        with run.config.autocast(run.device):
            logits = run.model(window.to(run.device), run.attention)[0, len(context) - 1]
        weights = torch.softmax(logits.float().cpu() / temperature, dim=-1)
        if weights.isnan().any():  # a training that failed, as the verdict will say
            break
        text.append(int(torch.multinomial(weights, 1, generator=generator)))
    return bytes(text)
