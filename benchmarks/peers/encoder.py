"""The sentence encoder as people write it: one function over a list of texts, padded to the longest of them."""

from __future__ import annotations

import os

import torch
from transformers import AutoModel, AutoTokenizer


class Encoder:
    """The model in the directory that `MINILM_DIRECTORY` names, on the CPU."""

    def __init__(self) -> None:
        directory = os.environ["MINILM_DIRECTORY"]
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._model = AutoModel.from_pretrained(directory).eval()

    def encode(self, texts: list[str]) -> list[list[float]]:
        """One vector for each text: mean over its tokens, normalised."""
        encoded = self._tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
        with torch.inference_mode():
            hidden = self._model(**encoded).last_hidden_state
            mask = encoded["attention_mask"].unsqueeze(-1)
            mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
            return torch.nn.functional.normalize(mean, dim=1).tolist()
