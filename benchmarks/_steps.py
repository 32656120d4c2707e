"""Training steps of Headrace beside those of TRL, in separate processes and on the same data, with their models."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from benchmarks._run_processes import Summary, peak_bytes
from headrace_trainer.algorithms.settings import LossSettings
from headrace_trainer.batches.batch import Batch, Row
from headrace_trainer.settings import ComputeSettings, LoraSettings, OptimizerSettings
from headrace_trainer.torch_learner.model.head import Head
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.optimizer import Optimizer
from headrace_trainer.torch_learner.step import train

PACK_TOKENS = 4096
"""Tokens of one forward pass for both trainers. The peer takes as many sequences as fit."""
PEERS = Path(".venv-peers")
START_S = 300.0
CALM = {"OMP_WAIT_POLICY": "passive"}
"""Environment of both trainers, in which waiting threads use no CPU time."""


def batch_of(token_ids: list[list[int]], advantages: list[float], vocabulary: int) -> Batch:
    rows = []
    for number, (tokens, advantage) in enumerate(zip(token_ids, advantages, strict=True)):
        length = len(tokens)
        mask, zeros = np.arange(length) >= max(1, int(length * PROMPT)), np.zeros(length, np.float32)
        behaviour = np.where(mask, -np.log(vocabulary), 0).astype(np.float32)
        ids = np.array(tokens, np.int32)
        rows.append(Row(str(number), 0, ids, mask, behaviour, zeros + 1, np.float32(advantage), mask))
    return Batch(tuple(rows))


def matmul_rate(seconds: float = 1.0) -> float:
    """Return the float32 multiplications and additions per CPU second: the best of several attempts."""
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    out = torch.empty(1024, 1024)
    torch.mm(left, right, out=out)
    best, until = 0.0, time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.process_time()
        for _ in range(4):
            torch.mm(left, right, out=out)
        best = max(best, 4 * 2 * 1024**3 / (time.process_time() - began))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="JSON: token_ids, advantages, vocabulary")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pack-tokens", type=int, default=4096)
    parser.add_argument("--whole", action="store_true", help="compute all logits at once")
    options = parser.parse_args()
    compute = ComputeSettings(device="cpu", threads=options.threads)
    policy = Policy.open(options.model, compute, LoraSettings(), seed=0)
    if options.whole:
        policy.head = Head(policy.head.module, unchunked_reason="for comparison")
    optimizer = Optimizer(policy.parameters, OptimizerSettings(learning_rate=1e-5))
    batch = batch_of(**json.loads(options.data.read_text()))
    parameters = sum(parameter.numel() for parameter in policy.parameters.values())
    before, rate = peak_bytes(), matmul_rate()
    print(json.dumps({"ready": True, "parameters": parameters, "matmul_flops": rate}), flush=True)
    for _ in sys.stdin:
        began = time.process_time()
        step_result = train(policy, optimizer, batch, LossSettings(), options.pack_tokens, threading.Event())
        cpu_s = time.process_time() - began
        memory = {"peak_gb": peak_bytes() / 1e9, "over_start_gb": (peak_bytes() - before) / 1e9}
        print(
            json.dumps({"cpu_s": cpu_s, "gradient_norm": step_result.measured["gradient_norm"], **memory}), flush=True
        )


@dataclass
class Trainer:
    """Trainer process that takes a step for each line of its input."""

    name: str
    process: subprocess.Popen[str]
    about: dict[str, Any]
    steps: list[dict[str, float]] = field(default_factory=list)

    @classmethod
    def start(cls, name: str, command: Sequence[str]) -> Self:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=os.environ | CALM,
        )  # fmt: skip
        return cls(name, process, _answer(process, name))

    def step(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        self.steps.append(_answer(self.process, self.name))

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=START_S)

    def rates(self, tokens: int) -> dict[str, float]:
        """Return the token rates. The first step warms up and does not count."""
        return Summary.of([tokens / step["cpu_s"] for step in self.steps[1:]]).rate()


def _answer(process: subprocess.Popen[str], name: str) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            answer: dict[str, Any] = json.loads(line)
            return answer
    raise RuntimeError(f"the trainer {name} ended with status {process.wait()} before it answered")


@dataclass(frozen=True)
class Workload:
    """Sequences of a training step."""

    length: int
    mixed: bool
    tokens: int
    """Approximate number of tokens of a step."""

    @property
    def name(self) -> str:
        return f"up to {self.length}" if self.mixed else f"all {self.length}"

    def sequences(self, shape: Shape) -> Sequences:
        return Sequences.of(shape.vocabulary, self.length, max(2, self.tokens // self.length), mixed=self.mixed)


def compare_with_trl(shape: Shape, model: Path, workload: Workload, rounds: int, threads: int) -> dict[str, Any]:
    """Compare Headrace's trainer with TRL's GRPO trainer."""
    sequences = workload.sequences(shape)
    data = model.parent / f"{shape.name}-{workload.name.replace(' ', '-')}.json"
    data_of_step = {
        "token_ids": sequences.token_ids(),
        "advantages": sequences.advantages(),
        "vocabulary": shape.vocabulary,
    }
    data.write_text(json.dumps(data_of_step))
    shared = ["--model", str(model), "--data", str(data), "--threads", str(threads)]
    count = len(sequences.lengths)
    rows = next(rows for rows in range(max(1, PACK_TOKENS // workload.length), 0, -1) if count % rows == 0)
    command = [sys.executable, "-m", "benchmarks._steps", *shared, "--pack-tokens", str(PACK_TOKENS)]
    peer_command = [str(PEERS / "bin/python"), "benchmarks/_peer_trl.py", *shared, "--rows", str(rows)]
    both = [Trainer.start("headrace", command), Trainer.start("TRL", peer_command)]
    try:
        for _ in range(rounds + 1):
            for trainer in both:
                trainer.step()
    finally:
        for trainer in both:
            trainer.end()
    tokens, flops = sum(sequences.lengths), shape.flops(list(sequences.lengths))
    rates = {trainer.name: trainer.rates(tokens) for trainer in both}
    matmul = both[0].about["matmul_flops"]
    return {
        **asdict(workload),
        "parameters": both[0].about["parameters"],
        "sequences": count,
        "tokens_per_step": tokens,
        "tokens_per_cpu_s": rates,
        "ratio": round(rates["headrace"]["best"] / rates["TRL"]["best"], 2),
        "ratio_of_medians": round(rates["headrace"]["median"] / rates["TRL"]["median"], 2),
        "matmul_gflops_per_cpu_s": round(matmul / 1e9, 1),
        "share_of_matmul": {
            name: round(rate["best"] / tokens * flops / matmul, 2) for name, rate in rates.items()
        },
        "peak_gb": {trainer.name: round(trainer.steps[-1]["peak_gb"], 2) for trainer in both},
        "peak_over_start_gb": {trainer.name: round(trainer.steps[-1]["over_start_gb"], 2) for trainer in both},
    }  # fmt: skip


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


if __name__ == "__main__":
    main()
