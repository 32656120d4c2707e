"""One step on a batch: forward and backward pass by pass, then one update of the weights (or several).

The loss is a sum over the batch's tokens divided by their number. Each pass adds its part of that one mean, so cutting
the batch into passes changes nothing but rounding (pitfall 10).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace_trainer.batch import Batch, pack
from headrace_trainer.forward import Pack
from headrace_trainer.loss import k3, token_loss
from headrace_trainer.measures import Measures
from headrace_trainer.optimizer import Optimizer
from headrace_trainer.policy import Policy
from headrace_trainer.settings import LossSettings


class Abandoned(Exception):
    """The step was told to stop. The process is ending; what is in memory is not to be saved."""


class NotFinite(Exception):
    """The gradient was infinite or not a number; nothing was changed."""


def train(
    policy: Policy,
    optimizer: Optimizer,
    batch: Batch,
    settings: LossSettings,
    pack_tokens: int,
    stop: threading.Event,
) -> dict[str, float]:
    """Change the weights by `batch` and return what was measured. Blocks; runs in the training thread.

    Raises `Abandoned` when `stop` is set (looked at between passes) and `NotFinite`.
    """
    began = time.perf_counter()
    indices = pack([row.length for row in batch.rows], pack_tokens)
    packs = [policy.collate([batch.rows[index] for index in rows]) for rows in indices]
    starts = _at_start(policy, packs, stop) if settings.updates_per_step > 1 else [None] * len(packs)
    bases = [policy.reference_logprobs(one) if settings.kl else None for one in packs]
    measures = Measures()
    for update in range(settings.updates_per_step):
        optimizer.zero_grad()
        for one, start_N, base_N in zip(packs, starts, bases, strict=True):
            if stop.is_set():
                raise Abandoned
            _backward(policy, one, start_N, base_N, settings, batch.loss_tokens, measures)
        learning_rate, norm = optimizer.learning_rate, optimizer.step()
        if norm is None and update == 0:
            raise NotFinite
        if norm is None:
            break  # what the updates before it did stands
    seconds = time.perf_counter() - began
    return measures.values(batch) | {
        "gradient_norm": norm or 0.0,
        "learning_rate": learning_rate,
        "step_seconds": seconds,
        "tokens_per_second": sum(row.length for row in batch.rows) / seconds,
    }


def _backward(
    policy: Policy,
    one: Pack,
    start_N: Tensor | None,
    base_N: Tensor | None,
    settings: LossSettings,
    loss_tokens: int,
    measures: Measures,
) -> None:
    """Add this pass's share of the gradient of the batch's mean loss."""
    current_N, entropy_N = policy.logprobs(one)
    start_N = current_N.detach() if start_N is None else start_N
    tokens = token_loss(current_N, start_N, one.behaviour_N, one.advantage_N, settings)
    loss_N = tokens.loss_N
    if base_N is not None:
        divergence_N = k3(current_N, base_N)
        loss_N = loss_N + settings.kl * divergence_N
        measures.base.append(divergence_N.detach().cpu())
    loss = loss_N.sum() / loss_tokens
    torch.autograd.backward(loss)
    measures.observe(one, start_N, entropy_N, tokens, float(loss.detach()))


@torch.no_grad()
def _at_start(policy: Policy, packs: Sequence[Pack], stop: threading.Event) -> list[Tensor]:
    """Logprobs of the weights before the first of several updates."""
    found = []
    for one in packs:
        if stop.is_set():
            raise Abandoned
        found.append(policy.logprobs(one)[0])
    return found
