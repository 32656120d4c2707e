"""Steps on a tiny model: preferred answers become likelier, and withdrawn ones are taken back."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace_trainer.batches.batch import Batch, Row
from headrace_trainer.batches.prepare import PreparedBatch
from headrace_trainer.learner import GRADIENT_FACTOR
from headrace_trainer.lineage.culprits import apply_result
from headrace_trainer.settings import ComputeSettings, LoraSettings, OptimizerSettings, TrainerSettings
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.optimizer import Optimizer
from headrace_trainer.torch_learner.step import train
from tests.algorithms.stream import DPO, KTO, SFT, Stream
from tests.unit.trainer.test_history import name
from tests.unit.trainer.world import edit, side, turn, with_signals

GOING_ON = threading.Event()
KINDS = {"sft": (SFT, "demonstrations"), "dpo": (DPO, "preferences"), "kto": (KTO, "labels")}


def settings_of(base: Path, algorithm: str, **more: Any) -> TrainerSettings:
    """Return the trainer's settings, completed as at the start of a trainer."""
    from headrace_runtime.settings.sections import complete

    table = {"base": str(base), "algorithm": algorithm, "native": {"tokens": 0}, **more}
    trainer_settings: TrainerSettings = complete(TrainerSettings).model_validate(table)
    return trainer_settings


def open_policy(base: Path) -> Policy:
    policy = Policy.open(base, ComputeSettings(device="cpu"), LoraSettings(), 0)
    policy.keep_reference(base)
    return policy


def prepared_for(base: Path, algorithm: str) -> PreparedBatch:
    """Two answers that were compared, and an edit."""
    signals, kind = KINDS[algorithm]
    stream = Stream(base, signals, kind)
    stream.send(
        with_signals(1, name(0), preferences=(side("p", "chosen", turn(1)),)),
        with_signals(2, name(0), preferences=(side("p", "rejected", turn(2)),), length=11),
        with_signals(3, name(0), edits=(edit("nobody", turn(3)),)),
    )
    prepared = stream.train()
    assert prepared is not None
    return prepared


def gradients(policy: Policy, batch: Batch, settings: TrainerSettings) -> tuple[dict[str, Tensor], Any]:
    """Return the optimizer's input for new rows, without momentum, clipping and warm-up."""
    chosen = OptimizerSettings(learning_rate=1e-12, gradient_norm_max=1e9, beta1=0.0)
    optimizer = Optimizer(policy.parameters, chosen)
    result = train(policy, optimizer, batch, settings.loss, 4096, GOING_ON)
    return {
        key: parameter.grad.clone() for key, parameter in policy.parameters.items() if parameter.grad is not None
    }, result


def left_by_a_withdrawal(base: Path, algorithm: str) -> float:
    """Return the sum of the gradients of training and withdrawal as a share of the former: 0 for a complete withdrawal.
    The weights have not moved, so the sum has no other part.
    """
    settings, policy = settings_of(base, algorithm), open_policy(base)
    prepared = prepared_for(base, algorithm)
    batch = replace(prepared.batch, agg_mode=settings.loss.agg_mode)
    first, result = gradients(policy, batch, settings)
    trained = apply_result(replace(prepared, batch=batch), result)
    weight = batch.token_weight
    back = [
        replace(row, advantage=-row.advantage, correction=True, token_weight=weight * trained_row.factor, together="")
        for row, trained_row in zip(batch.rows, trained, strict=True)
    ]
    second = _of_corrections(policy, Batch(tuple(back)), settings)
    return _norm({key: first[key] + second[key] for key in first}) / _norm(first)


def gain_of_training(base: Path, algorithm: str, steps: int = 6) -> float:
    """Return the gain in nats of preferred answers compared with rejected ones; the smallest of all rows."""
    settings, policy = settings_of(base, algorithm), open_policy(base)
    optimizer = Optimizer(policy.parameters, OptimizerSettings(learning_rate=3e-3))
    batch = replace(prepared_for(base, algorithm).batch, agg_mode=settings.loss.agg_mode)
    before = _logprobs(policy, batch.rows)
    for _ in range(steps):
        train(policy, optimizer, batch, settings.loss, 4096, GOING_ON)
    after = _logprobs(policy, batch.rows)
    return min(float(row.advantage) * (after[row.name] - before[row.name]) for row in batch.rows)


def left_by_passes(base: Path, algorithm: str) -> float:
    """The largest difference in gradients between one forward pass for all rows and one for each that may be alone."""
    settings = settings_of(base, algorithm)
    batch = replace(prepared_for(base, algorithm).batch, agg_mode=settings.loss.agg_mode)
    gradients_of = []
    for tokens in (4096, 1):
        policy = open_policy(base)
        optimizer = Optimizer(
            policy.parameters, OptimizerSettings(learning_rate=1e-12, gradient_norm_max=1e9, beta1=0.0)
        )
        train(policy, optimizer, batch, settings.loss, tokens, GOING_ON)
        gradients_of.append(
            {key: parameter.grad for key, parameter in policy.parameters.items() if parameter.grad is not None}
        )
    return max(float((gradients_of[0][key] - gradients_of[1][key]).abs().max()) for key in gradients_of[0])


def slope_beside_the_gradient(base: Path) -> float:
    """A correction of DPO comes with the token weight that its first training had; its gradient is that of the plain
    policy gradient. The measured factor has to be that of a token of the batch."""
    settings, policy = settings_of(base, "dpo"), open_policy(base)
    batch = replace(prepared_for(base, "dpo").batch, agg_mode=settings.loss.agg_mode)
    _, result = gradients(policy, batch, settings)
    beta = 0.1  # at the base itself the margin is 0, so that a pair's slope is 2 beta sigmoid(0)
    off = max(abs(value - beta) for value in result.slopes.values()) + abs(len(result.slopes) - 4)
    return float(off + (result.measured[GRADIENT_FACTOR] <= 0))


def _of_corrections(policy: Policy, batch: Batch, settings: TrainerSettings) -> dict[str, Tensor]:
    """Their gradients as they are stashed, before anything is done with them."""
    stashed_gradients: dict[str, Tensor] = {}
    optimizer = Optimizer(policy.parameters, OptimizerSettings(learning_rate=1e-12, beta1=0.0))
    sound = optimizer.pop_gradients

    def pop_gradients() -> dict[str, Tensor]:
        stashed = sound()
        stashed_gradients.update({key: tensor.clone() for key, tensor in stashed.items()})
        return stashed

    optimizer.pop_gradients = pop_gradients  # type: ignore[method-assign]
    train(policy, optimizer, batch, settings.loss, 4096, GOING_ON)
    return stashed_gradients


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return float(torch.stack([tensor.double().norm() for tensor in tensors.values()]).norm())


@torch.no_grad()
def _logprobs(policy: Policy, rows: Sequence[Row]) -> dict[str, float]:
    return {row.name: float(policy.logprobs(policy.collate([row]))[0].sum()) for row in rows}
