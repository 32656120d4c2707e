"""Plot of one canary as an operator sees it: the confidence sequence of its reward, from the registry's own
evidence."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

from benchmarks._rollout_worlds import Sessions, World, draw_sessions
from headrace_operations import drawing
from headrace_registry.rollouts.evidence import Evidence
from headrace_registry.rollouts.maturity import Unit, UnitReading
from headrace_registry.rollouts.plan import RolloutPlan

WORLD = replace(World(), worse=0.1)
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
_SESSIONS = 2000
_EVERY = 20


def readings(sessions: Sessions, number: int, look: str, every_s: float) -> list[UnitReading]:
    """Return the registry's readings of the `number`-th session of each rollout."""
    at = BEGAN + timedelta(seconds=number * every_s)
    result = []
    for run, candidate in enumerate(sessions.candidate):
        values_at_look = {
            metric: float(values[run]) for (metric, when), values in sessions.values.items() if when == look
        }
        available = {metric: value for metric, value in values_at_look.items() if not np.isnan(value)}
        expected = {metric: float(values[run]) for metric, values in sessions.expected.items()}
        result.append(UnitReading(Unit(f"{number:06}", bool(candidate), at), available, expected))
    return result


def draw_canary(plan: RolloutPlan, seed: int, path: Path) -> Path:
    """Draw a canary that is 10 points worse, until shortly after its rollback."""
    chance = np.random.default_rng([seed, 1_003])
    evidence, points, harmed, after = Evidence(plan), [], 0, 0
    for number in range(_SESSIONS):
        reading = readings(draw_sessions(chance, WORLD, number, 1), number, "maturity", WORLD.every_s)[0]
        evidence.add_reading("maturity", reading)
        if number % _EVERY == 0 and evidence.monitor("reward", "maturity").contrasts.count:
            watch = evidence.monitor("reward", "maturity")
            points.append((number + 1, watch.numbers()))
        if not harmed and evidence.findings(numbers=False).harmed:
            harmed = number + 1
        after += bool(harmed)
        if after > harmed:
            break
    return _draw(points, harmed, plan, path)


def _draw(points: list[tuple[int, dict[str, float]]], harmed: int, plan: RolloutPlan, path: Path) -> Path:
    plt = drawing.pyplot()
    figure, axes = plt.subplots(figsize=(8, 4), dpi=150)
    at = [number for number, _ in points]
    lower, upper = ([100 * numbers[end] for _, numbers in points] for end in ("lower", "upper"))
    axes.fill_between(at, lower, upper, color=drawing.LINE, alpha=0.15, label="95 % confidence sequence")
    axes.plot(at, [100 * numbers["difference"] for _, numbers in points], color=drawing.LINE, label="seen so far")
    axes.axhline(0, color=drawing.INK, linewidth=0.8)
    axes.axhline(-100 * WORLD.worse, color=drawing.FAINT, linestyle="--", label="truth")
    if harmed:
        axes.axvline(harmed, color=drawing.WRONG, label=f"rolled back, after {harmed} mature sessions")
    margin = next(guardrail.margin for guardrail in plan.guardrails if guardrail.metric == "reward")
    axes.set(ylim=(-6 * 100 * margin, 4 * 100 * margin), xlabel="mature sessions, both arms",
             ylabel="reward, candidate less control (points)")  # fmt: skip
    axes.legend(frameon=False, loc="upper right")
    drawing.save(figure, path)
    return path
