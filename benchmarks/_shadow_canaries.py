"""Canaries of version pairs with a known truth, with and without a shadow first: the number of users' sessions that
they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks._rollout_trials import Crossings, play
from benchmarks._rollout_worlds import DAY_S, LOOKS, Flags, Floats, Sessions, World, sessions_of
from benchmarks._shadow_worlds import TASKS, Integers, VersionPair
from headrace_registry.rollouts.evidence import Evidence
from headrace_registry.rollouts.findings import expectations
from headrace_registry.rollouts.plan import RolloutPlan

_TOOLS = ("wrong", "called")


@dataclass(frozen=True)
class Canaries:
    """Results of canaries, one entry for each run."""

    rolled_back: Flags
    promoted: Flags
    undecided: Flags
    sessions: Floats
    """Sessions of the candidate until the end of its rollout, or the horizon's if it did not end."""
    in_shadow: Flags
    """Whether the candidate was rolled back before any user met it."""


@dataclass(frozen=True)
class ShadowRuns:
    """Results of the shadows of all runs."""

    harmed: Flags
    expected: dict[str, Floats]
    """Expected values by metric: run, task."""


def shadows(
    chance: np.random.Generator, plan: RolloutPlan, pairs: Sequence[VersionPair], runs: int, on_step: Callable[[], None]
) -> ShadowRuns:
    """Run `runs` shadows of each pair, with `plan.shadow_units` prompts and the registry's own statistics."""
    harmed: list[bool] = []
    expected: dict[str, list[list[float]]] = {name: [] for name in ("reward", "tool_errors")}
    for pair in pairs:
        likely = [pair.by_task(pair.candidate), pair.by_task(pair.champion)]
        for _ in range(runs):
            evidence = Evidence(plan)
            task = chance.integers(TASKS, size=plan.shadow_units)
            sides = (likely[0], likely[1], likely[1])
            candidate, champion, logged = (_answers(chance, pair, task, side[task]) for side in sides)
            seen = []
            for number, task_number in enumerate(task):
                both = [_values(metrics, number) for metrics in (candidate, champion, logged)]
                evidence.add_shadow_pair(both[0], both[1])
                seen += [((f"task:{task_number}",), values) for values in both]
            harmed.append(bool(evidence.findings(numbers=False).harmed))
            table = expectations(seen)
            of_tasks = [table.of((f"task:{task_number}",)) for task_number in range(TASKS)]
            for name, column in expected.items():
                column.append([values[name] for values in of_tasks])
            on_step()
    return ShadowRuns(np.array(harmed), {name: np.array(column) for name, column in expected.items()})


def _answers(chance: np.random.Generator, pair: VersionPair, task: Integers, likely: Floats) -> dict[str, Floats]:
    """Return sessions as `_rollout_worlds` draws them, without users: a function's verdict and a judge's grade."""
    world = replace(World(), missing=0.0, thumbs=0.0, maturity_s=1e9, closing_s=2e9)
    sessions = sessions_of(chance, world, likely < 0, likely)
    _use_tools(chance, sessions, pair.tools.wrong[task], pair.tools.called[task])
    return {name: sessions.values[name, "maturity"] for name in ("reward", "missing", "tool_errors", "loops")}


def _use_tools(chance: np.random.Generator, sessions: Sessions, wrong: Floats, called: Floats) -> None:
    """Draw tool errors. The need for tools and their error rate depend on the task."""
    failed = (chance.random(len(wrong)) < wrong).astype(np.float64)
    failed[chance.random(len(wrong)) >= called] = np.nan
    for look in LOOKS:
        sessions.values["tool_errors", look] = failed


def _values(metrics: dict[str, Floats], number: int) -> dict[str, float]:
    return {name: float(values[number]) for name, values in metrics.items() if not np.isnan(values[number])}


def canaries(
    chance: np.random.Generator,
    plan: RolloutPlan,
    pairs: Sequence[VersionPair],
    runs: int,
    horizon: int,
    shadow: ShadowRuns | None,
    on_session: Callable[[], None],
    *,
    kinds: bool = True,
) -> Canaries:
    """Run `runs` canaries of each pair, over `horizon` sessions of both arms. With `kinds`, prompts identify their
    task."""
    world = World()
    count = len(pairs) * runs
    likely = np.repeat([[pair.by_task(pair.champion), pair.by_task(pair.candidate)] for pair in pairs], runs, axis=0)
    wrong, called = (np.repeat([getattr(pair.tools, name) for pair in pairs], runs, axis=0) for name in _TOOLS)
    row = np.arange(count)

    def source(number: int) -> Sessions:
        task = chance.integers(TASKS, size=count)
        arm = chance.random(count) < 0.5
        hour = np.sin(2 * np.pi * (row * (DAY_S / count) + number * world.every_s) / DAY_S)
        success_probability = np.clip(likely[row, arm.astype(np.int64), task] + world.swing * hour, 0.0, 1.0)
        sessions = sessions_of(chance, world, arm, success_probability)
        _use_tools(chance, sessions, wrong[row, task], called[row, task])
        if shadow is not None and kinds:
            sessions.expected |= {name: values[row, task] for name, values in shadow.expected.items()}
        return sessions

    crossings = play(chance, plan, world, horizon, count, on_session, source)
    harmed = shadow.harmed if shadow is not None else np.zeros(count, bool)
    return _results(crossings, plan, world, harmed, horizon)


def _results(crossings: Crossings, plan: RolloutPlan, world: World, in_shadow: Flags, horizon: int) -> Canaries:
    harmed_s, safe_s, uneven_s = (
        crossings.harmed_at_s(plan, world),
        crossings.safe_at_s(plan, world),
        crossings.uneven_at_s(plan, world),
    )
    first = np.minimum(np.minimum(harmed_s, safe_s), uneven_s)
    used = np.where(in_shadow, 0.0, np.minimum(crossings.exposed(first, world), horizon / 2))
    live = ~in_shadow & np.isfinite(first)
    return Canaries(
        rolled_back=in_shadow | (live & (harmed_s <= first)),
        promoted=live & (safe_s < np.minimum(harmed_s, uneven_s)),
        undecided=~in_shadow & ~(live & ((harmed_s <= first) | (safe_s < np.minimum(harmed_s, uneven_s)))),
        sessions=used,
        in_shadow=in_shadow,
    )
