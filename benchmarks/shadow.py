"""The canary before the canary, against versions whose truth is known: `python -m benchmarks.shadow`.

Writes `reports/bench-shadow.json`. Exit status 1 when one of these does not hold, of 100 pairs of tiny language models
(`_shadow_worlds`: tables over all answers, so that the truth is a sum): of 1,000 95 % intervals of the difference in
what users like, ten for each pair, 93 % hold the truth, and it points the right way in 90 %; of 100 planted pairs that
have nothing to do with each other 95 are refused; canaries with a shadow before them take 40 % fewer of the
candidate's sessions than without, and of those without an effect 5 % at most are rolled back, of those 10 points worse
5 % at most promoted, with a shadow as without. A few minutes of one core; numpy and no model.
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

from benchmarks._shadow_canaries import Canaries, canaries, shadows
from benchmarks._shadow_worlds import SPOKE, TASKS, Sampled, VersionPair, far, near, sample
from headrace_cli.progress import ProgressDisplay
from headrace_registry.rollouts.plan import RolloutPlan
from headrace_registry.shadow.demands import Demands
from headrace_registry.shadow.estimate import ShadowEstimate, ShadowPair, estimate

COVERED_MIN, RANKED_MIN, FAR_REFUSED_MIN, SAVED_MIN = 0.93, 0.9, 0.95, 0.4
WRONG_MAX = 0.05
_SMALLEST, _LARGEST = 0.03, 0.12
"""How much better or worse a candidate is, half of each."""
_MARGIN = 0.1
Numbers = dict[str, float]


def as_pairs(found: Sampled) -> list[ShadowPair]:
    return [
        ShadowPair(
            number,
            float(found.candidate[number]),
            float(found.champion[number]),
            float(found.judged[number]),
            None if np.isnan(found.said[number]) else float(found.said[number]),
            float(found.log_weight[number]),
        )
        for number in range(len(found.task))
    ]


def of_estimates(truths: Sequence[float], found: Sequence[ShadowEstimate]) -> Numbers:
    """Coverage and ranking of those that were not refused; refusals as a part of all."""
    said = [
        (truth, one.difference, one.lower, one.upper, one.judged)
        for truth, one in zip(truths, found, strict=True)
        if one.difference is not None and one.lower is not None and one.upper is not None
    ]
    covered = [lower <= truth <= upper for truth, _, lower, upper, _ in said]
    return {
        "intervals": len(said),
        "refused": 1 - len(said) / len(found),
        "covered": float(np.mean(covered)),
        "ranked_right": float(np.mean([(truth > 0) == (value > 0) for truth, value, *_ in said])),
        "judges_alone_ranked_right": float(np.mean([(truth > 0) == ((judged or 0) > 0) for truth, *_, judged in said])),
        "width_mean": float(np.mean([upper - lower for _, _, lower, upper, _ in said])),
        "effective_mean": float(np.mean([one.overlap.effective for one in found if one.refused is None])),
        "bias": float(np.mean([value - truth for truth, value, *_ in said])),
    }


def of_canaries(found: Canaries) -> Numbers:
    return {
        "rolled_back": float(np.mean(found.rolled_back)),
        "in_the_shadow": float(np.mean(found.in_shadow)),
        "promoted": float(np.mean(found.promoted)),
        "held": float(np.mean(found.held)),
        "sessions_mean": float(np.mean(found.sessions)),
        "sessions_p50": float(np.median(found.sessions)),
    }


def failures(report: dict[str, Numbers]) -> list[str]:
    """The lines that do not hold."""
    at_least = {
        "intervals that hold the truth": (report["near"]["covered"], COVERED_MIN),
        "ranked right": (report["near"]["ranked_right"], RANKED_MIN),
        "far pairs refused": (report["far"]["refused"], FAR_REFUSED_MIN),
        "canary sessions saved": (report["saved"]["all"], SAVED_MIN),
    }
    at_most = {
        f"{name}: {what}": (report[name][what], WRONG_MAX)
        for name, what in (
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
    equal = [replace(one, candidate=one.champion) for one in close[:few]]
    worse = [near(chance, -_MARGIN) for _ in range(few)]
    rollouts = options.pairs * options.runs + 2 * options.nulls
    total = options.pairs * (options.samples + 1) + rollouts + 7 * options.sessions
    with ProgressDisplay("bench-shadow", total, unit="steps") as progress:
        found = _estimated(chance, close, apart, options, progress.advance)
        for name, pairs, runs in (
            ("pairs", close, options.runs),
            ("equal", equal, options.nulls // few),
            ("10 points worse", worse, options.nulls // few),
        ):
            progress.at(doing=name)
            found |= _raced(chance, name, pairs, runs, options, progress.advance)
    for kind, chosen in (("all", "pairs"), ("of equal versions", "equal")):
        before, after = (found[f"{chosen}, {how}"]["sessions_mean"] for how in ("without", "with"))
        found.setdefault("saved", {})[kind] = 1 - after / before
    found["saved"]["where prompts tell no task"] = (
        1 - found["pairs, with, no kinds"]["sessions_mean"] / found["pairs, without"]["sessions_mean"]
    )
    found["world"] = {"between_tasks": float(np.mean([_between(one) for one in close]))}
    return found


def _between(pair: VersionPair) -> float:
    """The part of the variance of a like that lies between tasks."""
    by_task = pair.by_task(pair.champion)
    mean = float(by_task.mean())
    return float(by_task.var()) / (mean * (1 - mean))


def _estimated(
    chance: np.random.Generator,
    close: Sequence[VersionPair],
    apart: Sequence[VersionPair],
    options: argparse.Namespace,
    told: Callable[[], None],
) -> dict[str, Numbers]:
    demands = Demands()
    truths, estimates = [], []
    for pair in close:
        for _ in range(options.samples):
            truths.append(pair.truth)
            estimates.append(estimate(as_pairs(sample(chance, pair, options.prompts)), demands))
            told()
    refused = []
    for pair in apart:
        refused.append(estimate(as_pairs(sample(chance, pair, options.prompts)), demands).refused)
        told()
    why = Counter(one.partition(":")[0] if one else "not refused" for one in refused)
    print(f"far pairs: {dict(why)}")
    return {
        "near": of_estimates(truths, estimates),
        "far": {"pairs": len(refused), "refused": sum(one is not None for one in refused) / len(refused)},
    }


def _raced(
    chance: np.random.Generator,
    name: str,
    pairs: Sequence[VersionPair],
    runs: int,
    options: argparse.Namespace,
    told: Callable[[], None],
) -> dict[str, Numbers]:
    plain = RolloutPlan()
    plan = RolloutPlan(shadow_units=options.prompts)
    found = {f"{name}, without": of_canaries(canaries(chance, plain, pairs, runs, options.sessions, None, told))}
    shadow = shadows(chance, plan, pairs, runs, told)
    with_it = canaries(chance, plan, pairs, runs, options.sessions, shadow, told)
    found[f"{name}, with"] = of_canaries(with_it)
    if name == "pairs":
        blind = canaries(chance, plan, pairs, runs, options.sessions, shadow, told, kinds=False)
        found[f"{name}, with, no kinds"] = of_canaries(blind)
    return found


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
    found = measure(options)
    missed = failures(found)
    report = {
        "cases": found,
        "seed": options.seed,
        "pairs": options.pairs,
        "samples": options.samples,
        "prompts": options.prompts,
        "canaries": {"of each pair": options.runs, "equal": options.nulls, "10 points worse": options.nulls},
        "sessions_of_both_arms": options.sessions,
        "tasks": TASKS,
        "users_who_speak": SPOKE,
        "cpu_s": round(time.process_time() - began, 1),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "missed": missed,
    }
    print(json.dumps(found, indent=2))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"wrote {options.out}")
    for line in missed:
        print(f"does not hold: {line}", file=sys.stderr)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
