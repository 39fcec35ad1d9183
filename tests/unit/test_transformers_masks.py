"""What Transformers' masks come to: pair by pair, without a wait for each layer, and in compiled models."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from flashhopper.integrations.transformers import attention, mask, register

transformers = pytest.importorskip("transformers", minversion="4.57", reason="transformers is not installed")
masks = pytest.importorskip("transformers.masking_utils")

register()
CHUNK = 4
CHUNKS = types.SimpleNamespace(attention_chunk_size=CHUNK)  # a config
CHUNKS_OF_PACKED_SEQUENCES = hasattr(masks, "remap_positions_for_packed_sequence")
TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
FP32 = {"atol": 1e-5, "rtol": 1e-5}


def in_chunks(left_padding: torch.Tensor) -> Any:
    return masks.chunked_causal_mask_function(CHUNK, left_padding)


def visible(function: Any, padding: torch.Tensor, where: dict[str, int]) -> torch.Tensor:
    """``(batch, q_length, kv_length)``: Transformers' description of a mask, called for each pair."""
    q_places = range(where["q_offset"], where["q_offset"] + where["q_length"])
    kv_places = range(where["kv_offset"], where["kv_offset"] + where["kv_length"])
    rows = [
        [
            [bool(function(b, 0, torch.tensor(q), torch.tensor(kv))) and bool(padding[b, kv]) for kv in kv_places]
            for q in q_places
        ]
        for b in range(len(padding))
    ]
    return torch.tensor(rows)


@pytest.mark.parametrize("q_length", [1, 3, 6, 9])
@pytest.mark.parametrize("q_offset", [0, 1, 3, 4, 7, 9])
@pytest.mark.parametrize("slides", [False, True])
def test_chunks_pair_by_pair(q_offset: int, q_length: int, slides: bool) -> None:
    """From the first token that is no padding, in caches that keep all keys and in such that keep a chunk less one."""
    end = q_offset + q_length
    left_padding = torch.tensor([0, min(2, end - 1), end - 1])
    padding = torch.arange(end) >= left_padding[:, None]
    kv_offset = max(q_offset - CHUNK + 1, 0) if slides else 0
    where = {"q_length": q_length, "q_offset": q_offset, "kv_length": end - kv_offset, "kv_offset": kv_offset}
    made = mask(3, mask_function=in_chunks(left_padding), attention_mask=padding, config=CHUNKS, **where)
    q = torch.randn(3, 2, q_length, 8)
    k, v = (torch.randn(3, 2, where["kv_length"], 8) for _ in range(2))
    module = torch.nn.Module()
    module.is_causal, module.config = True, CHUNKS
    out, _ = attention(module, q, k, v, made)
    shown = visible(in_chunks(left_padding), padding, where)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=shown[:, None]).transpose(1, 2)
    real = padding[:, q_offset:]
    torch.testing.assert_close(out[real], expected[real], **FP32)
    assert not out[~real].any()


def test_chunks_without_padding_stay_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    made = mask(2, q_length=9, kv_length=9, mask_function=in_chunks(torch.zeros(2, dtype=torch.int64)), config=CHUNKS)
    assert made is not None
    assert made.shape == (2, 1, 1, 9)
    module = torch.nn.Module()
    module.is_causal, module.config = True, CHUNKS
    q, k, v = (torch.randn(2, 2, 9, 8) for _ in range(3))
    monkeypatch.setattr("flashhopper.integrations.transformers.flash_attn_varlen_func", None)
    out, _ = attention(module, q, k, v, made)
    place = torch.arange(9)
    shown = (place[:, None] >= place) & (place[:, None] // CHUNK == place // CHUNK)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=shown).transpose(1, 2)
    torch.testing.assert_close(out, expected, **FP32)


def test_one_chunk_is_no_chunk() -> None:
    function = in_chunks(torch.zeros(1, dtype=torch.int64))
    assert mask(1, kv_length=CHUNK, q_length=CHUNK, mask_function=function) is None
    padding = torch.tensor([[False, True, True, True]])
    made = mask(1, kv_length=CHUNK, q_length=CHUNK, mask_function=function, attention_mask=padding)
    assert made is not None
    assert made.tolist() == [[0, 1, 1, 1]]


def test_chunks_that_the_layers_would_cut_otherwise_are_an_error() -> None:
    function = in_chunks(torch.zeros(1, dtype=torch.int64))
    asked = {"q_length": 5, "kv_length": 5, "mask_function": function}
    with pytest.raises(NotImplementedError, match="chunks of 4 keys, the config's attention_chunk_size is None"):
        mask(1, **asked)
    with pytest.raises(NotImplementedError, match="chunks of 4 keys, the config's attention_chunk_size is 8"):
        mask(1, config=types.SimpleNamespace(attention_chunk_size=8), **asked)
    with pytest.raises(NotImplementedError, match="a cache that begins within the first query's chunk"):
        mask(1, config=CHUNKS, q_offset=7, kv_offset=5, **asked)
    made = mask(1, config=CHUNKS, **asked)
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    with pytest.raises(NotImplementedError, match="no attention_chunk_size in the config of the layer"):
        attention(torch.nn.Module(), q, k, v, made)


@pytest.mark.parametrize("remapped, first", [(True, 0), (True, 1), (False, 0)])
def test_chunks_begin_with_their_packed_sequence(remapped: bool, first: int) -> None:
    """As Transformers has it from 5.x on: before, and with other positions, chunks begin elsewhere."""
    if remapped and not CHUNKS_OF_PACKED_SEQUENCES:
        pytest.skip("this Transformers counts chunks of packed sequences from the row's first token")
    segments, positions = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]]), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]) + first
    function = in_chunks(torch.zeros(1, dtype=torch.int64))
    if remapped:
        function = masks.remap_positions_for_packed_sequence(function, positions)
    function = masks.and_masks(function, masks.packed_sequence_mask_function(segments))
    asked = {"q_length": 8, "kv_length": 8, "mask_function": function, "config": CHUNKS}
    if not remapped or first:
        with pytest.raises(NotImplementedError, match="chunks that do not begin with their packed sequence"):
            mask(1, **asked)
        return
    module = torch.nn.Module()
    module.is_causal, module.config = True, CHUNKS
    q, k, v = (torch.randn(1, 2, 8, 8) for _ in range(3))
    out, _ = attention(module, q, k, v, mask(1, **asked))
    shown = visible(function, torch.ones(1, 8), {"q_offset": 0, "q_length": 8, "kv_offset": 0, "kv_length": 8})
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=shown[:, None]).transpose(1, 2)
    torch.testing.assert_close(out, expected, **FP32)


def test_a_mask_of_more_than_padding_is_an_error() -> None:
    images = masks.or_masks(masks.causal_mask_function, masks.sliding_window_overlay(3))
    with pytest.raises(NotImplementedError, match="or_masks"):
        mask(1, kv_length=5, q_length=5, mask_function=images)
    with pytest.raises(NotImplementedError, match="more than flashhopper can express"):
        mask(1, kv_length=5, q_length=5, mask_function=lambda b, h, q, k: q == k)


def test_a_static_cache_hides_the_places_without_keys() -> None:
    """With or without padding, and also when asked by positions, as Transformers 4.5x does."""
    causal = masks.causal_mask_function
    asked = {"kv_length": 6, "mask_function": causal}
    assert mask(1, q_length=2, q_offset=1, **asked).tolist() == [[1, 1, 1, -1, -1, -1]]
    assert mask(1, cache_position=torch.tensor([1, 2]), **asked).tolist() == [[1, 1, 1, -1, -1, -1]]
    padding = torch.tensor([[False, True, True]])
    assert mask(1, q_length=2, q_offset=1, attention_mask=padding, **asked).tolist() == [[0, 1, 1, -1, -1, -1]]
    assert mask(1, q_length=2, q_offset=4, **asked) is None


def test_a_sliding_cache_shows_the_last_places_however_often_it_is_asked() -> None:
    """``generate`` hands a mask that it has got to the model, which asks for a mask of it."""
    causal = masks.causal_mask_function
    asked = {"q_length": 1, "q_offset": 9, "kv_length": 4, "kv_offset": 6, "mask_function": causal}
    padding = torch.arange(10)[None] >= 8
    once = mask(1, attention_mask=padding, **asked)
    assert once is not None
    assert once.tolist() == [[0, 0, 1, 1]]
    assert mask(1, attention_mask=once, **asked).tolist() == [[0, 0, 1, 1]]


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a GPU: numbers read, and shapes that depend on them."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select)
        self.number += function.overloadpacket in reads
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("batch", ["whole", "padded", "packed"])
@pytest.mark.parametrize("name", ["Llama", "Llama4"])
def test_the_host_waits_once_for_a_mask_and_not_for_each_layer(name: str, batch: str) -> None:
    waits = []
    options: dict[str, Any] = {"use_cache": False}
    if batch == "padded":
        options["attention_mask"] = torch.arange(9) >= torch.tensor([[0], [3]])
    elif batch == "packed":
        if name == "Llama4" and not CHUNKS_OF_PACKED_SEQUENCES:
            pytest.skip("this Transformers counts chunks of packed sequences from the row's first token")
        options["position_ids"] = torch.cat([torch.arange(4), torch.arange(5)]).expand(2, -1)
    for layers in (2, 6):
        model = tiny_model(name, layers)
        ids = torch.randint(1, 97, (2, 9))
        with torch.no_grad(), Waits() as counted:
            model(ids, **options)
        waits.append(counted.number)
    assert 0 < waits[0] == waits[1]


def tiny_model(name: str, num_layers: int = 2, **options: Any) -> Any:
    if name == "Llama4":
        kinds = ["chunked_attention", "full_attention"] * (num_layers // 2)
        options |= {"attention_chunk_size": CHUNK, "layer_types": kinds, "moe_layers": [], "intermediate_size_mlp": 48}
        options |= {"no_rope_layers": [1, 0] * (num_layers // 2)}
    config = f"{name}TextConfig" if name == "Llama4" else f"{name}Config"
    sizes = TINY | {"num_hidden_layers": num_layers} | options
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, config)(**sizes)).eval()
    model.set_attn_implementation("flashhopper")
    return model


@pytest.fixture
def nothing_compiled() -> None:
    torch._dynamo.reset()


def random_batch(rows: int, seqlen: int, padded: bool) -> dict[str, torch.Tensor]:
    batch = {"input_ids": torch.randint(1, 97, (rows, seqlen))}
    if padded:
        lengths = torch.randint(1, seqlen + 1, (rows, 1))
        batch["attention_mask"] = (torch.arange(seqlen) >= seqlen - lengths).long()
    for x in batch.values():
        torch._dynamo.mark_dynamic(x, (0, 1))
    return batch


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.slow
@pytest.mark.parametrize("name, padded", [("Llama", True), ("Llama", False), ("Mistral", True)])
def test_a_compiled_model_compiles_once_for_all_lengths(name: str, padded: bool) -> None:
    """A padding mask with nothing but causality is part of the one graph; functions of masks are read between two."""
    whole = name == "Llama" and padded
    counter = CompileCounterWithBackend("aot_eager")
    model = tiny_model(name, 1, **({"sliding_window": 5} if name == "Mistral" else {}))
    compiled = torch.compile(model, fullgraph=whole, dynamic=None if whole else True, backend=counter)
    graphs = []
    for rows, seqlen in ((2, 20), (2, 33), (3, 64), (5, 7)):
        batch = random_batch(rows, seqlen, padded)
        real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        results = []
        for run in (compiled, model):
            logits = run(**batch, use_cache=False).logits[real]
            gradients = torch.autograd.grad(logits.square().mean(), list(model.parameters())) if whole else ()
            results.append([logits, *gradients])
        torch.testing.assert_close(*results, **FP32)
        graphs.append(counter.frame_count)
    assert graphs == ([1] if whole else graphs[:1]) * 4
    calls = [n for graph in counter.graphs for n in graph.graph.nodes if n.target is torch.ops.flashhopper.attention]
    assert len(calls) == 1


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.slow
def test_a_compiled_model_with_chunks() -> None:
    model = tiny_model("Llama4")
    batch = random_batch(2, 20, padded=True)
    with torch.no_grad():
        mine, expected = (
            run(**batch, use_cache=False).logits[batch["attention_mask"].bool()]
            for run in (torch.compile(model, backend="aot_eager"), model)
        )
    torch.testing.assert_close(mine, expected, **FP32)


@pytest.mark.usefixtures("nothing_compiled")
def test_a_whole_graph_without_a_padding_mask_says_what_to_pass() -> None:
    compiled = torch.compile(tiny_model("Llama", 1), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="with fullgraph=True pass an attention_mask"):
        compiled(**random_batch(2, 9, padded=False), use_cache=False)


@pytest.mark.usefixtures("nothing_compiled")
def test_packed_sequences_in_a_compiled_layer_stop_the_program() -> None:
    """Their number is known on the device only."""
    places = torch.tensor([[1, 1, 2, 2, 2]], dtype=torch.int32)
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    module = torch.nn.Module()
    module.is_causal = True
    compiled = torch.compile(lambda places: attention(module, q, k, v, places)[0], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(places.clamp_max(1)), attention(module, q, k, v, None)[0], **FP32)
    with pytest.raises(RuntimeError, match="packed sequences in a compiled model"):
        compiled(places)
