"""Models and sequences of the training benchmarks, and the minimum number of operations of a step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

PROMPT = 0.25
"""Share of a sequence that is not trained."""


@dataclass(frozen=True)
class Shape:
    """Shape of a Qwen 3 model with tied embeddings."""

    name: str
    vocabulary: int
    hidden: int
    layers: int
    feed_forward: int
    heads: int
    kv_heads: int = 0
    """Number of key-value heads; 0 stands for half of `heads`."""
    head_dim: int = 32

    def build(self, folder: Path) -> Path:
        """Write random weights. A step needs no tokenizer, and a version gets a placeholder."""
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=self.vocabulary, hidden_size=self.hidden, num_hidden_layers=self.layers,
            intermediate_size=self.feed_forward, num_attention_heads=self.heads, num_key_value_heads=self._kv_heads,
            head_dim=self.head_dim, max_position_embeddings=32_768, tie_word_embeddings=True,
        )  # fmt: skip
        Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder / self.name)
        (folder / self.name / "tokenizer.json").write_text("{}")
        (folder / self.name / "chat_template.jinja").write_text("{{ messages }}")
        return folder / self.name

    @property
    def _kv_heads(self) -> int:
        return self.kv_heads or self.heads // 2

    def flops(self, lengths: list[int]) -> float:
        """Return the multiplications and additions of forward and backward pass.

        They are those of the layers' matrices for each token, of attention for each pair of tokens that attend to each
        other, and of the head for each loss token. Recomputation does not count.
        """
        width = self.heads * self.head_dim
        matrices = self.layers * self.hidden * (2 * width + 2 * self._kv_heads * self.head_dim + 3 * self.feed_forward)
        total = 0.0
        for length in lengths:
            loss = length - int(length * PROMPT)
            pairs = length * (length + 1) / 2
            total += length * matrices + self.layers * pairs * 2 * width + loss * self.hidden * self.vocabulary
        return 6 * total


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("demo", 600, 96, 3, 256, 4),  # 0.4 million parameters
        Shape("small", 16_384, 384, 6, 1152, 12),  # 17
        Shape("large", 32_000, 768, 12, 2304, 24),  # 110
    )
}
SIZES = {
    shape.name: shape
    for shape in (
        Shape("400k", 600, 96, 3, 256, 4),  # the demo's
        Shape("35m", 32_768, 384, 14, 1024, 6, kv_heads=2, head_dim=64),
        Shape("135m", 49_152, 576, 30, 1536, 9, kv_heads=3, head_dim=64),  # SmolLM2's
        Shape("500m", 151_936, 896, 24, 4864, 14, kv_heads=2, head_dim=64),  # Qwen2.5's
    )
}
"""Models of `benchmarks.sizing`, by their number of parameters."""


@dataclass(frozen=True)
class Sequences:
    """Training data of a step, the same for all trainers."""

    vocabulary: int
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, vocabulary: int, length: int, count: int, *, mixed: bool) -> Sequences:
        """Return sequences of equal length, or, if `mixed`, of lengths from a quarter of `length` up, evenly spread."""
        shares = np.linspace(0.25, 1, count) if mixed else np.ones(count)
        return cls(vocabulary, tuple(int(length * share) for share in shares))

    def token_ids(self) -> list[list[int]]:
        draw = np.random.default_rng(0)
        return [draw.integers(3, self.vocabulary, size=length).tolist() for length in self.lengths]

    def advantages(self) -> list[float]:
        draw = np.random.default_rng(1)
        return [float(draw.normal()) for _ in self.lengths]
