"""The remainder of a correction: how much of a contribution it leaves, or overdoes, with the real optimizer.

Three lineages train the same batches from the same weights:

- `never`: one experience of a batch has no advantage, so it never had an effect;
- `left`: it is trained with an advantage of 1;
- `corrected`: it is trained like that, and `LAG` batches later a correction takes it back.

After `AFTER` more batches, when momentum has paid both out, the mark of the experience is d = left - never, and the
part
that the correction did not undo is c = corrected - never. The *rest* is

<c, d> / <d, d>

over all weights: 0 for a complete correction, 1 for one without effect, negative for one that went too far. `logprobs`
is the same for the mean logprob of the experience's own tokens. `beside` is the length of the part of c that is
orthogonal to d, in lengths of d: weights that the experience had not moved.

The exact way to withdraw a reward: a replay that knows the withdrawal from the start equals a stream without it.
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
"""Batches after the correction."""
LAG = 3
"""Batches from the training to its correction; `max_staleness` allows for four versions."""
_V = "m@000000000000"
_ARMS = ("never", "left", "corrected")


@dataclass(frozen=True)
class Case:
    """`whole` is `batch_experiences`; `first` and `second` are the sizes of the batches in which the experience is
    trained and taken back; `before` counts the whole batches in front: with 0 the optimizer is fresh."""

    batch_size: int
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

    @property
    def worst(self) -> float:
        return max(abs(self.weights), abs(self.logprobs))


class CorrectionRun:
    """A policy, its optimizer, and experiences in a fixed order."""

    def __init__(self, base: Path, batch_size: int, seed: int, settings: OptimizerSettings | None = None) -> None:
        compute = ComputeSettings(device="cpu", packing="padded")  # one pass, and few of the blocks' many small ones
        self.policy = Policy.open(base, compute, LoraSettings(), seed=0)
        chosen = (settings or OptimizerSettings()).of_size(self.policy.size, adapters=False)
        self.optimizer = Optimizer(self.policy.parameters, chosen, self.policy.hidden)
        self._batch_size = batch_size
        self._draw = np.random.default_rng(seed)
        self._number = 1000 * seed

    def rows(self, count: int, advantage: float | None = None) -> Sequence[Row]:
        """New ones; their advantages are drawn unless one is given."""
        rows = []
        for _ in range(count):
            self._number += 1
            length, drawn = int(self._draw.integers(8, 13)), float(self._draw.normal())
            event = experience(self._number, _V, length=length)
            rows.append(Row.of(event, drawn if advantage is None else advantage, None))
        return rows

    def step(self, *rows: Row) -> float:
        """The weight of each token in it."""
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
    """All weights at the end, and the mean logprob of the experience's tokens."""
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
    """Return the length of the weight change in one step on `rows`."""
    before = run.weights()
    run.step(*rows)
    return float((run.weights() - before).norm())


_TAKEN_BACK = 5


async def differing_bytes(folder: Path, base: Path) -> tuple[int, int]:
    """Count the bytes of the weights that differ between a lineage without an experience and (a) a replay of the stream
    with
    its withdrawal, (b) the lineage that trained it and was corrected, for comparison.
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
