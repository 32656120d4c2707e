"""What a training step costs: `python -m benchmarks.trainer`. Writes `reports/bench-trainer.json`.

The line: logprobs and gradients of 32,768 loss tokens at 152,000 words take 1.5 GB above the weights at most, measured
in a process of its own with two threads. Exit status 1 when that does not hold. Beside it tokens per CPU second of
whole steps (forward, backward, update) of two models, with the head in chunks and with all logits at once, which take
turns so that a busy machine disturbs them alike; the best round counts, the median stands beside it. Some minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks._numbers import Summary
from headrace_trainer.batch import Batch, Row
from headrace_trainer.head import Head
from headrace_trainer.optimizer import Optimizer
from headrace_trainer.policy import Policy
from headrace_trainer.settings import ComputeSettings, LoraSettings, LossSettings, OptimizerSettings
from headrace_trainer.step import train

TOKENS, VOCABULARY = 32_768, 152_000
PEAK_GB_MAX = 1.5
CHILD_S_MAX = 3600
PROMPT = 0.25
"""Share of a sequence that is not trained."""
HOWS = ("chunked", "whole")


@dataclass(frozen=True)
class Shape:
    """A Qwen 3 with tied embeddings."""

    name: str
    vocabulary: int
    hidden: int
    layers: int
    feed_forward: int
    heads: int

    def build(self, folder: Path) -> Path:
        """Random weights; a step needs no tokenizer."""
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=self.vocabulary, hidden_size=self.hidden, num_hidden_layers=self.layers,
            intermediate_size=self.feed_forward, num_attention_heads=self.heads, num_key_value_heads=self.heads // 2,
            head_dim=32, max_position_embeddings=2048, tie_word_embeddings=True,
        )  # fmt: skip
        Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder / self.name)
        return folder / self.name


SHAPES = (Shape("demo", 600, 96, 3, 256, 4), Shape("small", 16_384, 384, 6, 1152, 12))
"""0.4 million parameters, and 17."""


def peak(hidden: int, threads: int, tokens: int) -> dict[str, object]:
    """Of the head in chunks, in a process of its own."""
    sizes = {"tokens": tokens, "vocabulary": VOCABULARY, "hidden": hidden, "threads": threads}
    given = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks._head_memory", *given],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=CHILD_S_MAX,
    )
    found: dict[str, object] = json.loads(child.stdout)
    return found


def batch_of(shape: Shape, sequences: int, length: int) -> Batch:
    draw = np.random.default_rng(0)
    mask, zeros = np.arange(length) >= int(length * PROMPT), np.zeros(length, np.float32)
    behaviour = np.where(mask, -np.log(shape.vocabulary), 0).astype(np.float32)
    return Batch(
        tuple(
            Row(
                str(number), 0, draw.integers(shape.vocabulary, size=length).astype(np.int32), mask, behaviour,
                zeros + 1, np.float32(draw.normal()), mask,
            )
            for number in range(sequences)
        )
    )  # fmt: skip


class Stepping:
    """One model that takes steps one way."""

    def __init__(self, folder: Path, how: str, threads: int) -> None:
        self._policy = Policy.open(folder, ComputeSettings(device="cpu", threads=threads), LoraSettings(), seed=0)
        if how == "whole":
            self._policy.head = Head(self._policy.head.module, whole="for comparison")
        self._optimizer = Optimizer(self._policy.parameters, OptimizerSettings())
        self.parameters = sum(parameter.numel() for parameter in self._policy.parameters.values())
        self.rates: list[float] = []

    def step(self, batch: Batch, pack_tokens: int) -> None:
        began = time.process_time()
        train(self._policy, self._optimizer, batch, LossSettings(), pack_tokens, threading.Event())
        self.rates.append(sum(row.length for row in batch.rows) / (time.process_time() - began))


def steps(shape: Shape, rounds: int, threads: int, sequences: int) -> dict[str, object]:
    """Tokens per CPU second, both ways in turns; the first step of each warms up and does not count."""
    with tempfile.TemporaryDirectory(prefix="bench-trainer-") as root:
        folder = shape.build(Path(root))
        ways = {how: Stepping(folder, how, threads) for how in HOWS}
    batch, pack_tokens = batch_of(shape, sequences, 256), 4096
    for _ in range(rounds + 1):
        for way in ways.values():
            way.step(batch, pack_tokens)
    rates = {how: Summary.of(way.rates[1:]).rate() for how, way in ways.items()}
    return {
        "parameters": ways["chunked"].parameters,
        "vocabulary": shape.vocabulary,
        "tokens_per_step": sum(row.length for row in batch.rows),
        "tokens_per_cpu_s": rates,
        "chunked_over_whole": round(rates["chunked"]["best"] / rates["whole"]["best"], 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=64, help="of the measured head (%(default)s)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the measured head (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each kind that count (%(default)s)")
    parser.add_argument("--sequences", type=int, default=16, help="of 256 tokens in a step (%(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("reports/bench-trainer.json"))
    options = parser.parse_args()
    memory = peak(options.hidden, options.threads, options.tokens)
    print(f"head in chunks: {json.dumps(memory)}", flush=True)
    speed: dict[str, object] = {}
    for shape in SHAPES:
        speed[shape.name] = steps(shape, options.rounds, options.threads, options.sequences)
        print(f"{shape.name}: {json.dumps(speed[shape.name])}", flush=True)
    taken = float(str(memory["peak_gb"]))
    missed = [f"head: {taken:g} GB, at most {PEAK_GB_MAX:g} GB"] if taken > PEAK_GB_MAX else []
    report = {
        "memory": memory | {"peak_gb_max": PEAK_GB_MAX},
        "steps": speed,
        "threads": options.threads,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "missed": missed,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    for line in missed:
        print(f"does not hold: {line}", file=sys.stderr)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
