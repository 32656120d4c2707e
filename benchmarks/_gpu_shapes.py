"""Models of the GPU benchmarks, and the minimum number of operations of a step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

RANK = 16
PROMPT = 0.25
"""Share of a sequence that is not trained."""
NOMINAL_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H200": 989.4,
    "GH200": 989.4,
    "A100": 312.0,
    "L40S": 362.0,
    "B200": 2250.0,
}
"""Dense bfloat16 rates from the makers' data sheets. The first name that occurs in the device's name applies."""


def nominal_tflops(device: str) -> float | None:
    return next((rate for name, rate in NOMINAL_TFLOPS.items() if name in device), None)


@dataclass(frozen=True)
class GpuShape:
    """Shape of a published Qwen 3 model."""

    name: str
    hidden: int
    layers: int
    feed_forward: int
    heads: int
    tied: bool
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 151_936

    def build(self, folder: Path) -> Path:
        """Write random weights in bfloat16. A step needs no tokenizer, and a version gets a placeholder."""
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            vocab_size=self.vocabulary, hidden_size=self.hidden, num_hidden_layers=self.layers,
            intermediate_size=self.feed_forward, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim, max_position_embeddings=40_960, tie_word_embeddings=self.tied,
        )  # fmt: skip
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("cuda"):
                model = Qwen3ForCausalLM(config)
        finally:
            torch.set_default_dtype(torch.float32)
        model.to(torch.bfloat16).save_pretrained(folder)
        (folder / "tokenizer.json").write_text("{}")
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        del model
        torch.cuda.empty_cache()
        return folder

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def flops(self, lengths: list[int], rank: int) -> float:
        """Return the multiplications and additions of forward and backward pass.

        Forward: two for each weight of a layer and each token, and for each weight of the head and each loss token;
        four times the width of attention for each pair of tokens that attend to each other, in each layer. Backward: as
        many again for the activations, and, except for attention, as many again for the trained weights, which are all
        weights or only the adapters. Recomputation does not count.
        """
        shared = self.kv_heads * self.head_dim
        layer = self.hidden * (2 * self.width + 2 * shared + 3 * self.feed_forward)
        # Each of the seven matrices (q, k, v, o, gate, up, down) has two adapter matrices, as long as its sides.
        sides = 4 * self.hidden + 2 * self.width + 2 * shared + 3 * (self.hidden + self.feed_forward)
        adapters = rank * sides * self.layers
        matrices, head = self.layers * layer, self.hidden * self.vocabulary
        total = 0.0
        for length in lengths:
            loss = length - int(length * PROMPT)
            pairs = length * (length + 1) / 2
            total += (4 if rank else 6) * (length * matrices + loss * head) + 6 * length * adapters
            total += 3 * 4 * self.width * self.layers * pairs
        return total


GPU_SHAPES = {
    shape.name: shape
    for shape in (
        GpuShape("0.6b", 1024, 28, 3072, 16, tied=True),
        GpuShape("8b", 4096, 36, 12_288, 32, tied=False),
        GpuShape("tiny", 256, 2, 512, 4, tied=True, kv_heads=2, head_dim=64, vocabulary=1024),
    )
}
