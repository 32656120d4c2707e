"""Canaries of pairs whose truth is known, with a shadow before them and without: how many users' sessions each takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks._rollout_trials import Crossings, play
from benchmarks._rollout_worlds import DAY_S, Flags, Floats, Sessions, World, sessions_of
from benchmarks._shadow_worlds import TASKS, VersionPair
from headrace_registry.rollouts.evidence import Evidence
from headrace_registry.rollouts.plan import RolloutPlan
from headrace_registry.shadow.expectations import expectations


@dataclass(frozen=True)
class Canaries:
    """What became of them, one for each run."""

    rolled_back: Flags
    promoted: Flags
    held: Flags
    sessions: Floats
    """Of the candidate, until its rollout was over; the horizon's where it never was."""
    in_shadow: Flags
    """Rolled back before any user had the candidate."""


@dataclass(frozen=True)
class ShadowRuns:
    """What the shadows of all runs found."""

    harmed: Flags
    expected: Floats
    """Of the reward: run, task."""


def shadows(
    chance: np.random.Generator, plan: RolloutPlan, pairs: Sequence[VersionPair], runs: int, told: Callable[[], None]
) -> ShadowRuns:
    """`runs` of each pair, with `plan.shadow_units` prompts; the statistics are the registry's own."""
    harmed: list[bool] = []
    expected: list[list[float]] = []
    for pair in pairs:
        likely = [pair.by_task(pair.candidate), pair.by_task(pair.champion)]
        for _ in range(runs):
            evidence = Evidence(plan)
            task = chance.integers(TASKS, size=plan.shadow_units)
            candidate, champion, logged = (_answers(chance, one[task]) for one in (likely[0], likely[1], likely[1]))
            seen = []
            for number, one in enumerate(task):
                both = [_values(found, number) for found in (candidate, champion, logged)]
                evidence.take_shadow(both[0], both[1])
                seen += [((f"task:{one}",), values) for values in both]
            harmed.append(bool(evidence.findings(numbers=False).harmed))
            table = expectations(seen)
            expected.append([table.of((f"task:{one}",))["reward"] for one in range(TASKS)])
            told()
    return ShadowRuns(np.array(harmed), np.array(expected))


def _answers(chance: np.random.Generator, likely: Floats) -> dict[str, Floats]:
    """As `_rollout_worlds` has it, without users: a function's verdict and a judge's grade."""
    found = sessions_of(chance, replace(World(), missing=0.0, thumbs=0.0, maturity_s=1e9, closing_s=2e9), likely < 0, likely)
    return {name: found.values[name, "maturity"] for name in ("reward", "missing", "tool_errors", "loops")}


def _values(found: dict[str, Floats], number: int) -> dict[str, float]:
    return {name: float(values[number]) for name, values in found.items() if not np.isnan(values[number])}


def canaries(
    chance: np.random.Generator,
    plan: RolloutPlan,
    pairs: Sequence[VersionPair],
    runs: int,
    horizon: int,
    shadow: ShadowRuns | None,
    told: Callable[[], None],
    *,
    kinds: bool = True,
) -> Canaries:
    """`runs` of each pair, over `horizon` sessions of both arms. `kinds`: prompts tell which task they are."""
    world = World()
    count = len(pairs) * runs
    likely = np.repeat([[pair.by_task(pair.champion), pair.by_task(pair.candidate)] for pair in pairs], runs, axis=0)
    row = np.arange(count)

    def source(number: int) -> Sessions:
        task = chance.integers(TASKS, size=count)
        arm = chance.random(count) < 0.5
        hour = np.sin(2 * np.pi * (row * (DAY_S / count) + number * world.every_s) / DAY_S)
        here = np.clip(likely[row, arm.astype(np.int64), task] + world.swing * hour, 0.0, 1.0)
        made = sessions_of(chance, world, arm, here)
        if shadow is not None and kinds:
            made.expected["reward"] = shadow.expected[row, task]
        return made

    found = play(chance, plan, world, horizon, count, told, source)
    harmed = shadow.harmed if shadow is not None else np.zeros(count, bool)
    return _ended(found, plan, world, harmed, horizon)


def _ended(found: Crossings, plan: RolloutPlan, world: World, in_shadow: Flags, horizon: int) -> Canaries:
    harmed_s, safe_s, uneven_s = (
        found.harmed_at_s(plan, world),
        found.safe_at_s(plan, world),
        found.uneven_at_s(plan, world),
    )
    first = np.minimum(np.minimum(harmed_s, safe_s), uneven_s)
    used = np.where(in_shadow, 0.0, np.minimum(found.exposed(first, world), horizon / 2))
    live = ~in_shadow & np.isfinite(first)
    return Canaries(
        rolled_back=in_shadow | (live & (harmed_s <= first)),
        promoted=live & (safe_s < np.minimum(harmed_s, uneven_s)),
        held=~in_shadow & ~(live & ((harmed_s <= first) | (safe_s < np.minimum(harmed_s, uneven_s)))),
        sessions=used,
        in_shadow=in_shadow,
    )


