"""What each signal teaches, what sparse and noisy thumbs say, and when a judge drifts: `python -m benchmarks.signals`.

Writes `reports/bench-signals.json`. Exit status 1 when a line does not hold.

`--only thumbs drift`, a minute of one core, trains no model. Of the reward model `thumbs`, on runs whose truth is
known, 4,000 of them, of which 3 % have a thumb and a fifth of the thumbs are wrong: on fresh runs its AUROC is at least
0.8 for each of five seeds, of what it believes and of what it pays; poisoners with 2 % of the thumbs cost at most two
points of it, and one with a tenth five, where it speaks at all; its values are off by 0.1 at most, and its 90 %
intervals hold the truth in 85 %. Of the alarm for judges: it is raised of at most 5 % of judges that stay as they are,
and within 500 runs of 90 % of those that turn against people, from wrong in one of ten to wrong in eight. Each line has
a fault planted that breaks it.

`--only gains` trains the demo's agent from one signal at a time, five seeds each, each run in a process without
services; gains are on audit tasks, over the base of the seed. Edits alone gain 15 points with `sft` and with `dpo`, in
200 edits at most. Natural signals alone gain half of what explicit feedback does, in a third of its runs. Thumbs on 3 %
of the runs, a fifth of them wrong, gain 70 % of what full labels do after 60 rounds of each, where those hardly gain
more, and 2 % poisoners cost five points at most. Gains after 20 and 40 rounds are in the report. Typed corrections
alone gain 15 points in 500 sessions and in half of those that binary rewards need, in batches of 8, 16 or 32, whichever
is sooner, over ten seeds more; kinds of tasks that nobody asked about lose a point at most; and the gap between teacher
and student is found where there is one, and nowhere else, in nine of ten settings. What was run lies under `--parts`
and is not run again.
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
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

from benchmarks import _judge_drift
from benchmarks._gains_arms import ARMS
from benchmarks._gains_jobs import play
from benchmarks._ranks import auroc
from benchmarks._thumbs_world import KnownRun, People, bold, runs, thumbed
from headrace_cli.progress import ProgressDisplay
from headrace_scorer import agreement_test
from headrace_scorer.learned import columns, crowd
from headrace_scorer.learned.models import FitDemands, Thumb, ThumbedRun
from headrace_scorer.learned.thumbs import FittedThumbs, fit

SECTIONS = ("gains", "thumbs", "drift")
AUROC_MIN, POISON_COST_MAX, ONE_POISONER_COST_MAX = 0.8, 0.02, 0.05
CALIBRATION_ERROR_MAX, COVERED_MIN, FOUND_MIN, FOUND_WITHIN = 0.1, 0.85, 0.9, 500
_OTHERS, _FRESH, _BINS = 1000, 2000, 10
_LEAK = "function:leak"
ORDERINGS = ("auroc", "auroc_paid")
"""By what a reward model believes, and by what it pays."""
Numbers = dict[str, float]
Spoil = Callable[[list[ThumbedRun]], list[ThumbedRun]]
CASES = {
    "few": People(),
    "nameless": People(named=False),
    "poisoned": People(poisoners=0.02),
    "one poisoner": People(poisoners=0.1, poisoner_names=1),
    "all": People(share=1.0, flipped=0.0),
}


def fitted(seed: int, count: int, people: People, spoil: Spoil = list) -> FittedThumbs:
    spoken, silent = thumbed(seed, runs(seed, count), people)
    others = silent or runs(seed + 500, _OTHERS)
    return fit(spoil(spoken), [one.features for one in others[:_OTHERS]], FitDemands())


def judged(made: FittedThumbs, fresh: Sequence[KnownRun]) -> Numbers:
    """Of runs that it has not seen: how well it orders all of them, and what it says where it is sure."""
    good = np.array([one.good for one in fresh])
    if made.fit_facts.silent is not None:
        return {"silent": 1.0, "speaks": 0.0}
    unsure = bold(made)
    everything = [unsure.judge(one.features) for one in fresh]
    values = np.array([one.value for one in everything if one is not None])
    paid = np.array([one.paid for one in everything if one is not None])
    sure = [(one, made.judge(run.features), run) for one, run in zip(everything, fresh, strict=True)]
    spoken = [(found, run) for _, found, run in sure if found is not None]
    return {
        "silent": 0.0,
        "auroc": auroc(values, good),
        "auroc_paid": auroc(paid, good),
        "ideal_auroc": auroc(np.array([one.chance for one in fresh]), good),
        "speaks": len(spoken) / len(fresh),
        "calibration_error": calibration_error([(found.value, run.good) for found, run in spoken]),
        "covered": _share([found.low <= run.chance <= found.high for found, run in spoken]),
        "width": float(np.mean([found.high - found.low for found, _ in spoken] or [0.0])),
    }


def _share(held: Sequence[bool]) -> float:
    """Of nothing, all."""
    return sum(held) / len(held) if held else 1.0


def calibration_error(pairs: Sequence[tuple[float, bool]]) -> float:
    """In ten bins of the value, how far its mean is from the share of good runs, weighted by the bin."""
    if not pairs:
        return 0.0
    value, good = (np.array(one, dtype=np.float64) for one in zip(*pairs, strict=True))
    bins = np.minimum((value * _BINS).astype(int), _BINS - 1)
    parts = [bins == number for number in range(_BINS)]
    return float(sum(abs(value[part].mean() - good[part].mean()) * part.mean() for part in parts if part.any()))


def swapped(spoken: list[ThumbedRun]) -> list[ThumbedRun]:
    """Up is down."""
    return [replace(one, thumbs=tuple(Thumb(said.rater, 1 - said.value) for said in one.thumbs)) for one in spoken]


def leaking(spoken: list[ThumbedRun]) -> list[ThumbedRun]:
    """A source that has read the thumb."""
    return [replace(one, features={**one.features, _LEAK: one.thumbs[0].value}) for one in spoken]


@contextlib.contextmanager
def unguarded() -> Iterator[None]:
    """Nobody asks whether a feature tells who has a thumb."""
    with mock.patch.object(columns, "foreign_share", return_value=0.0):
        yield


@contextlib.contextmanager
def everybody_is_right() -> Iterator[None]:
    """Raters are believed, whatever they say."""
    sound = crowd._reliabilities

    def faulty(thumbs: crowd.Thumbs, good: crowd.Array) -> tuple[float, crowd.Array]:
        told, right = sound(thumbs, good)
        return told, np.full(len(right), 0.95)

    with mock.patch.object(crowd, "_reliabilities", faulty):
        yield


def of_thumbs(seeds: range, count: int, tick: Callable[[], None]) -> dict[str, Numbers]:
    found: dict[str, Numbers] = {}
    for name, people in CASES.items():
        many = count // 4 if people.share == 1.0 else count
        told = []
        for seed in seeds:
            told.append(judged(fitted(seed, many, people), runs(1000 + seed, _FRESH)))
            tick()
        found[name] = _over_seeds(told)
    planted = {
        "swapped": [fitted(seed, count, CASES["few"], swapped) for seed in seeds],
        "leaking": [fitted(seed, count, CASES["few"], leaking) for seed in seeds],
    }
    tick()
    with unguarded():
        planted["leaking, unguarded"] = [fitted(seed, count, CASES["few"], leaking) for seed in seeds]
    with everybody_is_right():
        planted["everybody is right"] = [fitted(seed, count, CASES["few"]) for seed in seeds]
    tick()
    for name, models in planted.items():
        told = [judged(made, runs(1000 + seed, _FRESH)) for seed, made in zip(seeds, models, strict=True)]
        found[name] = _over_seeds(told)
        found[name]["leak_refused"] = statistics.mean(_LEAK in made.fit_facts.refused for made in models)
    return found


def _over_seeds(told: Sequence[Numbers]) -> Numbers:
    names = sorted({name for one in told for name in one})
    means = {name: statistics.mean(one[name] for one in told if name in one) for name in names}
    worst = {f"{name}_min": min((one[name] for one in told if name in one), default=0.5) for name in ORDERINGS}
    return {**means, **worst}


def of_judges(seed: int, streams: int) -> Numbers:
    turned = _judge_drift.delays(seed, streams, 600, FOUND_WITHIN, 0.8)
    lost = _judge_drift.delays(seed, streams // 4, 600, 2 * FOUND_WITHIN, 0.5)
    late = [one for one in turned if one is not None and one > 0]
    with mock.patch.object(agreement_test, "upper_bound", lambda mean, _count, _error: mean):
        careless = _judge_drift.false_alarms(seed, streams // 4, 1500)
    return {
        "false_alarms": _judge_drift.false_alarms(seed, streams, 1500),
        "found": len(late) / streams,
        "delay_p50": statistics.median(late) if late else float("inf"),
        "found_at_chance": sum(one is not None and one > 0 for one in lost) / len(lost),
        "false_alarms_careless": careless,
    }


def missed_by_thumbs(found: dict[str, Numbers]) -> list[str]:
    """The lines that do not hold."""
    few = found["few"]
    lines = {
        f"AUROC {few['auroc_min']:.3f} of the worst seed": few["auroc_min"] >= AUROC_MIN,
        f"AUROC {few['auroc_paid_min']:.3f} of what is paid": few["auroc_paid_min"] >= AUROC_MIN,
        "AUROC of thumbs without names": found["nameless"]["auroc_min"] >= AUROC_MIN,
        "2 % poisoners cost too much": few["auroc"] - found["poisoned"]["auroc"] <= POISON_COST_MAX,
        "one poisoner costs too much": few["auroc"] - found["one poisoner"]["auroc"] <= ONE_POISONER_COST_MAX,
        "it says nothing": few["speaks"] > 0.05 and not any(found[name]["silent"] for name in ("few", "poisoned")),
        **{
            f"{name}: off by {found[name]['calibration_error']:.3f}": (
                found[name]["calibration_error"] <= CALIBRATION_ERROR_MAX
            )
            for name in ("few", "nameless", "poisoned", "all")
        },
        f"intervals hold the truth in {few['covered']:.2f}": few["covered"] >= COVERED_MIN,
        "not caught: swapped thumbs": all(found["swapped"][f"{name}_min"] < AUROC_MIN for name in ORDERINGS),
        "a leak is not refused": found["leaking"]["leak_refused"] == 1.0,
        "a leak that was refused costs something": found["leaking"]["auroc_min"] >= AUROC_MIN,
        "not caught: nobody refuses a leak": (
            found["leaking, unguarded"]["auroc_min"] < AUROC_MIN or found["leaking, unguarded"]["speaks"] < 0.05
        ),
        "not caught: raters are believed": (
            found["everybody is right"]["calibration_error"] > CALIBRATION_ERROR_MAX
            or found["everybody is right"]["covered"] < COVERED_MIN
        ),
    }
    return [text for text, holds in lines.items() if not holds]


def missed_by_judges(drift: Numbers) -> list[str]:
    """The lines that do not hold."""
    lines = {
        f"false alarms {drift['false_alarms']:.3f}": drift["false_alarms"] <= _judge_drift.ERROR,
        f"drifts found {drift['found']:.2f}": drift["found"] >= FOUND_MIN,
        "not caught: the reference is taken for the truth": drift["false_alarms_careless"] > _judge_drift.ERROR,
    }
    return [text for text, holds in lines.items() if not holds]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="of the report (%(default)s)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed (%(default)s)")
    parser.add_argument("--runs", type=int, default=4000, help="of each world (%(default)s)")
    parser.add_argument("--streams", type=int, default=200, help="judges of each kind (%(default)s)")
    parser.add_argument("--arms", nargs="*", metavar="ARM", help=f"of the gains: {'; '.join(ARMS)}")
    parser.add_argument("--plays", type=int, default=144, help="of audit tasks, for each score (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="of the gains, a core each (%(default)s)")
    parser.add_argument("--cache", type=Path, default=Path(".cache/demo"), help="of base models (%(default)s)")
    parser.add_argument("--parts", type=Path, default=Path("reports/bench-signals"))
    parser.add_argument("--out", type=Path, default=Path("reports/bench-signals.json"))
    options = parser.parse_args()
    began = time.process_time()
    seeds = range(options.first, options.first + options.seeds)
    report: dict[str, object] = {"seeds": list(seeds), "runs": options.runs, "streams": options.streams}
    missed: list[str] = []
    if "gains" in options.only:
        names = [name for name in ARMS if options.arms is None or name in options.arms]
        report["gains"], made = play(names, seeds, options.plays, options.cache, options.parts, options.workers)
        missed += [line.name for line in made if not line.holds]
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
    """The sections of thumbs and judges, into the report; the lines that do not hold."""
    missed = []
    with ProgressDisplay("bench-signals", len(CASES) * options.seeds + 3, unit="steps") as progress:
        if "thumbs" in options.only:
            report["thumbs"] = found = of_thumbs(seeds, options.runs, progress.advance)
            missed += missed_by_thumbs(found)
        if "drift" in options.only:
            progress.at(doing="judges")
            report["judges"] = drift = of_judges(options.first, options.streams)
            missed += missed_by_judges(drift)
    return missed


if __name__ == "__main__":
    sys.exit(main())
