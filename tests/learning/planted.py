"""Faults that have cost others weeks, planted one at a time: a check that holds without a fault has to fail with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from headrace_trainer.algorithms import advantages, loss
from headrace_trainer.algorithms.baselines import Baselines, Decay, Mean
from headrace_trainer.algorithms.loss import token_loss
from headrace_trainer.batches.batch import Batch
from headrace_trainer.settings import TrainerSettings
from tests.learning.corrections import Case, rest
from tests.unit.trainer.test_advantages import plus_plus
from tests.unit.trainer.test_appraisers import check_learns

Check = Callable[[Path, Path], None]
"""Takes an empty folder and a base model; raises `AssertionError`."""


@dataclass(frozen=True)
class Fault:
    name: str
    plant: Callable[[], contextlib.AbstractContextManager[Any]]
    check: Check


def caught(fault: Fault, folder: Path, base: Path) -> bool:
    """Whether the check holds without the fault and does not hold with it."""
    fault.check(folder / "sound", base)
    with fault.plant():
        try:
            fault.check(folder / "faulty", base)
        except AssertionError:
            return True
    return False


def _learns(folder: Path, base: Path) -> None:
    def make(**overrides: Any) -> TrainerSettings:
        settings = {"base": str(base), "model": "m", "batch_experiences_min": 1, "save_interval_s": 1e-9}
        settings |= {"steps_per_version": 1, "max_staleness": 4, **overrides}
        return TrainerSettings.model_validate(settings)

    with contextlib.redirect_stdout(None):
        check_learns(folder, make)


def _undoes(_folder: Path, base: Path) -> None:
    for first, second in ((8, 1), (1, 8)):
        assert rest(base, Case(8, first, second, 6, seed=7)).worst < 0.25


def _is_not_its_own_measure(_folder: Path, _base: Path) -> None:
    """A run's reward must not enter its own baseline, in one batch and over two."""
    for rewards in ([0.0, 1.0], [100.0, 1.0]):
        estimates, past = plus_plus(rewards, ["a", "a"], runs=["mine", "x"])
        assert estimates.baselines_B[0] == pytest.approx(1.0)
        late = plus_plus([rewards[0]], ["a"], past, runs=["mine"])[0]
        assert late.baselines_B[0] == pytest.approx(1.0)


def _flipped_loss() -> contextlib.AbstractContextManager[Any]:
    def flipped(*arguments: Any) -> Any:
        slopes = token_loss(*arguments)
        return replace(slopes, loss_N=-slopes.loss_N)

    return mock.patch.object(loss, "token_loss", flipped)


def _flipped_advantage() -> contextlib.AbstractContextManager[Any]:
    of = advantages.Advantages.of

    def flipped(rewards_B: Any, baselines_B: Any, scales_B: Any) -> Any:
        return of(rewards_B, baselines_B, [-scale for scale in scales_B])

    return mock.patch.object(advantages.Advantages, "of", flipped)


def _weighted(change: Callable[[Batch, Any, Any], float]) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    sound = Batch.weighted

    def faulty(self: Batch, row: Any) -> Any:
        token_weight = sound(self, row)
        return replace(token_weight, token_weight=change(self, row, token_weight)) if row.correction else token_weight

    return lambda: mock.patch.object(Batch, "weighted", faulty)


@contextlib.contextmanager
def _own_run_in_batch() -> Iterator[None]:
    """Leave no token out of the rows that should be masked."""
    with mock.patch.object(Mean, "minus", lambda self, _other: self):
        yield


@contextlib.contextmanager
def _own_run_in_history() -> Iterator[None]:
    def forgotten(_self: Decay, _past: Baselines, _run: str) -> tuple[Mean, Mean]:
        return Mean(), Mean()

    with mock.patch.object(Decay, "remaining_contribution", forgotten):
        yield


FAULTS = (
    Fault("sign of the loss", _flipped_loss, _learns),
    Fault("sign of the advantages", _flipped_advantage, _learns),
    Fault("sign of corrections", _weighted(lambda _b, _r, result: -result.token_weight), _undoes),
    Fault("N of the batch that a correction stands in", _weighted(lambda batch, _r, _f: batch.token_weight), _undoes),
    Fault("N of rows instead of tokens", _weighted(lambda _b, row, f: f.token_weight * row.loss_mask_T.sum()), _undoes),
    Fault("own run in its baseline, one batch", _own_run_in_batch, _is_not_its_own_measure),
    Fault("own run in its baseline, an earlier batch", _own_run_in_history, _is_not_its_own_measure),
)
