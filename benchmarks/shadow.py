"""Shadow evaluation before a canary, with simulated versions of known quality: `python -m benchmarks.shadow`.

The program writes `reports/bench-shadow.json`, with exit status 1 if a line does not hold. The lines, of 100 pairs of
tiny language models (`_shadow_canaries`: tables over all answers, so that the truth is a sum): of 1,000 95 % intervals
of the difference in users' ratings, ten for each pair, 93 % contain the truth, and 90 % have the right sign. 95 of 100
planted unrelated pairs are refused. Canaries after a shadow take 40 % fewer of the candidate's sessions than without.
With and without a shadow, at most 5 % of equal candidates are rolled back and at most 5 % of candidates that are 10
points worse are promoted. The benchmark takes a few minutes of one core, with numpy and no model.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks._shadow_canaries import (
    FEEDBACK_SHARE,
    TASKS,
    Canaries,
    ShadowSample,
    VersionPair,
    canaries,
    far,
    near,
    sample,
    shadows,
)
from headrace_cli.terminal import ProgressDisplay
from headrace_registry.rollouts.estimate import EstimateRequirements, ShadowEstimate, ShadowPair, estimate
from headrace_registry.rollouts.plan import RolloutPlan

COVERED_MIN, RANKED_MIN, FAR_REFUSED_MIN, SAVED_MIN = 0.93, 0.9, 0.95, 0.4
WRONG_MAX = 0.05
_SMALLEST, _LARGEST = 0.03, 0.12
"""Range of the difference between candidate and champion, of either sign."""
_MARGIN = 0.1
Numbers = dict[str, float]


def as_pairs(sampled: ShadowSample) -> list[ShadowPair]:
    return [
        ShadowPair(
            number,
            float(sampled.candidate[number]),
            float(sampled.champion[number]),
            float(sampled.judged[number]),
            None if np.isnan(sampled.feedback[number]) else float(sampled.feedback[number]),
            float(sampled.log_weight[number]),
        )
        for number in range(len(sampled.task))
    ]


def of_estimates(truths: Sequence[float], estimates: Sequence[ShadowEstimate]) -> Numbers:
    """Return coverage and ranking of the estimates that were not refused, and the share of refusals."""
    accepted = [
        (truth, result.difference, result.lower, result.upper, result.judged)
        for truth, result in zip(truths, estimates, strict=True)
        if result.difference is not None and result.lower is not None and result.upper is not None
    ]
    covered = [lower <= truth <= upper for truth, _, lower, upper, _ in accepted]
    return {
        "intervals": len(accepted),
        "refused": 1 - len(accepted) / len(estimates),
        "covered": float(np.mean(covered)),
        "ranked_right": float(np.mean([(truth > 0) == (value > 0) for truth, value, *_ in accepted])),
        "judges_alone_ranked_right": float(
            np.mean([(truth > 0) == ((judged or 0) > 0) for truth, *_, judged in accepted])
        ),
        "width_mean": float(np.mean([upper - lower for _, _, lower, upper, _ in accepted])),
        "effective_mean": float(np.mean([result.overlap.effective for result in estimates if result.refused is None])),
        "bias": float(np.mean([value - truth for truth, value, *_ in accepted])),
    }


def of_canaries(results: Canaries) -> Numbers:
    return {
        "rolled_back": float(np.mean(results.rolled_back)),
        "in_the_shadow": float(np.mean(results.in_shadow)),
        "promoted": float(np.mean(results.promoted)),
        "held": float(np.mean(results.undecided)),
        "sessions_mean": float(np.mean(results.sessions)),
        "sessions_p50": float(np.median(results.sessions)),
    }


def failures(report: dict[str, Numbers]) -> list[str]:
    """Return the lines that do not hold."""
    at_least = {
        "intervals that hold the truth": (report["near"]["covered"], COVERED_MIN),
        "ranked right": (report["near"]["ranked_right"], RANKED_MIN),
        "far pairs refused": (report["far"]["refused"], FAR_REFUSED_MIN),
        "canary sessions saved": (report["saved"]["all"], SAVED_MIN),
    }
    at_most = {
        f"{name}: {rate}": (report[name][rate], WRONG_MAX)
        for name, rate in (
            ("equal, without", "rolled_back"),
            ("equal, with", "rolled_back"),
            ("10 points worse, without", "promoted"),
            ("10 points worse, with", "promoted"),
        )
    }
    low = [f"{name}: {value:.3f}, at least {limit:g}" for name, (value, limit) in at_least.items() if value < limit]
    return low + [
        f"{name}: {value:.3f}, at most {limit:g}" for name, (value, limit) in at_most.items() if value > limit
    ]


def measure(options: argparse.Namespace) -> dict[str, Numbers]:
    chance = np.random.default_rng(options.seed)
    sizes = chance.uniform(_SMALLEST, _LARGEST, options.pairs) * np.where(np.arange(options.pairs) % 2, 1, -1)
    close = [near(chance, float(size)) for size in sizes]
    apart = [far(chance) for _ in range(options.pairs)]
    few = options.pairs // 5 or 1
    equal = [replace(pair, candidate=pair.champion) for pair in close[:few]]
    worse = [near(chance, -_MARGIN) for _ in range(few)]
    rollouts = options.pairs * options.runs + 2 * options.nulls
    total = options.pairs * (options.samples + 1) + rollouts + 7 * options.sessions
    with ProgressDisplay("bench-shadow", total, unit="steps") as progress:
        report = _measure_estimates(chance, close, apart, options, progress.advance)
        for name, pairs, runs in (
            ("pairs", close, options.runs),
            ("equal", equal, options.nulls // few),
            ("10 points worse", worse, options.nulls // few),
        ):
            progress.update(activity=name)
            report |= _compare_canaries(chance, name, pairs, runs, options, progress.advance)
    for kind, chosen in (("all", "pairs"), ("of equal versions", "equal")):
        before, after = (report[f"{chosen}, {how}"]["sessions_mean"] for how in ("without", "with"))
        report.setdefault("saved", {})[kind] = 1 - after / before
    report["saved"]["where prompts tell no task"] = (
        1 - report["pairs, with, no kinds"]["sessions_mean"] / report["pairs, without"]["sessions_mean"]
    )
    report["world"] = {"between_tasks": float(np.mean([_between(pair) for pair in close]))}
    return report


def _between(pair: VersionPair) -> float:
    """Return the share of the variance of ratings that lies between tasks."""
    by_task = pair.by_task(pair.champion)
    mean = float(by_task.mean())
    return float(by_task.var()) / (mean * (1 - mean))


def _measure_estimates(
    chance: np.random.Generator,
    close: Sequence[VersionPair],
    apart: Sequence[VersionPair],
    options: argparse.Namespace,
    on_step: Callable[[], None],
) -> dict[str, Numbers]:
    demands = EstimateRequirements()
    truths, estimates = [], []
    for pair in close:
        for _ in range(options.samples):
            truths.append(pair.truth)
            estimates.append(estimate(as_pairs(sample(chance, pair, options.prompts)), demands))
            on_step()
    refused = []
    for pair in apart:
        refused.append(estimate(as_pairs(sample(chance, pair, options.prompts)), demands).refused)
        on_step()
    reasons = Counter(reason.partition(":")[0] if reason else "not refused" for reason in refused)
    print(f"far pairs: {dict(reasons)}")
    return {
        "near": of_estimates(truths, estimates),
        "far": {"pairs": len(refused), "refused": sum(reason is not None for reason in refused) / len(refused)},
    }


def _compare_canaries(
    chance: np.random.Generator,
    name: str,
    pairs: Sequence[VersionPair],
    runs: int,
    options: argparse.Namespace,
    on_step: Callable[[], None],
) -> dict[str, Numbers]:
    plain = RolloutPlan()
    plan = RolloutPlan(shadow_units=options.prompts)
    report = {f"{name}, without": of_canaries(canaries(chance, plain, pairs, runs, options.sessions, None, on_step))}
    shadow = shadows(chance, plan, pairs, runs, on_step)
    with_shadow = canaries(chance, plan, pairs, runs, options.sessions, shadow, on_step)
    report[f"{name}, with"] = of_canaries(with_shadow)
    if name == "pairs":
        blind = canaries(chance, plan, pairs, runs, options.sessions, shadow, on_step, kinds=False)
        report[f"{name}, with, no kinds"] = of_canaries(blind)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100, help="of versions, near and far each (%(default)s)")
    parser.add_argument("--samples", type=int, default=10, help="estimates of each near pair (%(default)s)")
    parser.add_argument("--prompts", type=int, default=400, help="of each shadow (%(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="canaries of each pair (%(default)s)")
    parser.add_argument("--nulls", type=int, default=1000, help="canaries of equal and of worse pairs (%(default)s)")
    parser.add_argument("--sessions", type=int, default=1400, help="of both arms, of each canary (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("reports/bench-shadow.json"))
    options = parser.parse_args()
    began = time.process_time()
    cases = measure(options)
    missed = failures(cases)
    report = {
        "cases": cases,
        "seed": options.seed,
        "pairs": options.pairs,
        "samples": options.samples,
        "prompts": options.prompts,
        "canaries": {"of each pair": options.runs, "equal": options.nulls, "10 points worse": options.nulls},
        "sessions_of_both_arms": options.sessions,
        "tasks": TASKS,
        "users_who_speak": FEEDBACK_SHARE,
        "cpu_s": round(time.process_time() - began, 1),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "missed": missed,
    }
    print(json.dumps(cases, indent=2))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"wrote {options.out}")
    for line in missed:
        print(f"does not hold: {line}", file=sys.stderr)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
