"""`python -m tests.learning`: measures what training promises about its steps; status 1 when a line does not hold."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import structlog
import torch
import transformers

from headrace_cli.progress import ProgressDisplay
from headrace_trainer.settings import OptimizerSettings
from tests.learning.corrections import AFTER, LAG, Case, Run, moved, rest
from tests.learning.exact import differing_bytes
from tests.learning.planted import FAULTS, caught
from tests.support import tiny_model

REST_MAX = 0.25
_SIZES = ((64, 1, 64), (64, 8, 8), (64, 64, 1), (64, 64, 64), (8, 8, 8), (1, 1, 1))
_BEFORE = (0, 20)
_SEEDS = 3
LINES = 2 * len(_SIZES) * len(_BEFORE) + 3 + 2 + len(FAULTS)
"""Of the four parts below, in their order."""


@dataclass(frozen=True)
class Line:
    """One thing that is promised: a figure and its bounds."""

    name: str
    value: float
    low: float
    high: float
    worst: float | None = None
    """Of the single values, where `value` is their mean."""

    @property
    def holds(self) -> bool:
        return self.low <= self.value <= self.high

    def report(self) -> dict[str, object]:
        return {"name": self.name, "value": self.value, "low": self.low, "high": self.high, "holds": self.holds} | (
            {} if self.worst is None else {"worst": self.worst}
        )


def corrections(base: Path) -> Iterator[Line]:
    """See `tests.learning.corrections`. A figure is the mean over experiences, each with its worst beside it."""
    for whole, first, second in _SIZES:
        for before in _BEFORE:
            found = [rest(base, Case(whole, first, second, before, seed)) for seed in range(_SEEDS)]
            name = f"left by a correction: batch of {whole}, trained in {first}, taken back in {second}, after {before}"
            for what in ("weights", "logprobs"):
                shares = [abs(getattr(one, what)) for one in found]
                yield Line(f"{name}: {what}", fmean(shares), 0.0, REST_MAX, max(shares))


def steps(base: Path) -> Iterator[Line]:
    """What else must not be a full step."""

    small = _eight_corrections(base, 0.002) / _eight_corrections(base, 1.0)
    yield Line("eight corrections of 0.002 first of all, in moves of eight of 1", small, 0, 0.01)
    run = Run(base, 64, 2)
    run.full(10)
    whole = moved(run, *run.rows(64))
    yield Line("a batch of zero advantages, in moves of the batch before", moved(run, *run.rows(64, 0.0)) / whole, 0, 0)
    steady = Run(base, 64, 3, OptimizerSettings(beta1=0.0))
    steady.full(10)
    cut = moved(steady, *steady.rows(8)) / moved(steady, *steady.rows(64))
    yield Line("a batch of 8 that time cut, in moves of 64", cut, 0, 0.6)


def _eight_corrections(base: Path, advantage: float) -> float:
    """How far they move a fresh optimizer, with the weight that tokens had in a whole batch."""
    other, run = Run(base, 64, 5), Run(base, 64, 4)
    weight = other.step(*other.rows(64))
    rows = run.rows(8, advantage=advantage)
    return moved(run, *(replace(row, correction=True, token_weight=weight) for row in rows))


def exact(folder: Path, base: Path) -> Iterator[Line]:
    replayed, corrected = asyncio.run(differing_bytes(folder, base))
    yield Line("bytes of weights in which a replay with the last word differs from never", replayed, 0, 0)
    yield Line("the same of the lineage that was corrected (the comparison can fail)", corrected, 1, 1e12)


def faults(folder: Path, base: Path) -> Iterator[Line]:
    for number, fault in enumerate(FAULTS):
        yield Line(f"caught when planted: {fault.name}", float(caught(fault, folder / str(number), base)), 1, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, default=Path("reports/test-learning.json"))
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    began, lines = time.perf_counter(), []
    with (
        ProgressDisplay("test-learning", LINES, unit="lines") as progress,
        tempfile.TemporaryDirectory(prefix="headrace-learning-") as scratch,
    ):
        base = tiny_model.build(Path(scratch) / "base", layers=1)
        for part in (corrections(base), steps(base), exact(Path(scratch), base), faults(Path(scratch), base)):
            for line in part:
                lines.append(line)
                progress.advance(doing=f"after: {line.name}")
                print(f"{'holds' if line.holds else 'FAILS'}  {line.value:10.3f}  {line.name}", flush=True)
    seconds = time.perf_counter() - began
    shares = [(line.value, line.worst) for line in lines if line.worst is not None]
    largest, worst = (max(column) for column in zip(*shares, strict=True))
    report = {
        "seconds": round(seconds, 1),
        "lag": LAG,
        "after": AFTER,
        "left_by_a_correction": {"largest_mean": largest, "worst_single": worst, "experiences": _SEEDS},
        "lines": [line.report() for line in lines],
    }
    given.report.parent.mkdir(parents=True, exist_ok=True)
    given.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    failed = [line.name for line in lines if not line.holds]
    print(f"{len(lines)} lines in {seconds:.0f} s, {len(failed)} do not hold")
    print(f"a correction leaves at most {largest:.0%}, and {worst:.0%} of a single experience")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
