"""Simulated live sessions of many rollouts at once: the readings of candidate and control, and their times.

The success probability of a session varies over the day. A reward function reports success after about a minute, a
judge gives a grade in quarters after two, and one user in four gives a thumb after about ten. The reward is the mean of
the values available at a reading, as the scorer computes it. Half a percent of the functions' values is revised between
the readings, and one session in twenty gets no reward. Delays are independent of success. With `binary`, only the
function's value exists, which is the noisiest reward with that mean.

`draw_canary` plots one canary as an operator sees it: the confidence sequence of its reward, from the registry's own
evidence.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace_operations import charts
from headrace_registry.rollouts.evidence import Evidence
from headrace_registry.rollouts.plan import RolloutPlan, Unit, UnitReading

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
LOOKS = ("maturity", "closing")
DAY_S = 86_400.0
_FUNCTION_S, _JUDGE_S, _THUMB_S = 60.0, 120.0, 600.0
_SPREAD = 1.0
"""Standard deviation of the delays' logarithms."""


@dataclass(frozen=True)
class World:
    """True parameters. `worse` and similar fields are the candidate's difference from the control."""

    success: float = 0.7
    worse: float = 0.0
    swing: float = 0.1
    """Amplitude of the success probability over a day."""
    binary: bool = False
    missing: float = 0.05
    missing_more: float = 0.0
    tool_errors: float = 0.08
    tool_errors_more: float = 0.0
    revised: float = 0.005
    thumbs: float = 0.25
    """Share of the users that give a thumb."""
    lost: float = 0.0
    """Share of the candidate's sessions that leave no trace."""
    every_s: float = 30.0
    """Seconds between two sessions of the comparison, half of which are the candidate's."""
    maturity_s: float = 600.0
    closing_s: float = 7200.0


@dataclass
class Sessions:
    """One session of each rollout: the arms, and the value of each metric at each look, NaN without a value."""

    candidate: Flags
    values: dict[tuple[str, str], Floats]
    expected: dict[str, Floats] = field(default_factory=dict)
    """Expected value by metric, which does not depend on the arm."""


def draw_sessions(chance: np.random.Generator, world: World, number: int, runs: int) -> Sessions:
    """Draw the `number`-th session of each rollout, from 0. Rollouts begin at evenly spaced hours of the day."""
    began_s = np.arange(runs) * (DAY_S / runs)
    hour = np.sin(2 * np.pi * (began_s + number * world.every_s) / DAY_S)
    candidate = chance.random(runs) * (2 - world.lost) < 1 - world.lost
    likely = np.clip(world.success + world.swing * hour - world.worse * candidate, 0.0, 1.0)
    return sessions_of(chance, world, candidate, likely)


def sessions_of(chance: np.random.Generator, world: World, candidate: Flags, likely: Floats) -> Sessions:
    """Draw one session of each rollout with the given success probability."""
    runs = len(candidate)
    absent = chance.random(runs) < world.missing + world.missing_more * candidate
    values: dict[tuple[str, str], Floats] = {}
    total = {look: np.zeros(runs) for look in LOOKS}
    count = {look: np.zeros(runs) for look in LOOKS}
    for delay_s, verdict in _verdicts(chance, world, likely):
        for look, age_s in zip(LOOKS, (world.maturity_s, world.closing_s), strict=True):
            has_arrived = (delay_s <= age_s) & ~absent
            value = verdict if look == "maturity" else _revised(chance, verdict, world.revised)
            total[look] += has_arrived * value
            count[look] += has_arrived
    wrong = (chance.random(runs) < world.tool_errors + world.tool_errors_more * candidate).astype(np.float64)
    wrong[chance.random(runs) < 0.4] = np.nan  # no tool was called
    looped = (chance.random(runs) < 0.02).astype(np.float64)
    for look in LOOKS:
        values["reward", look] = np.where(count[look] > 0, total[look] / np.maximum(count[look], 1), np.nan)
        values["missing", look] = (count[look] == 0).astype(np.float64)
        values["tool_errors", look] = wrong
        values["loops", look] = looped
    return Sessions(candidate, values)


def _verdicts(chance: np.random.Generator, world: World, likely: Floats) -> list[tuple[Floats, Floats]]:
    """Return delay and value of each source, with mean `likely`. A source without a value has an infinite delay."""
    runs = len(likely)
    good = (chance.random(runs) < likely).astype(np.float64)

    def late(median_s: float) -> Floats:
        delays_s: Floats = median_s * np.exp(_SPREAD * chance.standard_normal(runs))
        return delays_s

    if world.binary:
        return [(late(_FUNCTION_S), good)]
    grade = (good + chance.binomial(3, likely)) / 4
    thumb_s = np.where(chance.random(runs) < world.thumbs, late(_THUMB_S), np.inf)
    return [(late(_FUNCTION_S), good), (late(_JUDGE_S), grade), (thumb_s, good)]


def _revised(chance: np.random.Generator, verdict: Floats, share: float) -> Floats:
    verdicts: Floats = np.where(chance.random(len(verdict)) < share, 1.0 - verdict, verdict)
    return verdicts


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
    plt = charts.pyplot()
    figure, axes = plt.subplots(figsize=(8, 4), dpi=150)
    at = [number for number, _ in points]
    lower, upper = ([100 * numbers[end] for _, numbers in points] for end in ("lower", "upper"))
    axes.fill_between(at, lower, upper, color=charts.LINE, alpha=0.15, label="95 % confidence sequence")
    axes.plot(at, [100 * numbers["difference"] for _, numbers in points], color=charts.LINE, label="seen so far")
    axes.axhline(0, color=charts.INK, linewidth=0.8)
    axes.axhline(-100 * WORLD.worse, color=charts.FAINT, linestyle="--", label="truth")
    if harmed:
        axes.axvline(harmed, color=charts.WRONG, label=f"rolled back, after {harmed} mature sessions")
    margin = next(guardrail.margin for guardrail in plan.guardrails if guardrail.metric == "reward")
    axes.set(ylim=(-6 * 100 * margin, 4 * 100 * margin), xlabel="mature sessions, both arms",
             ylabel="reward, candidate less control (points)")  # fmt: skip
    axes.legend(frameon=False, loc="upper right")
    charts.save(figure, path)
    return path
