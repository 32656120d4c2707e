"""Measure gains by signal, the reward model of thumbs, and the drift alarm: `python -m benchmarks.signals`.

The program writes `reports/bench-signals.json`, with exit status 1 if a line does not hold.

`--only thumbs drift` takes a minute of one core and trains no model. The lines about the reward model `thumbs`, on
4,000 runs with known quality, of which 3 % have a thumb and a fifth of the thumbs are wrong: on new runs its AUROC is
at least 0.8 for each of five seeds, for its estimates and for its rewards. Poisoners with 2 % of the thumbs reduce it
by at most two points, and a single one with a tenth by at most five, where the model does not abstain. Its values have
an error of at most 0.1, and 85 % of its 90 % intervals contain the truth. The lines about the drift alarm: it is raised
for at most 5 % of stable judges, and within 500 runs for 90 % of judges whose error rate rises from one in ten to eight
in ten. Each line has a planted fault that breaks it.

`--only gains` trains the demo's agent from one signal at a time, with five seeds, each run in a process without
services. Gains are measured on audit tasks, over the base of the seed. Edits alone gain 15 points with `sft` and with
`dpo`, with at most 200 edits. Natural signals alone gain half as much as explicit feedback, in a third of its runs.
Thumbs on 3 % of the runs, a fifth of them wrong, gain 70 % of the gain of full labels after 60 rounds each, where full
labels hardly gain more, and 2 % poisoners cost at most five points. Gains after 20 and 40 rounds are reported as well.
Typed corrections alone gain 15 points in 500 sessions and in half of those that binary rewards need, with batches of 8,
16 or 32, whichever is sooner, over ten further seeds. Kinds of tasks outside of the traffic lose at most a point. The
gap between teacher and student has the right sign in nine of ten settings. Results are stored under `--parts` and not
computed again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np

from benchmarks import _thumbs_world
from benchmarks._gains_lines import ARMS, Arm, Gain, Gains, lines, misled, rows
from benchmarks._learning_lines import Line
from benchmarks._run_processes import auroc, quietly
from benchmarks._run_processes import play as play_apart
from benchmarks._thumbs_world import KnownRun, People, runs, thumbed, without_width_limit
from headrace_cli.terminal import ProgressDisplay
from headrace_scorer import judge_monitor
from headrace_scorer.learned import columns, crowd
from headrace_scorer.learned.models import FitRequirements, Thumb, ThumbedRun
from headrace_scorer.learned.thumbs import FittedThumbs, fit

SECTIONS = ("gains", "thumbs", "drift")
AUROC_MIN, POISON_COST_MAX, ONE_POISONER_COST_MAX = 0.8, 0.02, 0.05
CALIBRATION_ERROR_MAX, COVERED_MIN, FOUND_MIN, FOUND_WITHIN = 0.1, 0.85, 0.9, 500
_OTHERS, _FRESH, _BINS = 1000, 2000, 10
_LEAK = "function:leak"
ORDERINGS = ("auroc", "auroc_paid")
"""Rankings of a reward model: by its estimates, and by its rewards."""
Numbers = dict[str, float]
Spoil = Callable[[list[ThumbedRun]], list[ThumbedRun]]
CASES = {
    "few": People(),
    "nameless": People(named=False),
    "poisoned": People(poisoners=0.02),
    "one poisoner": People(poisoners=0.1, poisoner_names=1),
    "all": People(share=1.0, flipped=0.0),
}


sys.path.insert(0, "examples")  # examples are not installed


@dataclass(frozen=True)
class Job:
    """Description of a run, as it is sent to its process."""

    arm: str
    seed: int
    plays: int
    cache: Path

    def result_file(self, parts: Path) -> Path:
        name = self.arm.replace(", ", "-").replace(" ", "_")
        return parts / f"{name}-{self.seed}-{self.plays}.json"


def work(job: Job) -> Gain:
    """Run one job in the worker process."""
    from benchmarks._gains_run import LESSONS, run

    quietly()
    arm = ARMS[job.arm]
    lesson = LESSONS[arm.lesson]
    return run(arm, job.seed, lesson.build(job.cache, lesson.recipe(job.seed)).absolute(), job.plays)


def seeds_of(arm: Arm, seeds: range) -> list[int]:
    """Return the seeds of an arm.

    The luck of five seeds can amount to a whole round. Arms for which rounds are counted therefore get twice as many
    further seeds. The seeds between, 5 to 14, were used to tune `hindsight`.
    """
    further = range(seeds.stop + 10, seeds.stop + 10 + 2 * len(seeds))
    return [*seeds, *further] if arm.more_seeds else [*seeds]


def play(
    names: Sequence[str], seeds: range, plays: int, cache: Path, parts: Path, workers: int
) -> tuple[dict[str, object], list[Line]]:
    """Run the named arms. Return their section of the report, and the lines that must hold."""
    jobs = [Job(name, seed, plays, cache) for name in names for seed in seeds_of(ARMS[name], seeds)]
    gains = Gains(play_apart("bench-signals gains", jobs, parts, workers, work, Gain))
    acceptance_lines = lines(gains)
    seconds = {arm: [round(run.seconds) for run in runs] for arm, runs in gains.arms.items()}
    report: dict[str, object] = {"plays": plays, "runs": rows(gains), "run_seconds": seconds}
    if (misled_share := misled(gains)) is not None:
        report["trained although users misled"] = misled_share.mean
    return report | {"lines": [line.report() for line in acceptance_lines]}, acceptance_lines


def fit_model(seed: int, count: int, people: People, spoil: Spoil = list) -> FittedThumbs:
    rated, silent = thumbed(seed, runs(seed, count), people)
    unrated = silent or runs(seed + 500, _OTHERS)
    return fit(spoil(rated), [run.features for run in unrated[:_OTHERS]], FitRequirements())


def evaluate_model(model: FittedThumbs, fresh: Sequence[KnownRun]) -> Numbers:
    """Return the ranking of all new runs by a model, and its calibration on the runs that it does not abstain from."""
    good = np.array([run.good for run in fresh])
    if model.fit_facts.silent is not None:
        return {"silent": 1.0, "speaks": 0.0}
    unsure = without_width_limit(model)
    all_estimates = [unsure.judge(run.features) for run in fresh]
    values = np.array([estimate.value for estimate in all_estimates if estimate is not None])
    paid = np.array([estimate.paid for estimate in all_estimates if estimate is not None])
    confident = [(estimate, run) for run in fresh if (estimate := model.judge(run.features)) is not None]
    return {
        "silent": 0.0,
        "auroc": auroc(values, good),
        "auroc_paid": auroc(paid, good),
        "ideal_auroc": auroc(np.array([run.chance for run in fresh]), good),
        "speaks": len(confident) / len(fresh),
        "calibration_error": calibration_error([(estimate.value, run.good) for estimate, run in confident]),
        "covered": _share([estimate.low <= run.chance <= estimate.high for estimate, run in confident]),
        "width": float(np.mean([estimate.high - estimate.low for estimate, _ in confident] or [0.0])),
    }


def _share(flags: Sequence[bool]) -> float:
    """Return the share of true flags, 1 if there are none."""
    return sum(flags) / len(flags) if flags else 1.0


def calibration_error(pairs: Sequence[tuple[float, bool]]) -> float:
    """Return the difference between mean value and share of good runs, averaged over ten bins weighted by size."""
    if not pairs:
        return 0.0
    value, good = (np.array(column, dtype=np.float64) for column in zip(*pairs, strict=True))
    bins = np.minimum((value * _BINS).astype(int), _BINS - 1)
    parts = [bins == number for number in range(_BINS)]
    return float(sum(abs(value[part].mean() - good[part].mean()) * part.mean() for part in parts if part.any()))


def invert_thumbs(rated: list[ThumbedRun]) -> list[ThumbedRun]:
    """Plant a fault: invert all thumbs."""
    return [replace(run, thumbs=tuple(Thumb(thumb.rater, 1 - thumb.value) for thumb in run.thumbs)) for run in rated]


def add_leak(rated: list[ThumbedRun]) -> list[ThumbedRun]:
    """Plant a fault: add a feature that copies the thumb."""
    return [replace(run, features={**run.features, _LEAK: run.thumbs[0].value}) for run in rated]


@contextlib.contextmanager
def without_leak_check() -> Iterator[None]:
    """Plant a fault: disable the check whether a feature predicts which runs have a thumb."""
    with mock.patch.object(columns, "foreign_share", return_value=0.0):
        yield


@contextlib.contextmanager
def with_trusted_raters() -> Iterator[None]:
    """Plant a fault: assume that all raters are reliable."""
    sound = crowd._reliabilities

    def faulty(thumbs: crowd.Thumbs, good: crowd.Array) -> tuple[float, crowd.Array]:
        crowd_reliability, reliabilities = sound(thumbs, good)
        return crowd_reliability, np.full(len(reliabilities), 0.95)

    with mock.patch.object(crowd, "_reliabilities", faulty):
        yield


def of_thumbs(seeds: range, count: int, tick: Callable[[], None]) -> dict[str, Numbers]:
    report: dict[str, Numbers] = {}
    for name, people in CASES.items():
        run_count = count // 4 if people.share == 1.0 else count
        results = []
        for seed in seeds:
            results.append(evaluate_model(fit_model(seed, run_count, people), runs(1000 + seed, _FRESH)))
            tick()
        report[name] = _over_seeds(results)
    planted = {
        "swapped": [fit_model(seed, count, CASES["few"], invert_thumbs) for seed in seeds],
        "leaking": [fit_model(seed, count, CASES["few"], add_leak) for seed in seeds],
    }
    tick()
    with without_leak_check():
        planted["leaking, unguarded"] = [fit_model(seed, count, CASES["few"], add_leak) for seed in seeds]
    with with_trusted_raters():
        planted["everybody is right"] = [fit_model(seed, count, CASES["few"]) for seed in seeds]
    tick()
    for name, models in planted.items():
        results = [evaluate_model(model, runs(1000 + seed, _FRESH)) for seed, model in zip(seeds, models, strict=True)]
        report[name] = _over_seeds(results)
        report[name]["leak_refused"] = statistics.mean(_LEAK in model.fit_facts.refused for model in models)
    return report


def _over_seeds(results: Sequence[Numbers]) -> Numbers:
    names = sorted({name for result in results for name in result})
    means = {name: statistics.mean(result[name] for result in results if name in result) for name in names}
    worst = {
        f"{name}_min": min((result[name] for result in results if name in result), default=0.5) for name in ORDERINGS
    }
    return {**means, **worst}


def of_judges(seed: int, streams: int) -> Numbers:
    turned = _thumbs_world.delays(seed, streams, 600, FOUND_WITHIN, 0.8)
    lost = _thumbs_world.delays(seed, streams // 4, 600, 2 * FOUND_WITHIN, 0.5)
    late = [delay for delay in turned if delay is not None and delay > 0]
    with mock.patch.object(judge_monitor, "upper_bound", lambda mean, _count, _error: mean):
        careless = _thumbs_world.false_alarms(seed, streams // 4, 1500)
    return {
        "false_alarms": _thumbs_world.false_alarms(seed, streams, 1500),
        "found": len(late) / streams,
        "delay_p50": statistics.median(late) if late else float("inf"),
        "found_at_chance": sum(delay is not None and delay > 0 for delay in lost) / len(lost),
        "false_alarms_careless": careless,
    }


def missed_by_thumbs(report: dict[str, Numbers]) -> list[str]:
    """Return the lines about thumbs that do not hold."""
    few = report["few"]
    lines = {
        f"AUROC {few['auroc_min']:.3f} of the worst seed": few["auroc_min"] >= AUROC_MIN,
        f"AUROC {few['auroc_paid_min']:.3f} of what is paid": few["auroc_paid_min"] >= AUROC_MIN,
        "AUROC of thumbs without names": report["nameless"]["auroc_min"] >= AUROC_MIN,
        "2 % poisoners cost too much": few["auroc"] - report["poisoned"]["auroc"] <= POISON_COST_MAX,
        "one poisoner costs too much": few["auroc"] - report["one poisoner"]["auroc"] <= ONE_POISONER_COST_MAX,
        "it says nothing": few["speaks"] > 0.05 and not any(report[name]["silent"] for name in ("few", "poisoned")),
        **{
            f"{name}: off by {report[name]['calibration_error']:.3f}": (
                report[name]["calibration_error"] <= CALIBRATION_ERROR_MAX
            )
            for name in ("few", "nameless", "poisoned", "all")
        },
        f"intervals hold the truth in {few['covered']:.2f}": few["covered"] >= COVERED_MIN,
        "not caught: swapped thumbs": all(report["swapped"][f"{name}_min"] < AUROC_MIN for name in ORDERINGS),
        "a leak is not refused": report["leaking"]["leak_refused"] == 1.0,
        "a leak that was refused costs something": report["leaking"]["auroc_min"] >= AUROC_MIN,
        "not caught: nobody refuses a leak": (
            report["leaking, unguarded"]["auroc_min"] < AUROC_MIN or report["leaking, unguarded"]["speaks"] < 0.05
        ),
        "not caught: raters are believed": (
            report["everybody is right"]["calibration_error"] > CALIBRATION_ERROR_MAX
            or report["everybody is right"]["covered"] < COVERED_MIN
        ),
    }
    return [text for text, holds in lines.items() if not holds]


def missed_by_judges(drift: Numbers) -> list[str]:
    """Return the lines about judges that do not hold."""
    lines = {
        f"false alarms {drift['false_alarms']:.3f}": drift["false_alarms"] <= _thumbs_world.ERROR,
        f"drifts found {drift['found']:.2f}": drift["found"] >= FOUND_MIN,
        "not caught: the reference is taken for the truth": drift["false_alarms_careless"] > _thumbs_world.ERROR,
    }
    return [text for text, holds in lines.items() if not holds]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="sections of the report (%(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed (%(default)s)")
    parser.add_argument("--runs", type=int, default=4000, help="simulated runs of each case (%(default)s)")
    parser.add_argument("--streams", type=int, default=200, help="judges of each kind (%(default)s)")
    parser.add_argument("--arms", nargs="*", metavar="ARM", help=f"arms of the gains: {'; '.join(ARMS)}")
    parser.add_argument("--plays", type=int, default=144, help="audit tasks of each score (%(default)s)")
    parser.add_argument(
        "--workers", type=int, default=2, help="concurrent runs of the gains, a core each (%(default)s)"
    )
    parser.add_argument("--cache", type=Path, default=Path(".cache/demo"), help="folder of base models (%(default)s)")
    parser.add_argument("--parts", type=Path, default=Path("reports/bench-signals"))
    parser.add_argument("--out", type=Path, default=Path("reports/bench-signals.json"))
    options = parser.parse_args()
    began = time.process_time()
    seeds = range(options.first, options.first + options.seeds)
    report: dict[str, object] = {"seeds": list(seeds), "runs": options.runs, "streams": options.streams}
    missed: list[str] = []
    if "gains" in options.only:
        names = [name for name in ARMS if options.arms is None or name in options.arms]
        report["gains"], acceptance_lines = play(
            names, seeds, options.plays, options.cache, options.parts, options.workers
        )
        missed += [line.name for line in acceptance_lines if not line.holds]
    if {"thumbs", "drift"} & set(options.only):
        missed += _without_a_model(options, seeds, report)
    report |= {
        "cpu_s": round(time.process_time() - began, 1),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "missed": missed,
    }
    print(json.dumps(report, indent=2))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for line in missed:
        print(f"does not hold: {line}", file=sys.stderr)
    return bool(missed)


def _without_a_model(options: argparse.Namespace, seeds: range, report: dict[str, object]) -> list[str]:
    """Add the sections about thumbs and judges to the report. Return the lines that do not hold."""
    missed = []
    with ProgressDisplay("bench-signals", len(CASES) * options.seeds + 3, unit="steps") as progress:
        if "thumbs" in options.only:
            report["thumbs"] = thumbs = of_thumbs(seeds, options.runs, progress.advance)
            missed += missed_by_thumbs(thumbs)
        if "drift" in options.only:
            progress.update(activity="judges")
            report["judges"] = drift = of_judges(options.first, options.streams)
            missed += missed_by_judges(drift)
    return missed


if __name__ == "__main__":
    sys.exit(main())
