"""Measurement of corrections: how much of a contribution remains after its correction, with the real optimizer.

Three arms train the same batches from the same weights:

- `never`: one experience of a batch has advantage 0, so it never had an effect;
- `left`: the experience is trained with an advantage of 1 and never corrected;
- `corrected`: as `left`, and `LAG` batches later a correction withdraws the advantage.

All arms train `AFTER` more batches, so that momentum no longer matters. Then d = left - never is the effect of the
experience on the weights, and c = corrected - never is the part that the correction did not undo. The *remainder* is

<c, d> / <d, d>

over all weights: 0 for a complete correction, 1 for one without effect, negative for one that went too far. `logprobs`
is the same ratio for the mean logprob of the experience's own tokens. `beside` is the norm of the part of c that is
orthogonal to d, relative to the norm of d: changes of weights that the experience had not moved.

`differing_bytes` measures the exact way to withdraw a reward: a replay of the stream with the withdrawal.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace_schemas import Event, Experience
from headrace_schemas.events.envelope import Envelope
from headrace_trainer.algorithms.settings import LossSettings
from headrace_trainer.batches.batch import Batch, Row
from headrace_trainer.learner import GRADIENT_FACTOR
from headrace_trainer.settings import ComputeSettings, LoraSettings, OptimizerSettings, TrainerSettings
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.optimizer import Optimizer
from headrace_trainer.torch_learner.step import train
from headrace_trainer.trainer import Trainer
from tests.unit.trainer.world import Bus, World, experience, policy_of

AFTER = 20
"""Number of batches after the correction."""
LAG = 3
"""Number of batches between the training and its correction. `max_staleness` is 4 versions, so this is allowed."""
_V = "m@000000000000"
_ARMS = ("never", "left", "corrected")


@dataclass(frozen=True)
class Case:
    """Sizes of the batches of one measurement.

    Attributes:
        batch_size: `batch_experiences`, the size of a whole batch.
        first: size of the batch in which the experience is trained.
        second: size of the batch in which it is corrected.
        before: number of whole batches before the first one; with 0 the optimizer is fresh.
        seed: seed of the experiences.
    """

    batch_size: int
    first: int
    second: int
    before: int
    seed: int = 0


@dataclass(frozen=True)
class Rest:
    """Remainder of a correction as a share of the effect: see the module's description."""

    weights: float
    logprobs: float
    beside: float

    @property
    def worst(self) -> float:
        return max(abs(self.weights), abs(self.logprobs))


class CorrectionRun:
    """A policy, its optimizer, and experiences in a fixed order."""

    def __init__(self, base: Path, batch_size: int, seed: int, settings: OptimizerSettings | None = None) -> None:
        compute = ComputeSettings(device="cpu", packing="padded")  # one pass, and few of the blocks' many small ones
        self.policy = Policy.open(base, compute, LoraSettings(), seed=0)
        chosen = (settings or OptimizerSettings()).with_rate_for_size(self.policy.size, adapters=False)
        self.optimizer = Optimizer(self.policy.parameters, chosen, self.policy.hidden)
        self._batch_size = batch_size
        self._draw = np.random.default_rng(seed)
        self._number = 1000 * seed

    def rows(self, count: int, advantage: float | None = None) -> Sequence[Row]:
        """Return `count` new rows with the given advantage, by default with random advantages."""
        rows = []
        for _ in range(count):
            self._number += 1
            length, drawn = int(self._draw.integers(8, 13)), float(self._draw.normal())
            event = experience(self._number, _V, length=length)
            rows.append(Row.of(event, drawn if advantage is None else advantage, None))
        return rows

    def step(self, *rows: Row) -> float:
        """Train one step on `rows`, if there are any. Return the factor of the gradient of each token."""
        batch, stop = Batch(rows, self._batch_size), threading.Event()
        return (
            train(self.policy, self.optimizer, batch, LossSettings(), 1 << 20, stop).measured[GRADIENT_FACTOR]
            if rows
            else 0.0
        )

    def full(self, batches: int) -> None:
        for _ in range(batches):
            self.step(*self.rows(self._batch_size))

    def weights(self) -> Tensor:
        return torch.cat([tensor.double().flatten() for _, tensor in sorted(self.policy.tensors().items())])

    @torch.no_grad()
    def logprob(self, row: Row) -> float:
        return float(self.policy.logprobs(self.policy.collate([row]))[0].double().mean())


def rest(base: Path, case: Case, settings: OptimizerSettings | None = None) -> Rest:
    """Return the remainder of a correction in this case."""
    ends = [_trained(base, case, arm, settings) for arm in _ARMS]
    (never, never_logprob), (left, left_logprob), (corrected, logprob) = ends
    mark, remains = left - never, corrected - never
    share = float(remains @ mark / (mark @ mark))
    beside = float((remains - share * mark).norm() / mark.norm())
    return Rest(share, (logprob - never_logprob) / (left_logprob - never_logprob), beside)


def _trained(base: Path, case: Case, arm: str, settings: OptimizerSettings | None) -> tuple[Tensor, float]:
    """Train one arm. Return all weights at the end, and the mean logprob of the experience's tokens."""
    run = CorrectionRun(base, case.batch_size, case.seed, settings)
    (mine,) = run.rows(1, advantage=0.0 if arm == "never" else 1.0)
    run.full(case.before)
    weight = run.step(mine, *run.rows(case.first - 1))
    run.full(LAG - 1)
    other_rows = run.rows(case.second - 1)
    undoing = replace(mine, advantage=-mine.advantage, correction=True, token_weight=weight)
    run.step(*([undoing] if arm == "corrected" else []), *other_rows)
    run.full(AFTER)
    return run.weights(), run.logprob(mine)


def weight_change(run: CorrectionRun, *rows: Row) -> float:
    """Return the Euclidean norm of the weight change in one step on `rows`."""
    before = run.weights()
    run.step(*rows)
    return float((run.weights() - before).norm())


_TAKEN_BACK = 5


async def differing_bytes(folder: Path, base: Path) -> tuple[int, int]:
    """Compare the weights with those of a lineage that never had the experience.

    Returns:
        The number of bytes that differ in (a) a replay of the stream with the experience's withdrawal, and in (b) the
        lineage that trained the experience and corrected it.
    """
    world = World(folder)
    live = await world.run(_settings(base))
    version = world.bus.checkpoints[0].version
    stream = [experience(n, version, reward=n % 3, task=f"t{n % 2}", run=str(n)) for n in range(16)]
    last_word = experience(_TAKEN_BACK, version, None, revision=1, task="t1", branch=False)
    world.bus.produce(*stream, last_word)
    live = await world.run(_settings(base), wait_s=31)
    assert world.bus.fates[f"e{_TAKEN_BACK}", 1] == "trained", "it was corrected"

    corrected_stream = [last_word if n == _TAKEN_BACK else event for n, event in enumerate(stream)]
    without = [event for n, event in enumerate(stream) if n != _TAKEN_BACK]
    replayed = await _again(world, base, "replayed", corrected_stream)
    never = await _again(world, base, "never", without)
    return _difference(replayed, never), _difference(live, never)


async def _again(world: World, base: Path, lineage: str, stream: list[Experience]) -> Trainer:
    world.bus = Bus(partitions=1)
    for event in stream:
        world.bus.add(lineage, event.to_json(), 0, _headers(event))
    return await world.run(_settings(base, lineage=lineage, replays="main", topic=lineage, until_end=True))


def _headers(event: Event) -> list[tuple[str, bytes | None]]:
    return [*Envelope.of(event, "test").headers()]


def _settings(base: Path, **overrides: object) -> TrainerSettings:
    return TrainerSettings.model_validate(
        {
            "base": str(base),
            "model": "m",
            "batch_experiences": 4,
            "batch_experiences_min": 1,
            "save_interval_s": 1e-9,
            "steps_per_version": 1,
            "max_staleness": 50,
            **overrides,
        }
    )


def _difference(left: Trainer, right: Trainer) -> int:
    left_bytes, right_bytes = (b"".join(_bytes(files)) for files in (left, right))
    return sum(a != b for a, b in zip(left_bytes, right_bytes, strict=True))


def _bytes(trainer: Trainer) -> Iterator[bytes]:
    assert trainer.lineage is not None
    return (tensor.numpy().tobytes() for _, tensor in sorted(policy_of(trainer.lineage).tensors().items()))
