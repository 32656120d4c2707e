"""Training steps on a GPU, in a process of its own that prints one line of JSON, with their models and operations."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from headrace_trainer.algorithms.settings import LossSettings
from headrace_trainer.batches.batch import Batch, Row
from headrace_trainer.settings import ComputeSettings, LoraSettings, OptimizerSettings
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.optimizer import Optimizer
from headrace_trainer.torch_learner.step import train

RANK = 16
PROMPT = 0.25
"""Share of a sequence that is not trained."""
NOMINAL_TFLOPS = {
    "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.4, "H200": 989.4, "GH200": 989.4, "A100": 312.0, "L40S": 362.0,
    "B200": 2250.0,
}  # fmt: skip
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


def batch_of(lengths: list[int], vocabulary: int) -> Batch:
    draw = np.random.default_rng(0)
    rows = []
    for number, length in enumerate(lengths):
        mask, zeros = np.arange(length) >= max(1, int(length * PROMPT)), np.zeros(length, np.float32)
        ids = draw.integers(3, vocabulary, size=length).astype(np.int32)
        behaviour = np.where(mask, -np.log(vocabulary), 0).astype(np.float32)
        advantage = np.float32(draw.normal())
        rows.append(Row(str(number), 0, ids, mask, behaviour, zeros + 1, advantage, mask))
    return Batch(tuple(rows))


def print_profile(policy: Policy, optimizer: Optimizer, batch: Batch, pack_tokens: int) -> None:
    """Print the time of one step by kernel to standard error."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        train(policy, optimizer, batch, LossSettings(), pack_tokens, threading.Event())
        torch.cuda.synchronize()
    table = profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=70)
    print(table, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=GPU_SHAPES, default="0.6b")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--mixed", action="store_true", help="mix lengths from an eighth of --length up")
    parser.add_argument("--pack-tokens", type=int, default=32_768)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--weights", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--plain", action="store_true", help="compile nothing")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    shape, rank = GPU_SHAPES[options.shape], RANK if options.lora else 0
    compute = ComputeSettings(
        device="cuda", dtype="bfloat16", weights=options.weights, compile=not options.plain, threads=8,
        gradient_checkpointing=options.recompute,
    )  # fmt: skip
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as root:
        policy = Policy.open(shape.build(Path(root)), compute, LoraSettings(rank=rank), seed=0)
        optimizer = Optimizer(policy.parameters, OptimizerSettings(learning_rate=1e-6))
    opened_s = time.perf_counter() - began
    initial_bytes = torch.cuda.memory_allocated()
    shares = np.linspace(0.125, 1, options.sequences) if options.mixed else np.ones(options.sequences)
    lengths = [int(options.length * share) for share in shares]
    batch = batch_of(lengths, shape.vocabulary)
    durations_s: list[float] = []
    waits = 0
    for step in range(options.steps + 2):
        last = step == options.steps + 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn" if last else "default")
            began = time.perf_counter()
            step_result = train(policy, optimizer, batch, LossSettings(), options.pack_tokens, threading.Event())
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
            durations_s.append(time.perf_counter() - began)
        if last:
            messages = [str(warning.message) for warning in caught]
            waits = sum("synchroni" in message for message in messages)
    if options.profile:
        print_profile(policy, optimizer, batch, options.pack_tokens)
    best = min(durations_s[1:])
    flops = shape.flops(lengths, rank)
    print(
        json.dumps({
            "tokens": sum(lengths), "opened_s": round(opened_s, 1), "first_step_s": round(durations_s[0], 1),
            "step_s": round(best, 4), "median_s": round(statistics.median(durations_s[1:]), 4),
            "tokens_per_s": round(sum(lengths) / best), "tflops": round(flops / best / 1e12, 1),
            "held_gb": round(initial_bytes / 1e9, 2), "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
            "reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2), "waits": waits,
            "loss": step_result.measured["loss"], "gradient_norm": step_result.measured["gradient_norm"],
        })
    )  # fmt: skip


if __name__ == "__main__":
    main()
