"""The training example: it learns, agrees with plain PyTorch attention, and notices an attention that is wrong."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import train_gpt
from gpt import GPT, Attention, ModelConfig, flash_attention, jittered, math_attention, rotary_angles, rotate
from training import Finding, Run, TrainingConfig, batches, gradients, sample, smoothed

TEXT = b"In the beginning the text was short, and it repeated itself without end. " * 20
TINY = ["--device", "cpu", "--layers", "1", "--head-dim", "8", "--seqlen", "16", "--batch", "2", "--steps", "3"]


def tiny_run(attention: Attention, steps: int) -> Run:
    config = TrainingConfig(seqlen=32, batch=4, steps=steps, lr=1e-2, seed=0, dtype=torch.float32)
    return Run("tiny", attention, GPT(ModelConfig(layers=1, heads=2, heads_k=1, head_dim=16), seed=0), config)


def test_loss_falls() -> None:
    run = tiny_run(flash_attention(), steps=60)
    for batch in itertools.islice(batches(TEXT, run.config), run.config.steps):
        run.step(batch)
    assert run.losses[0] > 5.0  # 5.5 is a guess among 256
    assert run.losses[-1] < run.losses[0] - 4.0


@pytest.mark.parametrize("heads_k", [1, 2, 4])
def test_gradients_equal_those_with_sdpa_math(heads_k: int) -> None:
    model = GPT(ModelConfig(layers=2, heads=4, heads_k=heads_k, head_dim=16), seed=1).double()
    config = TrainingConfig(seqlen=48, batch=2, steps=1, lr=1e-3, seed=1, dtype=torch.float64)
    tokens = next(batches(TEXT, config))
    ours, reference = (gradients(model, tokens, attention, config) for attention in (flash_attention(), math_attention))
    assert min(grad.abs().max().item() for grad in reference.values()) > 1e-5
    for name, grad in ours.items():
        torch.testing.assert_close(grad, reference[name], atol=1e-9, rtol=0, msg=name)


def test_batches_depend_on_the_seed_alone() -> None:
    def three(seed: int) -> torch.Tensor:
        config = TrainingConfig(seqlen=16, batch=5, steps=1, lr=1e-3, seed=seed, dtype=torch.float32)
        return torch.stack(list(itertools.islice(batches(TEXT, config), 3)))

    first = three(seed=7)
    torch.manual_seed(99)
    assert torch.equal(three(seed=7), first)
    assert not torch.equal(three(seed=8), first)
    assert first.shape == (3, 5, 17)
    assert all(bytes(row.tolist()) in TEXT for row in first.flatten(0, 1))


def test_batches_reach_both_ends_of_the_text() -> None:
    config = TrainingConfig(seqlen=3, batch=200, steps=1, lr=1e-3, seed=0, dtype=torch.float32)
    rows = {bytes(row.tolist()) for row in next(batches(b"abcdef", config))}
    assert rows == {b"abcd", b"bcde", b"cdef"}


def test_learning_rate() -> None:
    config = TrainingConfig(seqlen=1, batch=1, steps=100, lr=1.0, seed=0, dtype=torch.float32)
    rates = [config.learning_rate(step) for step in (0, 9, 10, 55, 100)]
    assert rates == pytest.approx([0.1, 1.0, 1.0, 0.55, 0.1])


def test_rotary_scores_depend_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 64, dtype=torch.float64).expand(2, 12, 1, 64)
    cos, sin = rotary_angles(12, 64, like=q)
    scores = rotate(q, cos, sin)[:, 0] @ rotate(k, cos, sin)[:, 0].T
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], atol=1e-12, rtol=0)
    assert (scores[0] - scores[0, 0]).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_jitter_is_about_one_rounding(dtype: torch.dtype) -> None:
    x = torch.randn(10_000).to(dtype)
    relative = ((jittered(x, torch.Generator().manual_seed(0)).double() - x.double()) / x.double()).abs()
    eps = torch.finfo(dtype).eps
    assert relative.max() <= 1.5 * eps  # eps, and half of one by storing the result
    assert 0.3 * eps < relative.square().mean().sqrt() < eps


def test_sample_sees_no_padding() -> None:
    run = tiny_run(flash_attention(), steps=1)
    length = 40  # beyond seqlen: the context's beginning is dropped
    sampled = sample(run, b"In", length)
    generator = torch.Generator().manual_seed(run.config.seed)
    expected = list(b"In")
    with torch.no_grad():
        for _ in range(length):
            logits = run.model(torch.tensor([expected[-run.config.seqlen :]]), math_attention)[0, -1]
            expected.append(int(torch.multinomial(torch.softmax(logits / 0.7, dim=-1), 1, generator=generator)))
    assert list(sampled) == expected


def test_smoothed_is_the_mean_of_a_twentieth() -> None:
    assert smoothed([1.0, 2.0, 4.0]).tolist() == [1.0, 2.0, 4.0]
    assert smoothed([float(i) for i in range(40)]).tolist() == [i + 0.5 for i in range(39)]


def test_a_finding_with_nan_is_beyond_noise() -> None:
    assert Finding("loss", 4.0, 1.0).within_noise
    assert not Finding("loss", 4.1, 1.0).within_noise
    assert not Finding("loss", math.nan, 1.0).within_noise
    assert Finding("loss", math.nan, 1.0).ratio() == math.inf


@pytest.fixture
def _indeterministic_again() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def test_command_line_writes_json(tmp_path: Path) -> None:
    text, output = tmp_path / "text", tmp_path / "sub" / "out.json"
    text.write_bytes(TEXT)
    heads = ["--heads", "4", "--heads-k", "2"]
    assert train_gpt.main([*TINY, *heads, "--text", str(text), "--prompt", "In", "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    assert result["passed"] is True
    assert result["repeats"] is None
    assert result["model"] == {"layers": 1, "heads": 4, "heads_k": 2, "head_dim": 8}
    assert result["text"]["bytes"] == len(TEXT)
    assert list(result["runs"]) == ["flash_attn_func", "SDPA math", "rounding 1", "rounding 2"]
    ours, reference = (result["runs"][name]["losses"] for name in ("flash_attn_func", "SDPA math"))
    assert len(ours) == 3
    assert ours == pytest.approx(reference, abs=1e-4)
    assert all(run["tokens_per_second"] > 0 for run in result["runs"].values())
    assert all(finding["difference"] <= finding["bound"] == 4 * finding["noise"] for finding in result["findings"])
    assert result["sample"].startswith("In")


@pytest.mark.usefixtures("_indeterministic_again")
def test_deterministic_training_repeats_itself(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    assert train_gpt.main([*TINY, "--deterministic", "--noise-runs", "1", "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    assert result["repeats"] is True
    assert result["runs"]["trained again"]["losses"] == result["runs"]["flash_attn_func"]["losses"]


def test_plot_is_written_beside_the_json(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert train_gpt.main([*TINY, "--output", str(tmp_path / "out.json")]) == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def wrong_scale(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return math_attention(1.01 * q, k, v)


def wrong_gradient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return math_attention(q, 0.99 * k + 0.01 * k.detach(), v)


def looks_ahead(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return math_attention(q, k.roll(-1, dims=1), v.roll(-1, dims=1))


def not_finite(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return math_attention(q, k, v) * math.inf


@pytest.mark.parametrize("attention", [wrong_scale, wrong_gradient, looks_ahead, not_finite])
def test_a_wrong_attention_is_beyond_noise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, attention: Attention
) -> None:
    monkeypatch.setattr(train_gpt, "flash_attention", lambda deterministic: attention)
    output = tmp_path / "out.json"
    assert train_gpt.main([*TINY, "--output", str(output)]) == 1
    result = json.loads(output.read_text())
    assert result["passed"] is False
    gradient = result["findings"][1]
    assert not gradient["difference"] < 100 * gradient["noise"]  # or NaN


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--head-dim", "12"], "--head-dim is 12; accepted are multiples of 8 to 256"),
        (["--heads", "4", "--heads-k", "3"], "--heads 4 is no multiple of --heads-k 3"),
        (["--steps", "0"], "--steps is 0; accepted is a number above 0"),
        (["--prompt", ""], "--prompt is empty; accepted is a text of at least one character"),
    ],
)
def test_bad_arguments_are_named(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as exit_info:
        train_gpt.main([*TINY, *arguments])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_text_that_is_too_short_or_missing(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"x" * 16)
    assert train_gpt.main([*TINY, "--text", str(text)]) == 2
    assert train_gpt.main([*TINY, "--text", str(tmp_path / "none")]) == 2
