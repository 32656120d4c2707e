"""Logprobs of a given answer under a version, computed in one forward pass over prompt and answer."""

from __future__ import annotations

import torch

from headrace_inference.torch_engine.forward import run
from headrace_inference.torch_engine.model import Model
from headrace_schemas.http.replica_api import TokensToScore


@torch.inference_mode()
def score(model: Model, answer: TokensToScore) -> list[float]:
    """Return the logprobs of the answer's tokens at its temperature, as sampling would report them. Blocks."""
    prompt, sampled = list(answer.prompt_token_ids), list(answer.token_ids)
    if not sampled or not prompt:
        return []
    device = model.kv_shape.device
    ids = torch.tensor([[*prompt, *sampled]], device=device)
    positions = torch.arange(ids.shape[1], device=device)
    kv = model.kv_shape.zeros(1, ids.shape[1])
    logits = run(model.module, ids, positions[None], positions, kv, keep=len(sampled) + 1)[0, :-1]
    logprobs = (logits / answer.temperature).log_softmax(-1).gather(1, ids[0, -len(sampled) :, None])[:, 0]
    return [float(logprob) for logprob in logprobs.cpu()]
