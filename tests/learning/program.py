"""Promises of training about its steps: corrections, partial batches, exact replays, planted faults."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import cast

import structlog
import torch
import transformers

from headrace_trainer.settings import OptimizerSettings
from tests.learning.corrections import AFTER, LAG, Case, CorrectionRun, moved, rest
from tests.learning.exact import differing_bytes
from tests.learning.planted import FAULTS
from tests.learning.planted import caught as is_caught
from tests.support import tiny_model
from tests.system.line import Line, between, caught
from tests.system.program import Program, Run

REST_MAX = 0.25
_SIZES = ((64, 1, 64), (64, 8, 8), (64, 64, 1), (64, 64, 64), (8, 8, 8), (1, 1, 1))
_BEFORE = (0, 20)
_SEEDS = 3
LINES = 2 * len(_SIZES) * len(_BEFORE) + 3 + 2 + len(FAULTS)
"""Number of lines of the four parts below."""


def line(name: str, value: float, low: float, high: float, worst: float | None = None) -> Line:
    """Return a line for a figure between `low` and `high`. `worst` is the worst single value where it is a mean."""
    bounds = between(name, value, low, high)
    return bounds if worst is None else replace(bounds, details={**bounds.details, "worst": worst})


def corrections(base: Path) -> Iterator[Line]:
    """Yield the remainders of corrections (`tests.learning.corrections`): means over experiences, with the worst of
    each."""
    for batch_size, first, second in _SIZES:
        for before in _BEFORE:
            remainders = [rest(base, Case(batch_size, first, second, before, seed)) for seed in range(_SEEDS)]
            sizes = f"batch of {batch_size}, trained in {first}, taken back in {second}"
            name = f"left by a correction: {sizes}, after {before}"
            for measure in ("weights", "logprobs"):
                shares = [abs(getattr(remainder, measure)) for remainder in remainders]
                yield line(f"{name}: {measure}", fmean(shares), 0.0, REST_MAX, max(shares))


def steps(base: Path) -> Iterator[Line]:
    """Yield the other cases that must not be a full step."""

    small = _eight_corrections(base, 0.002) / _eight_corrections(base, 1.0)
    yield line("eight corrections of 0.002 first of all, in moves of eight of 1", small, 0, 0.01)
    run = CorrectionRun(base, 64, 2)
    run.full(10)
    full_move = moved(run, *run.rows(64))
    yield line(
        "a batch of zero advantages, in moves of the batch before", moved(run, *run.rows(64, 0.0)) / full_move, 0, 0
    )
    steady = CorrectionRun(base, 64, 3, OptimizerSettings(beta1=0.0))
    steady.full(10)
    cut = moved(steady, *steady.rows(8)) / moved(steady, *steady.rows(64))
    yield line("a batch of 8 that time cut, in moves of 64", cut, 0, 0.6)


def _eight_corrections(base: Path, advantage: float) -> float:
    """How far they move a fresh optimizer, with the weight that tokens had in a whole batch."""
    other, run = CorrectionRun(base, 64, 5), CorrectionRun(base, 64, 4)
    weight = other.step(*other.rows(64))
    rows = run.rows(8, advantage=advantage)
    return moved(run, *(replace(row, correction=True, token_weight=weight) for row in rows))


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
