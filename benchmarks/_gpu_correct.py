"""A packed step's loss and gradients on a GPU beside those in float64 on the CPU, in a process of its own.

Small models with grouped heads, plainly causal and with a sliding window, rows of sequences of very different lengths.
Prints one line of JSON: the largest relative error, norm of the difference over norm, of logprobs and of gradients.
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
    found = {
        "plain": Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
        "window": MistralForCausalLM(MistralConfig(**SIZES, sliding_window=200)),
    }
    for name, model in found.items():
        for parameter in model.parameters():
            parameter.data.mul_(2.0 if parameter.ndim > 1 else 1.0)  # attention that prefers some keys
        model.to(torch.bfloat16).save_pretrained(root / name)
    return {name: root / name for name in found}


def asked(folder: Path, compute: ComputeSettings, rank: int, wide: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Logprobs, and the gradients of a loss that weighs them."""
    policy = Policy.open(folder, compute, LoraSettings(rank=rank), seed=0)
    draw = torch.Generator().manual_seed(3)
    for parameter in policy.parameters.values():
        if rank:  # an adapter starts at zero, and half of its gradients with it
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=draw))
    if wide:
        policy.model.double()
    batch = batch_of(LENGTHS, 1024)
    pack = policy.collate([batch.weighted(row) for row in batch.rows])
    weight_N = torch.from_numpy(np.random.default_rng(2).normal(size=len(pack.targets_N))).to(policy.device)

    def slope(logprobs: Tensor, part: slice) -> Tensor:
        return weight_N[part].to(logprobs.dtype)

    logprobs_N, _ = policy.backward(pack, slope)
    gradients = {name: p.grad.double().cpu() for name, p in policy.parameters.items() if p.grad is not None}
    return logprobs_N.double().cpu(), gradients


def updated(device: str) -> Tensor:
    """Weights after some updates, one of them with corrections."""
    draw = torch.Generator().manual_seed(5)
    sizes = {"a": (300, 70), "b": (64,), "c": (128, 33), "d": (7, 5, 3)}
    weights = {name: nn.Parameter(torch.randn(size, generator=draw).to(device)) for name, size in sizes.items()}
    optimizer = Optimizer(weights, OptimizerSettings(learning_rate=1e-2, weight_decay=0.1))
    for number in range(6):
        for weight in weights.values():
            weight.grad = torch.randn(weight.shape, generator=draw).to(device)
        stashed = optimizer.stash() if number == 3 else {}
        for weight in weights.values() if stashed else ():
            weight.grad = torch.randn(weight.shape, generator=draw).to(device)
        optimizer.take(1.0)
        optimizer.apply(1.0, stashed)
    return torch.cat([weight.detach().flatten().double().cpu() for weight in weights.values()])


def error(found: Tensor, reference: Tensor) -> float:
    return float((found - reference).norm() / reference.norm())


def main() -> None:
    report: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as root:
        for kind, folder in models(Path(root)).items():
            on_cpu = ComputeSettings(device="cpu", threads=8)
            truth = {rank: asked(folder, on_cpu, rank, wide=True) for rank in (0, 8)}
            for way, given in WAYS.items():
                if kind == "window" and given.get("compile"):
                    continue  # what is compiled knows nothing of windows, and takes long
                rank = 8 if "adapters" in way else 0
                logprobs_N, gradients = asked(folder, ComputeSettings(device="cuda", **given), rank, wide=False)
                expected_N, expected = truth[rank]
                assert gradients.keys() == expected.keys(), gradients.keys() ^ expected.keys()
                whole, of = (torch.cat([one[name].flatten() for name in expected]) for one in (gradients, expected))
                report[f"{kind}, {way}"] = found = {
                    "logprobs_max": float((logprobs_N - expected_N).abs().max()),
                    "gradients": error(whole, of),
                    "worst_gradient": max(error(gradients[name], expected[name]) for name in expected),
                }
                print(kind, way, found, file=sys.stderr, flush=True)
    report["optimizer, float32"] = {"gradients": error(updated("cuda"), updated("cpu"))}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
