"""Canaries of pairs whose truth is known, with a shadow before them and without: how many users' sessions each
takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks._rollout_trials import Crossings, play
from benchmarks._rollout_worlds import DAY_S, LOOKS, Flags, Floats, Sessions, World, sessions_of
from benchmarks._shadow_worlds import TASKS, Integers, VersionPair
from headrace_registry.rollouts.evidence import Evidence
from headrace_registry.rollouts.plan import RolloutPlan
from headrace_registry.shadow.expectations import expectations

_TOOLS = ("wrong", "called")


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
    expected: dict[str, Floats]
    """By metric: run, task."""


def shadows(
    chance: np.random.Generator, plan: RolloutPlan, pairs: Sequence[VersionPair], runs: int, told: Callable[[], None]
) -> ShadowRuns:
    """`runs` of each pair, with `plan.shadow_units` prompts; the statistics are the registry's own."""
    harmed: list[bool] = []
    expected: dict[str, list[list[float]]] = {name: [] for name in ("reward", "tool_errors")}
    for pair in pairs:
        likely = [pair.by_task(pair.candidate), pair.by_task(pair.champion)]
        for _ in range(runs):
            evidence = Evidence(plan)
            task = chance.integers(TASKS, size=plan.shadow_units)
            sides = (likely[0], likely[1], likely[1])
            candidate, champion, logged = (_answers(chance, pair, task, one[task]) for one in sides)
            seen = []
            for number, one in enumerate(task):
                both = [_values(found, number) for found in (candidate, champion, logged)]
                evidence.take_shadow(both[0], both[1])
                seen += [((f"task:{one}",), values) for values in both]
            harmed.append(bool(evidence.findings(numbers=False).harmed))
            table = expectations(seen)
            of_tasks = [table.of((f"task:{one}",)) for one in range(TASKS)]
            for name, column in expected.items():
                column.append([one[name] for one in of_tasks])
            told()
    return ShadowRuns(np.array(harmed), {name: np.array(column) for name, column in expected.items()})


def _answers(chance: np.random.Generator, pair: VersionPair, task: Integers, likely: Floats) -> dict[str, Floats]:
    """As `_rollout_worlds` has it, without users: a function's verdict and a judge's grade."""
    world = replace(World(), missing=0.0, thumbs=0.0, maturity_s=1e9, closing_s=2e9)
    found = sessions_of(chance, world, likely < 0, likely)
    _use_tools(chance, found, pair.tools.wrong[task], pair.tools.called[task])
    return {name: found.values[name, "maturity"] for name in ("reward", "missing", "tool_errors", "loops")}


def _use_tools(chance: np.random.Generator, made: Sessions, wrong: Floats, called: Floats) -> None:
    """Which tools a task needs, and how often they fail, is the task's own."""
    failed = (chance.random(len(wrong)) < wrong).astype(np.float64)
    failed[chance.random(len(wrong)) >= called] = np.nan
    for look in LOOKS:
        made.values["tool_errors", look] = failed


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
    wrong, called = (np.repeat([getattr(pair.tools, name) for pair in pairs], runs, axis=0) for name in _TOOLS)
    row = np.arange(count)

    def source(number: int) -> Sessions:
        task = chance.integers(TASKS, size=count)
        arm = chance.random(count) < 0.5
        hour = np.sin(2 * np.pi * (row * (DAY_S / count) + number * world.every_s) / DAY_S)
        here = np.clip(likely[row, arm.astype(np.int64), task] + world.swing * hour, 0.0, 1.0)
        made = sessions_of(chance, world, arm, here)
        _use_tools(chance, made, wrong[row, task], called[row, task])
        if shadow is not None and kinds:
            made.expected |= {name: found[row, task] for name, found in shadow.expected.items()}
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
