"""The gate's error rates, on simulated versions with known scores: `python -m benchmarks.gate`.

The program writes `reports/bench-gate.json`, with exit status 1 if a line does not hold. The lines, at true scores of
0.5 and 0.8 and the default settings: of 2,000 pairs, at most 5 % of equal versions are refused, and at most 5 % of
versions that are 10 points worse are promoted. The recorded score of champions has a bias below one point. 95 % of the
trainers that lose a point per version are stopped before 5 points are lost, over 40 versions. The same figures are
reported for the old rule: 96 tasks, a margin of 0.05, and the champion's score from its own gate. The benchmark takes a
few minutes of one core, with numpy and no model.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from benchmarks._gate_trials import (
    OLD_TASKS,
    SHARED,
    Floats,
    Models,
    OldRuleModels,
    Outcomes,
    Trials,
    audited,
    fresh,
    play,
)
from headrace_cli.terminal import ProgressDisplay
from headrace_registry.settings import GateSettings

SCORES = (0.5, 0.8)
REFUSED_MAX = PROMOTED_MAX = DECAYED_MAX = 0.05
BIAS_MAX = 0.01
LOST_MAX = 0.05
VERSIONS = 40
POINT = 0.01
SECONDS_PER_PLAY = 1.0
DEMO = GateSettings(margin=0.25, anchor_margin=0.25, tasks_max=120)
"""examples/email_agent/headrace.toml."""
Numbers = dict[str, float]


def same(value: float, runs: int) -> Floats:
    return np.full(runs, value)


def pairs(
    draw: np.random.Generator,
    rule: GateSettings,
    score: float,
    worse: float,
    runs: int,
    number: int = 1,
    anchored: bool = False,
) -> Outcomes:
    """Run trials of candidates that are `worse` than a champion of the given score. The anchor is as good as the
    champion."""
    anchor = same(score if anchored else np.nan, runs)
    carried = fresh(runs), same(1e-300, runs)
    return play(draw, rule, Trials(same(score - worse, runs), same(score, runs), anchor, same(number, runs), *carried))


def of_pairs(outcomes: Outcomes, concurrency: int) -> Numbers:
    return {
        "promoted": share(outcomes.passed),
        "refused": share(~outcomes.passed),
        "of_these_undecided": share(~outcomes.passed & ~outcomes.failed),
        "tasks_mean": round(float(outcomes.tasks.mean()), 1),
        "tasks_p95": round(float(np.quantile(outcomes.tasks, 0.95)), 1),
        "plays_mean": round(float(outcomes.plays.mean()), 1),
        "seconds_mean": round(float(outcomes.plays.mean()) * SECONDS_PER_PLAY / concurrency, 1),
    }


def share(flags: np.ndarray) -> float:
    return round(float(np.mean(flags)), 4)


def errors(draw: np.random.Generator, gate: GateSettings, runs: int) -> dict[str, dict[str, Numbers]]:
    """Return the results of single pairs, directly after an anchor was found."""
    kinds = {"equal": 0.0, "10_points_worse": 0.1, "5_points_better": -0.05}
    return {
        f"{score:g}": {
            name: of_pairs(pairs(draw, gate, score, worse, runs), gate.concurrency) for name, worse in kinds.items()
        }
        for score in SCORES
    }


def later(draw: np.random.Generator, gate: GateSettings, runs: int) -> dict[str, dict[str, Numbers]]:
    """Return the results of equal versions late in a family whose anchor is not the champion: the cost of alpha
    spending."""
    return {
        f"{score:g}": {
            f"equal_as_number_{number}": of_pairs(
                pairs(draw, gate, score, 0.0, runs, number, anchored=True), gate.concurrency
            )
            for number in (2, 10, 40)
        }
        for score in SCORES
    }


def demo(draw: np.random.Generator, gate: GateSettings, runs: int) -> dict[str, dict[str, Numbers]]:
    """Return the results with the demo's settings, which allow few tasks."""
    kinds = {"equal": 0.0, "10_points_worse": 0.1, "25_points_worse": 0.25, "5_points_better": -0.05}
    return {
        f"{score:g}": {
            name: of_pairs(pairs(draw, DEMO, score, worse, runs), gate.concurrency) for name, worse in kinds.items()
        }
        for score in SCORES
    }


def decay(draw: np.random.Generator, gate: GateSettings, runs: int) -> dict[str, Numbers]:
    """Return the losses with trainers whose every version is a point worse than the champion."""
    start = np.repeat(SCORES, runs)
    models, tasks, plays = Models.of(start), np.zeros(len(start)), np.zeros(len(start))
    for _ in range(VERSIONS):
        for total, more in zip((tasks, plays), models.meet(draw, gate, models.champion - POINT), strict=True):
            total += more
    old = OldRuleModels(draw, start)
    for _ in range(VERSIONS):
        old.meet(old.champion - POINT)
    return {
        f"{score:g}": {
            "lost_5_points": share(start[mine] - models.champion[mine] > LOST_MAX - POINT / 2),
            "points_lost_mean": points(start[mine] - models.champion[mine]),
            "tasks_mean": round(float(tasks[mine].mean()) / VERSIONS, 1),
            "plays_mean": round(float(plays[mine].mean()) / VERSIONS, 1),
            "old_rule_points_lost_mean": points(start[mine] - old.champion[mine]),
        }
        for score, mine in ((score, start == score) for score in SCORES)
    }


def recorded(draw: np.random.Generator, gate: GateSettings, runs: int) -> dict[str, Numbers]:
    """Return the bias of the champion's recorded score after ten versions of a trainer with random gains and losses."""
    start = np.repeat(SCORES, runs)
    models, old = Models.of(start), OldRuleModels(draw, start)
    for _ in range(10):
        step = draw.normal(0.0, 0.03, start.shape)
        models.meet(draw, gate, np.clip(models.champion + step, 0.02, 0.98))
        old.meet(np.clip(old.champion + step, 0.02, 0.98))
    recorded_scores = audited(draw, models.champion, gate.audit_tasks)
    return {
        f"{score:g}": {
            "bias_points": points(recorded_scores[mine] - models.champion[mine]),
            "spread_points": round(float(np.std(recorded_scores[mine] - models.champion[mine])) * 100, 2),
            "old_rule_bias_points": points(old.recorded[mine] - old.champion[mine]),
        }
        for score, mine in ((score, start == score) for score in SCORES)
    }


def old_errors(draw: np.random.Generator, runs: int) -> dict[str, Numbers]:
    """Return the error rates of the old rule: directly after the champion was measured, and after ten versions, when
    its recorded score is biased by selection."""
    report: dict[str, Numbers] = {}
    for score in SCORES:
        old = OldRuleModels(draw, same(score, runs))
        report[f"{score:g}"] = {"tasks_mean": OLD_TASKS, **_old_rates(old, "")}
        for _ in range(10):
            old.meet(np.clip(old.champion + draw.normal(0.0, 0.03, runs), 0.02, 0.98))
        report[f"{score:g}"] |= _old_rates(old, "after_10_versions_")
    return report


def _old_rates(old: OldRuleModels, when: str) -> Numbers:
    refused, promoted = ~old.judge(old.champion), old.judge(old.champion - 0.1)
    return {f"{when}equal_refused": share(refused), f"{when}10_points_worse_promoted": share(promoted)}


def points(values: Floats) -> float:
    return round(float(np.mean(values)) * 100, 2)


def failures(report: Mapping[str, Mapping[str, Mapping[str, object]]]) -> list[str]:
    """Return the lines that do not hold."""
    problems = []
    for score in (f"{true_score:g}" for true_score in SCORES):
        pair, old = report["errors"][score], report["recorded"][score]
        lines = {
            f"equal versions refused at {score}": (_of(pair["equal"], "refused"), REFUSED_MAX),
            f"10 points worse promoted at {score}": (_of(pair["10_points_worse"], "promoted"), PROMOTED_MAX),
            f"bias of the recorded score at {score}": (abs(float(str(old["bias_points"]))) / 100, BIAS_MAX),
            f"lost 5 points in 40 versions at {score}": (_of(report["decay"][score], "lost_5_points"), DECAYED_MAX),
        }
        problems += [
            f"{name}: {value:.3f}, at most {limit:g}" for name, (value, limit) in lines.items() if value > limit
        ]
    return problems


def _of(numbers: object, name: str) -> float:
    assert isinstance(numbers, Mapping)
    return float(numbers[name])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2000, help="pairs of each kind (%(default)s)")
    parser.add_argument(
        "--histories", type=int, default=300, help="histories of 40 versions at each score (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("reports/bench-gate.json"))
    options = parser.parse_args()
    gate = GateSettings()
    began = time.process_time()
    parts: dict[str, Callable[[np.random.Generator], object]] = {
        "errors": lambda draw: errors(draw, gate, options.pairs),
        "decay": lambda draw: decay(draw, gate, options.histories),
        "recorded": lambda draw: recorded(draw, gate, 2 * options.histories),
        "old_rule": lambda draw: old_errors(draw, options.pairs),
        "later_in_a_family": lambda draw: later(draw, gate, options.pairs // 4),
        "demo": lambda draw: demo(draw, gate, options.pairs),
    }
    report: dict[str, object] = {}
    with ProgressDisplay("bench-gate", len(parts), unit="parts") as progress:
        for number, (name, measure) in enumerate(parts.items()):
            progress.update(number, activity=name)
            report[name] = measure(np.random.default_rng([options.seed, number]))
            print(f"{name}: {json.dumps(report[name], indent=2)}", flush=True)
    missed = failures(report)  # type: ignore[arg-type]
    report |= {
        "seed": options.seed,
        "pairs": options.pairs,
        "histories": options.histories,
        "seconds_per_play": SECONDS_PER_PLAY,
        "settings": gate.model_dump(mode="json", exclude={"command", "base_url"}),
        "latent_share_of_the_task": SHARED,
        "cpu_s": round(time.process_time() - began, 1),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "missed": missed,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    for line in missed:
        print(f"does not hold: {line}", file=sys.stderr)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
