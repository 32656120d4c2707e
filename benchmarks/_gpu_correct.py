"""Comparison of loss and gradients of a packed step on a GPU with those in float64 on the CPU, in a separate process.

The models are small, with grouped heads, causal and with a sliding window. Rows hold sequences of very different
lengths. The program prints one line of JSON with the largest relative errors (norm of the difference over norm) of
logprobs and gradients.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks._gpu_step import batch_of
from headrace_trainer.settings import ComputeSettings, LoraSettings, OptimizerSettings
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.optimizer import Optimizer

LENGTHS = [2048, 2048, 1300, 700, 3, 515, 64, 1024, 129]
SIZES: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "autocast": {"dtype": "bfloat16"},
    "masters": {"dtype": "bfloat16", "weights": "bfloat16"},
    "masters, compiled": {"dtype": "bfloat16", "weights": "bfloat16", "compile": True},
    "masters, compiled, recomputed": {
        "dtype": "bfloat16", "weights": "bfloat16", "compile": True, "gradient_checkpointing": True,
    },
    "adapters, compiled, recomputed": {"dtype": "bfloat16", "compile": True, "gradient_checkpointing": True},
}  # fmt: skip


def models(root: Path) -> dict[str, Path]:
    torch.manual_seed(1)
    models_by_name = {
        "plain": Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
        "window": MistralForCausalLM(MistralConfig(**SIZES, sliding_window=200)),
    }
    for name, model in models_by_name.items():
        for parameter in model.parameters():
            parameter.data.mul_(2.0 if parameter.ndim > 1 else 1.0)  # makes attention prefer some keys
        model.to(torch.bfloat16).save_pretrained(root / name)
    return {name: root / name for name in models_by_name}


def logprobs_and_gradients(
    folder: Path, compute: ComputeSettings, rank: int, wide: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logprobs, and the gradients of a loss that weights them."""
    policy = Policy.open(folder, compute, LoraSettings(rank=rank), seed=0)
    draw = torch.Generator().manual_seed(3)
    for parameter in policy.parameters.values():
        if rank:  # a new adapter is zero, and so are half of its gradients
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=draw))
    if wide:
        policy.model.double()
    batch = batch_of(LENGTHS, 1024)
    pack = policy.collate([batch.with_token_weight(row) for row in batch.rows])
    weight_N = torch.from_numpy(np.random.default_rng(2).normal(size=len(pack.targets_N))).to(policy.device)

    def slope(logprobs: Tensor, part: slice) -> Tensor:
        return weight_N[part].to(logprobs.dtype)

    logprobs_N, _ = policy.backward(pack, slope)
    gradients = {name: p.grad.double().cpu() for name, p in policy.parameters.items() if p.grad is not None}
    return logprobs_N.double().cpu(), gradients


def updated_weights(device: str) -> Tensor:
    """Return weights after several updates, one of them with corrections."""
    draw = torch.Generator().manual_seed(5)
    sizes = {"a": (300, 70), "b": (64,), "c": (128, 33), "d": (7, 5, 3)}
    weights = {name: nn.Parameter(torch.randn(size, generator=draw).to(device)) for name, size in sizes.items()}
    optimizer = Optimizer(weights, OptimizerSettings(learning_rate=1e-2, weight_decay=0.1))
    for number in range(6):
        for weight in weights.values():
            weight.grad = torch.randn(weight.shape, generator=draw).to(device)
        stashed = optimizer.pop_gradients() if number == 3 else {}
        for weight in weights.values() if stashed else ():
            weight.grad = torch.randn(weight.shape, generator=draw).to(device)
        optimizer.clip_gradients(1.0)
        optimizer.apply(1.0, stashed)
    return torch.cat([weight.detach().flatten().double().cpu() for weight in weights.values()])


def error(values: Tensor, reference: Tensor) -> float:
    return float((values - reference).norm() / reference.norm())


def main() -> None:
    report: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as root:
        for kind, folder in models(Path(root)).items():
            on_cpu = ComputeSettings(device="cpu", threads=8)
            truth = {rank: logprobs_and_gradients(folder, on_cpu, rank, wide=True) for rank in (0, 8)}
            for way, compute_settings in WAYS.items():
                if kind == "window" and compute_settings.get("compile"):
                    continue  # compiled attention does not support windows, and compiling takes long
                rank = 8 if "adapters" in way else 0
                logprobs_N, gradients = logprobs_and_gradients(
                    folder, ComputeSettings(device="cuda", **compute_settings), rank, wide=False
                )
                expected_N, expected = truth[rank]
                assert gradients.keys() == expected.keys(), gradients.keys() ^ expected.keys()
                computed, reference = (
                    torch.cat([tensors[name].flatten() for name in expected]) for tensors in (gradients, expected)
                )
                report[f"{kind}, {way}"] = errors = {
                    "logprobs_max": float((logprobs_N - expected_N).abs().max()),
                    "gradients": error(computed, reference),
                    "worst_gradient": max(error(gradients[name], expected[name]) for name in expected),
                }
                print(kind, way, errors, file=sys.stderr, flush=True)
    report["optimizer, float32"] = {"gradients": error(updated_weights("cuda"), updated_weights("cpu"))}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
