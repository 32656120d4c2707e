"""Checks of the trainer's steps: corrections, partial batches, exact replays, and planted faults.

The planted faults are frequent in other implementations of reinforcement learning. They are planted one at a time: a
check that passes without the fault must fail with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, cast
from unittest import mock

import pytest
import structlog
import torch
import transformers

from headrace_trainer.algorithms import advantages, loss
from headrace_trainer.algorithms.baselines import Baselines, Decay, Mean
from headrace_trainer.algorithms.loss import token_loss
from headrace_trainer.batches.batch import Batch
from headrace_trainer.settings import OptimizerSettings, TrainerSettings
from tests.learning.corrections import AFTER, LAG, Case, CorrectionRun, differing_bytes, rest, weight_change
from tests.support import tiny_model
from tests.system.program import Line, Program, Run, between, caught
from tests.unit.trainer.test_advantages import plus_plus
from tests.unit.trainer.test_token_estimators import check_learns

Check = Callable[[Path, Path], None]
"""Function that takes an empty folder and the folder of a base model, and raises `AssertionError` if the check fails.
"""


@dataclass(frozen=True)
class Fault:
    name: str
    plant: Callable[[], contextlib.AbstractContextManager[Any]]
    check: Check


def is_caught(fault: Fault, folder: Path, base: Path) -> bool:
    """Return whether the check passes without the fault and fails with it."""
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
    """Check that a run's reward is no part of the run's own baseline, in one batch and over two batches."""
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
    sound = Batch.with_token_weight

    def faulty(self: Batch, row: Any) -> Any:
        token_weight = sound(self, row)
        return replace(token_weight, token_weight=change(self, row, token_weight)) if row.correction else token_weight

    return lambda: mock.patch.object(Batch, "with_token_weight", faulty)


@contextlib.contextmanager
def _own_run_in_batch() -> Iterator[None]:
    """Plant the fault that a run's own reward stays in its baseline within a batch."""
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


REST_MAX = 0.25
_SIZES = ((64, 1, 64), (64, 8, 8), (64, 64, 1), (64, 64, 64), (8, 8, 8), (1, 1, 1))
_BEFORE = (0, 20)
_SEEDS = 3
LINES = 2 * len(_SIZES) * len(_BEFORE) + 3 + 2 + len(FAULTS)
"""Number of result lines of the four parts below."""


def line(name: str, value: float, low: float, high: float, worst: float | None = None) -> Line:
    """Return a line that holds when `value` is between `low` and `high`. If `value` is a mean, `worst` is the extreme
    value.
    """
    bounds = between(name, value, low, high)
    return bounds if worst is None else replace(bounds, details={**bounds.details, "worst": worst})


def corrections(base: Path) -> Iterator[Line]:
    """Yield lines for the effect that remains after corrections (`Rest`): mean and maximum over experiences, by batch
    size.
    """
    for batch_size, first, second in _SIZES:
        for before in _BEFORE:
            remainders = [rest(base, Case(batch_size, first, second, before, seed)) for seed in range(_SEEDS)]
            sizes = f"batch of {batch_size}, trained in {first}, taken back in {second}"
            name = f"left by a correction: {sizes}, after {before}"
            for measure in ("weights", "logprobs"):
                shares = [abs(getattr(remainder, measure)) for remainder in remainders]
                yield line(f"{name}: {measure}", fmean(shares), 0.0, REST_MAX, max(shares))


def steps(base: Path) -> Iterator[Line]:
    """Yield lines for the other cases in which the weight change must be smaller than that of a full step."""

    small = _eight_corrections(base, 0.002) / _eight_corrections(base, 1.0)
    yield line("eight corrections of 0.002 first of all, in moves of eight of 1", small, 0, 0.01)
    run = CorrectionRun(base, 64, 2)
    run.full(10)
    full_move = weight_change(run, *run.rows(64))
    yield line(
        "a batch of zero advantages, in moves of the batch before",
        weight_change(run, *run.rows(64, 0.0)) / full_move,
        0,
        0,
    )
    steady = CorrectionRun(base, 64, 3, OptimizerSettings(beta1=0.0))
    steady.full(10)
    cut = weight_change(steady, *steady.rows(8)) / weight_change(steady, *steady.rows(64))
    yield line("a batch of 8 that time cut, in moves of 64", cut, 0, 0.6)


def _eight_corrections(base: Path, advantage: float) -> float:
    """Return the weight change of eight corrections with a fresh optimizer and the token weight of a whole batch."""
    other, run = CorrectionRun(base, 64, 5), CorrectionRun(base, 64, 4)
    weight = other.step(*other.rows(64))
    rows = run.rows(8, advantage=advantage)
    return weight_change(run, *(replace(row, correction=True, token_weight=weight) for row in rows))


def exact(folder: Path, base: Path) -> Iterator[Line]:
    replayed, corrected = asyncio.run(differing_bytes(folder, base))
    yield line("bytes of weights in which a replay with the last word differs from never", replayed, 0, 0)
    yield line("the same of the lineage that was corrected (the comparison can fail)", corrected, 1, 1e12)


def faults(folder: Path, base: Path) -> Iterator[Line]:
    for number, fault in enumerate(FAULTS):
        yield caught(fault.name, by_the_suite=is_caught(fault, folder / str(number), base))


def play(run: Run) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    base = tiny_model.build(run.folder / "base", layers=1)
    with run.progress(LINES, "lines") as progress:
        for part in (corrections(base), steps(base), exact(run.folder, base), faults(run.folder, base)):
            run.add_all(part, progress)
    remainders = [measured.details for measured in run.lines if "worst" in measured.details]
    largest = max(cast("float", details["value"]) for details in remainders)
    worst = max(cast("float", details["worst"]) for details in remainders)
    run.figures |= {
        "lag": LAG,
        "after": AFTER,
        "left_by_a_correction": {"largest_mean": largest, "worst_single": worst, "experiences": _SEEDS},
    }
    print(f"a correction leaves at most {largest:.0%}, and {worst:.0%} of a single experience")


PROGRAM = Program("Measure what training promises about its steps.", play)
