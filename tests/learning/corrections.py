"""What a correction leaves of the training that it takes back, or overdoes, with the real optimizer and its settings.

Three lineages train the same batches from the same weights:

- `never`: one experience of an early batch has no advantage: it never did anything;
- `left`: it is trained with advantage A;
- `corrected`: it is trained with A, and some batches later a correction takes it back.

When `AFTER` more batches have been trained, and momentum has paid out what it held of either, the mark that the
experience left is d = left - never, and what the correction did not undo is c = corrected - never. The *rest* is

    <c, d> / <d, d>

over all weights: 0 when nothing is left, 1 when the correction did nothing, negative when it went too far. The same is
taken of what can be seen from outside, the mean logprob of the experience's tokens. `beside` is how long the part of c
is that is orthogonal to d, in lengths of d: other weights than those that the experience had moved.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from headrace_trainer.batch import Batch, Row
from headrace_trainer.optimizer import Optimizer
from headrace_trainer.policy import Policy
from headrace_trainer.settings import ComputeSettings, LoraSettings, LossSettings, OptimizerSettings
from headrace_trainer.step import TOKEN_WEIGHT, train
from tests.unit.trainer.world import experience

AFTER = 20
"""Batches after the correction."""
LAG = 3
"""Batches from the training to the correction; `max_staleness` allows four versions."""
V = "m@000000000000"
Arm = Literal["never", "left", "corrected"]


@dataclass(frozen=True)
class Case:
    """`whole` is `batch_experiences`; `first` and `second` are the sizes of the batches in which the experience is
    trained and taken back; `before` are whole batches in front of the first: 0 is a fresh optimizer."""

    whole: int
    first: int
    second: int
    before: int
    seed: int = 0


@dataclass(frozen=True)
class Rest:
    """Shares of the mark that the experience had left."""

    weights: float
    logprobs: float
    beside: float


def rest(base: Path, case: Case, optimizer: OptimizerSettings | None = None) -> Rest:
    """What a correction leaves in this case."""
    ends = {arm: _trained(base, case, arm, optimizer or OptimizerSettings()) for arm in ("never", "left", "corrected")}
    (never, never_logprob), (left, left_logprob), (corrected, logprob) = ends.values()
    mark, remains = left - never, corrected - never
    share = float(remains @ mark / (mark @ mark))
    beside = float((remains - share * mark).norm() / mark.norm())
    return Rest(share, (logprob - never_logprob) / (left_logprob - never_logprob), beside)


def _trained(base: Path, case: Case, arm: Arm, settings: OptimizerSettings) -> tuple[Tensor, float]:
    """All weights at the end, and the mean logprob of the experience's tokens."""
    policy = Policy.open(base, ComputeSettings(), LoraSettings(), seed=0)
    optimizer = Optimizer(policy.parameters, settings, policy.hidden)
    supply = _Supply(policy, case.seed)
    mine = supply.rows(1)[0]
    advantage = np.float32(0.0 if arm == "never" else 1.0)

    def step(*rows: Row) -> float:
        batch = Batch(rows, case.whole)
        return train(policy, optimizer, batch, LossSettings(), 4096, threading.Event())[TOKEN_WEIGHT] if rows else 0.0

    for _ in range(case.before):
        step(*supply.rows(case.whole))
    weight = step(replace(mine, advantage=advantage), *supply.rows(case.first - 1))
    for _ in range(LAG - 1):
        step(*supply.rows(case.whole))
    others = supply.rows(case.second - 1)
    undoing = replace(mine, advantage=-advantage, correction=True, token_weight=weight)
    step(*(undoing,) * (arm == "corrected"), *others)
    for _ in range(AFTER):
        step(*supply.rows(case.whole))
    flat = torch.cat([tensor.double().flatten() for _, tensor in sorted(policy.tensors().items())])
    return flat, float(policy.logprobs(policy.collate([mine]))[0].double().mean())


class _Supply:
    """Experiences as the base model itself would have sampled them; the same for every arm."""

    def __init__(self, policy: Policy, seed: int) -> None:
        self._policy = Policy.__new__(Policy)
        self._policy.__dict__ |= policy.__dict__
        self._start = policy.tensors()
        self._draw = np.random.default_rng(seed)
        self._number = 1000 * seed

    def rows(self, count: int) -> Sequence[Row]:
        found = []
        for _ in range(count):
            self._number += 1
            length = int(self._draw.integers(10, 24))
            event = experience(self._number, V, length=length)
            found.append(Row.of(event, float(self._draw.normal()), None))
        return self._sampled(found)

    @torch.no_grad()
    def _sampled(self, rows: Sequence[Row]) -> Sequence[Row]:
        """With the logprobs of the base, so that importance weights are near 1."""
        return rows
