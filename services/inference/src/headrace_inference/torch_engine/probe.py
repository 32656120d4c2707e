"""Comparison of the engine's logprobs with the trainer's fingerprint."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace_inference.torch_engine.kv import LENGTH_STEP
from headrace_inference.torch_engine.loader import Model
from headrace_inference.torch_engine.program import as_number, run
from headrace_schemas import Probe

_FLOAT32_TOLERANCE = 1e-3
_COARSE_TOLERANCE = 0.02
"""Mean difference in a type of 16 bits for one layer. Rounding errors of layers add up like a random walk, so that it
grows with the square root of their number. Measured in bfloat16 on a model of 30 layers: at most 0.066 with the right
adapters, at least 0.145 with wrong ones whose effect is more than rounding."""
_DECODED_MAX = 32
"""Tokens of the fingerprint that are decoded one by one. The others are computed in one forward pass."""


@torch.inference_mode()
def probe(model: Model, parent: Model | None, tolerance: float | None = None) -> Probe:
    """Compare the logprobs of the loaded weights with the manifest's fingerprint, and with the parent. Blocks.

    The logprobs are computed by prefill and by decode steps, as for requests.

    Args:
        model: the loaded version.
        parent: its parent; None if that is not loaded.
        tolerance: largest difference that passes, in nats; None: `tolerance_of` computes it.
    """
    fingerprint = model.manifest.fingerprint
    tokens = list(fingerprint.token_ids)
    stored = torch.tensor(fingerprint.logprobs, dtype=torch.float32)
    direct = direct_logprobs(model, tokens)
    served = served_logprobs(model, tokens)
    differences = (direct - stored).abs(), (served - stored[-len(served) :]).abs()
    delta = max(as_number(difference.max()) for difference in differences)
    parent_delta = None
    if parent is not None and parent.vocabulary == model.vocabulary:
        parent_delta = _difference(direct, direct_logprobs(parent, tokens))
    compared = delta
    if tolerance is None and _is_coarse(model):
        compared = max(as_number(difference.mean()) for difference in differences)
    passed = compared <= tolerance_of(model, tolerance) and (parent_delta is None or parent_delta > 0)
    return Probe(max_abs_delta=delta, parent_max_abs_delta=parent_delta, passed=passed)


def tolerance_of(model: Model, tolerance: float | None = None) -> float:
    """Return the largest difference in nats that passes the probe: `tolerance`, or if None, a bound on rounding errors.

    The bound depends on the type and the depth of the model. In float32 it applies to the largest difference, in types
    of 16 bits to the mean difference.
    """
    if tolerance is not None:
        return tolerance
    return _COARSE_TOLERANCE * math.sqrt(model.kv_shape.layers) if _is_coarse(model) else _FLOAT32_TOLERANCE


def _is_coarse(model: Model) -> bool:
    return model.kv_shape.dtype is not torch.float32


def direct_logprobs(model: Model, tokens: list[int]) -> Tensor:
    """Return the logprobs at temperature 1 of each of `tokens[1:]`, computed in one forward pass."""
    device = model.kv_shape.device
    ids = torch.tensor([tokens], device=device)
    positions = torch.arange(len(tokens), device=device)
    kv = model.kv_shape.zeros(1, len(tokens))
    logits = run(model.module, ids, positions[None], positions, kv, keep=0)[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].cpu()


def served_logprobs(model: Model, tokens: list[int]) -> Tensor:
    """Return the logprobs of the last tokens as a request would get them: prefill first, then token by token."""
    device = model.kv_shape.device
    count = min(_DECODED_MAX, len(tokens) - 1)
    begin = len(tokens) - 1 - count
    ids = torch.tensor([tokens], device=device)
    positions = torch.arange(len(tokens), device=device)
    kv = model.kv_shape.zeros(1, len(tokens))
    if begin:
        model.program.prefill(model.weights, ids[:, :begin], positions[None, :begin], positions[:begin], kv)
    sampling = torch.ones(1, device=device), torch.zeros(1, dtype=torch.float64, device=device)
    logprobs = []
    for at in range(begin, len(tokens) - 1):
        step = slice(at, at + 1)
        decoded = model.program.decode(
            model.weights, ids[:, step], positions[None, step], positions[: at + 1], kv, *sampling
        )
        logprobs.append(decoded[2][0, tokens[at + 1]])
    return torch.stack(logprobs).cpu()


@torch.inference_mode()
def compute_control(model: Model) -> None:
    """Compute one step on a fixed token, to check that model and device work. Raises an error if they do not."""
    device = model.kv_shape.device
    kv = model.kv_shape.zeros(1, LENGTH_STEP)
    ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
    window = torch.arange(LENGTH_STEP, device=device)
    sampling = torch.ones(1, device=device), torch.zeros(1, dtype=torch.float64, device=device)
    model.program.prefill(model.weights, ids, ids, window, kv)
    model.program.decode(model.weights, ids, ids + 1, window, kv, *sampling)[0].cpu()


def _difference(logprobs: Tensor, reference: Tensor) -> float:
    """Return the largest absolute difference; infinity if a value is NaN."""
    return as_number((logprobs - reference).abs().max())
