"""Training steps on a GPU, in a process of its own. Prints one line of JSON; see `benchmarks.gpu`."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import torch

from benchmarks._gpu_shapes import GPU_SHAPES, PROMPT, RANK
from headrace_trainer.algorithms.settings import LossSettings
from headrace_trainer.batches.batch import Batch, Row
from headrace_trainer.settings import ComputeSettings, LoraSettings, OptimizerSettings
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.optimizer import Optimizer
from headrace_trainer.torch_learner.step import train


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
