"""Transformers' models on the kernels, in bf16, against eager attention in fp32 and in bf16."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from tolerance import assert_close_on_average, root_mean_square

from flashhopper.integrations.transformers import attention, register

transformers = pytest.importorskip("transformers", minversion="4.57", reason="transformers is not installed")
FEW = 64  # elements whose root mean square error is mostly luck
SIZES = {
    "vocab_size": 199,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "pad_token_id": 0,
}
MODELS = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "Mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 100}),
    "Gemma 2": ("Gemma2ForCausalLM", "Gemma2Config", {"sliding_window": 100, "query_pre_attn_scalar": 64}),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", {"sliding_window": 100, "num_local_experts": 2}),
    "Llama 4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            "attention_chunk_size": 100,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "moe_layers": [],
            "intermediate_size_mlp": 512,
        },
    ),
}


def make_model(name: str) -> Any:
    register()
    model, config, options = MODELS[name]
    if name == "gpt-oss":
        options = options | {"num_experts_per_tok": 2}  # both: rounding would send tokens to different experts
    made = getattr(transformers, model)(getattr(transformers, config)(**SIZES, **options)).cuda().train()
    for parameter_name, parameter in made.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return made


def logits_and_gradients(model: Any, implementation: str, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    model.set_attn_implementation(implementation)
    model.zero_grad()
    output = model(**batch, use_cache=False)
    output.loss.backward()
    shown = output.logits[batch["attention_mask"].bool()]
    return [shown.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name: str, padded: bool) -> None:
    wide = make_model(name)
    model = copy.deepcopy(wide).to(torch.bfloat16)
    wide.load_state_dict(model.state_dict())
    ids = torch.randint(1, 199, (3, 300), device="cuda")
    lengths = torch.tensor([[300], [170], [1]] if padded else [[300]] * 3, device="cuda")
    real = torch.arange(300, device="cuda") < lengths
    batch = {"input_ids": ids, "attention_mask": real.long(), "labels": ids.masked_fill(~real, -100)}
    mine = logits_and_gradients(model, "flashhopper", batch)
    low = logits_and_gradients(model, "eager", batch)
    expected = logits_and_gradients(wide, "eager", batch)
    several = [group for group in zip(mine, expected, low, strict=True) if group[1].numel() >= FEW]
    few = [group for group in zip(mine, expected, low, strict=True) if group[1].numel() < FEW]
    if few:
        several.append(tuple(torch.cat(parts) for parts in zip(*map(of_similar_size, few), strict=True)))
    for x, ref, same_math in several:
        assert_close_on_average(x, ref, same_math, factor=2)


def of_similar_size(group: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """A gradient of a few elements, whose error is that of a few numbers, made ready to be compared together with
    others: times a power of two, which rounds nothing."""
    _, exponent = math.frexp(root_mean_square(group[1]))
    return [tensor.flatten() * 2.0**-exponent for tensor in group]


@pytest.mark.parametrize("name", ["Llama", "Llama 4"])
def test_layers_that_share_a_mask_do_not_wait_for_the_gpu(name: str) -> None:
    model = make_model(name).eval().to(torch.bfloat16)
    model.set_attn_implementation("flashhopper")
    layer, masks = model.model.layers[0].self_attn, []
    layer.register_forward_pre_hook(lambda _, args, named: masks.append(named["attention_mask"]), with_kwargs=True)
    padding = torch.arange(300, device="cuda") >= torch.tensor([[0], [90]], device="cuda")
    q, k, v = (torch.randn(2, heads, 300, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    with torch.no_grad():
        model(torch.randint(1, 199, (2, 300), device="cuda"), attention_mask=padding)
        expected, _ = attention(layer, q, k, v, masks[0])
        torch.cuda.set_sync_debug_mode("error")
        try:
            out, _ = attention(layer, q, k, v, masks[0])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, expected)
    assert out[padding].abs().max() > 0


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generated_logits(name: str, cache: str) -> None:
    model = make_model(name).eval().to(torch.bfloat16)
    ids = torch.randint(1, 199, (2, 120), device="cuda")
    options: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
    options |= {"output_logits": True, "return_dict_in_generate": True, "attention_mask": torch.ones_like(ids)}
    options |= {"cache_implementation": "static"} if cache == "static" else {}
    logits = {}
    model.set_attn_implementation("eager")
    try:
        logits["eager"] = torch.stack(model.generate(ids, **options).logits)
    except TypeError as error:  # Llama 4 with a static cache in 5.17, whose masks refuse what its generate gives them
        pytest.skip(f"Transformers {transformers.__version__} itself fails, with eager attention: {error}")
    model.set_attn_implementation("flashhopper")
    logits["flashhopper"] = torch.stack(model.generate(ids, **options).logits)
    model.set_attn_implementation("eager")
    model.float()
    expected = torch.stack(model.generate(ids, **options).logits)
    assert_close_on_average(logits["flashhopper"], expected, logits["eager"], factor=2)
