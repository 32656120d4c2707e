"""Headrace's training steps, one for each line of standard input, with their costs on standard output.

`benchmarks._peers` describes the comparison.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks._run_processes import peak_bytes
from benchmarks._shapes import PROMPT
from headrace_trainer.algorithms.settings import LossSettings
from headrace_trainer.batches.batch import Batch, Row
from headrace_trainer.settings import ComputeSettings, LoraSettings, OptimizerSettings
from headrace_trainer.torch_learner.model.head import Head
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.optimizer import Optimizer
from headrace_trainer.torch_learner.step import train


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


if __name__ == "__main__":
    main()
