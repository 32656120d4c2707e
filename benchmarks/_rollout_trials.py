"""`headrace_registry.rollouts.evidence` for thousands of rollouts at once, in numpy: written again, so that the two
check each other. Every test goes on to the horizon, whatever was decided: so looking is continuous, and "ever" is ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from benchmarks._rollout_worlds import LOOKS, Floats, Sessions, World, draw_sessions
from headrace_registry import spending
from headrace_registry.rollouts.hedge import PARTS
from headrace_registry.rollouts.plan import Look, RolloutPlan

Indices = NDArray[np.int64]
NEVER = 2**40
STRENGTH = 100.0
_NAIVE_MIN = 30
_WINDOW, _BAD_WINDOWS = 20, 5


@dataclass
class Crossings:
    """The session, from 0, at which each test was first convinced; `NEVER`: it was not. By rollout."""

    harm: dict[tuple[str, str], Indices]
    safe: dict[str, Indices]
    even: Indices
    """When the arms were shown to be of one size."""
    ratio: Indices
    uncovered: Indices
    """When the reward's confidence sequence first left out the true difference."""
    naive_z: Indices
    """A one-sided z-test at 5 % after each session, from 30 sessions an arm on."""
    naive_windows: Indices
    """Five windows of 20 sessions an arm in a row in which the candidate was worse."""
    candidates: NDArray[np.int32]
    """How many of the sessions so far were the candidate's: sessions by rollouts."""
    said: NDArray[np.int32]
    """How many sessions of the arm that said less had a reward when they were mature."""
    entries: Indices
    """When a stage's share was no risk any more: stages by rollouts."""

    def harmed_at_s(self, plan: RolloutPlan, world: World) -> Floats:
        """Seconds from the rollout's begin to its rollback, infinite without."""
        times = [_at_s(found, plan.age_s(_look(look)), world) for (_, look), found in self.harm.items()]
        return np.asarray(np.min(times, axis=0), np.float64)

    def safe_at_s(self, plan: RolloutPlan, world: World) -> Floats:
        """When the last guardrail was shown to be safe, and the arms to be even."""
        worst = np.max(list(self.safe.values()), axis=0)
        return np.maximum(_at_s(worst, plan.age_s(plan.last_look), world), self.even_at_s(plan, world))

    def even_at_s(self, plan: RolloutPlan, world: World) -> Floats:
        return _at_s(self.even, plan.age_s("maturity"), world)

    def uneven_at_s(self, plan: RolloutPlan, world: World) -> Floats:
        """When the sample ratio was found broken."""
        return _at_s(self.ratio, plan.age_s("maturity"), world)

    def exposed(self, at_s: Floats, world: World) -> Floats:
        """Sessions of the candidate that had begun by then, infinite for never."""
        horizon, runs = self.candidates.shape
        found = np.full(runs, np.inf)
        done = np.isfinite(at_s)
        begun = (at_s[done] / world.every_s).astype(np.int64) + 1
        inside = np.minimum(begun, horizon)
        found[done] = self.candidates[inside - 1, np.flatnonzero(done)] + (begun - inside) / 2
        return found


def play(
    chance: np.random.Generator,
    plan: RolloutPlan,
    world: World,
    sessions: int,
    runs: int,
    told: Callable[[], None] = lambda: None,
    source: Callable[[int], Sessions] | None = None,
) -> Crossings:
    """So many sessions, both arms together, of each of so many rollouts. `told` is called after each."""
    playing = _Playing(plan, world, sessions, runs)
    for number in range(sessions):
        playing.take(number, source(number) if source else draw_sessions(chance, world, number, runs))
        told()
    return playing.found


_READ_ONCE = ("tool_errors", "loops")
"""What a session did, in `_rollout_worlds`, is the same at both looks."""


class _Gamblers:
    """`EProcess` on several sequences of each run, with several gamblers on each: they share what was seen."""

    def __init__(self, rows: int, runs: int) -> None:
        self.count, self.total, self.squares = (np.zeros((rows, runs)) for _ in range(3))

    def stakes(self, rows: slice | list[int], sign: float, null: Floats, gap: Floats) -> Floats:
        """Before a value is seen. `null` and `gap`: one for each of the rows, or for each gambler and row."""
        weight = self.count[rows] + 1
        variance = (1 + self.squares[rows]) / weight
        lead = (sign * self.total[rows] + null + gap) / weight - null - np.sqrt(variance / weight)
        edge = np.maximum(gap, lead)
        best: Floats = np.minimum(edge / (variance + edge * edge), 0.5 / np.maximum(1 + null, 1e-12))
        return best

    def see(self, value: Floats, where: NDArray[np.bool_]) -> None:
        before = self.total / np.maximum(self.count, 1)
        self.count += where
        self.total += where * value
        self.squares += where * ((value - before) * (value - self.total / np.maximum(self.count, 1)))


class _Playing:
    def __init__(self, plan: RolloutPlan, world: World, sessions: int, runs: int) -> None:
        self.plan = plan
        looks: dict[str, tuple[str, ...]] = {
            one.metric: ("maturity",)
            if one.metric in _READ_ONCE
            else tuple(look for look in LOOKS if look in plan.looks)
            for one in plan.guardrails
        }
        self.rows = [(one, look) for one in plan.guardrails for look in looks[one.metric]]
        names = [(one.metric, look) for one, look in self.rows]
        self.reward = names.index(("reward", "maturity"))
        self.better = np.array([[one.measured.higher_is_better] for one, _ in self.rows])
        self.centre, self.seen = np.full((len(self.rows), runs), 0.5), np.ones((len(self.rows), runs))
        self.lines = {row: _Line(runs, self.better[row, 0]) for row in range(len(self.rows))}
        self.gamblers = _Gamblers(len(self.rows), runs)
        self.harm_null = np.array([[one.tolerated / 2] for one, _ in self.rows])
        self.harm_gap = np.array([[[times * one.margin / 2] for one, _ in self.rows] for times, _ in PARTS])
        self.harm_log = np.log(np.array([[[part]] for _, part in PARTS])) * np.ones((1, len(self.rows), runs))
        self.safe_rows = [names.index((one.metric, looks[one.metric][-1])) for one in plan.guardrails]
        self.safe_gap = np.array([[one.margin / 2] for one in plan.guardrails])
        self.safe_log = np.zeros((len(plan.guardrails), runs))
        self.safe_needed = -math.log(spending.promotion(plan.alpha, 1))
        self.tests = [(one.metric, look) for one in plan.guardrails for look in LOOKS if look in plan.looks]
        self.test_rows = [names.index(name if name in names else (name[0], "maturity")) for name in self.tests]
        errors = [plan.harm_error(one, _look(look)) for one in plan.guardrails for look in LOOKS if look in plan.looks]
        self.harm_needed = -np.log(np.array(errors))[:, None]
        self.harm, self.safe = (np.full((number, runs), NEVER) for number in (len(self.tests), len(plan.guardrails)))
        self.first_rows = [names.index((one.metric, "maturity")) for one in plan.guardrails]
        self.entry_gap, self.entry_stages = _entry_gaps(plan)
        self.entry_log = np.zeros((len(self.entry_stages), len(plan.guardrails), runs))
        self.entry = np.full(self.entry_log.shape, NEVER)
        self.entry_needed = -math.log(plan.alpha)
        self.said = np.zeros((2, runs), np.int32)
        self.arms, self.ratio_log = np.zeros((2, runs)), np.zeros(runs)
        self.sizes, self.even_log, self.uneven = _Gamblers(1, runs), np.zeros((2, runs)), np.full((1, 1), plan.uneven)
        self.even_best = np.full((2, runs), -np.inf)
        self.chart = _Chart(plan.alpha, 0.5 - world.worse / 4, runs)
        self.naive = _Naive(runs)
        self.found = Crossings(
            {name: self.harm[row] for row, name in enumerate(self.tests)},
            {one.metric: self.safe[row] for row, one in enumerate(plan.guardrails)},
            candidates=np.zeros((sessions, runs), np.int32),
            said=np.zeros((sessions, runs), np.int32),
            entries=np.zeros((len(plan.stages), runs), np.int64),
            even=np.full(runs, NEVER),
            ratio=np.full(runs, NEVER),
            uncovered=np.full(runs, NEVER),
            naive_z=np.full(runs, NEVER),
            naive_windows=np.full(runs, NEVER),
        )

    def take(self, number: int, session: Sessions) -> None:
        candidate, found = session.candidate, self.found
        values = np.array([session.values[one.metric, look] for one, look in self.rows])
        known = ~np.isnan(values)
        goodness = np.where(known, np.where(self.better, values, 1.0 - values), 0.5)
        centre = self.centre / self.seen
        for row, (one, _) in enumerate(self.rows):
            if one.metric in session.expected:
                centre[row] = self.lines[row].take(session.expected[one.metric], goodness[row], known[row])
        contrast = np.where(candidate, 1.0, -1.0) * (goodness - centre)
        self.centre += known * goodness
        self.seen += known
        self._bet(np.where(known, contrast, np.nan))
        self.gamblers.see(contrast, known)
        wealth = np.logaddexp(*self.harm_log)[self.test_rows]
        _first(self.harm, wealth >= self.harm_needed, number)
        _first(self.safe, self.safe_log >= self.safe_needed, number)
        _first(found.ratio, self._ratio(candidate) >= -math.log(self.plan.sample_ratio_error), number)
        _first(found.even, np.min(self._even(candidate), axis=0) >= self.safe_needed, number)
        found.candidates[number] = self.arms[0]
        seen = known[self.reward]
        self.said += np.array([candidate & seen, ~candidate & seen])
        found.said[number] = self.said.min(axis=0)
        _first(self.entry, self.entry_log >= self.entry_needed, number)
        found.entries[self.entry_stages] = self.entry.max(axis=1)
        _first(found.uncovered, self.chart.see((contrast[self.reward] + 1) / 2, seen), number)
        bad_z, bad_windows = self.naive.see(goodness[self.reward], candidate, seen)
        _first(found.naive_z, bad_z, number)
        _first(found.naive_windows, bad_windows, number)

    def _bet(self, contrast: Floats) -> None:
        """A contrast of NaN is not bet on."""
        harm = self.gamblers.stakes(slice(None), -1.0, self.harm_null, self.harm_gap)
        self.harm_log += np.nan_to_num(np.log1p(harm * (-contrast - self.harm_null)))
        safe = self.gamblers.stakes(self.safe_rows, 1.0, -self.safe_gap, self.safe_gap)
        self.safe_log += np.nan_to_num(np.log1p(safe * (contrast[self.safe_rows] + self.safe_gap)))

        if self.entry_stages:
            entry = self.gamblers.stakes(self.first_rows, 1.0, -self.entry_gap, self.entry_gap)
            self.entry_log += np.nan_to_num(np.log1p(entry * (contrast[self.first_rows] + self.entry_gap)))

    def _even(self, candidate: NDArray[np.bool_]) -> Floats:
        """Each gambler's best so far: once convinced is convinced."""
        arm = np.where(candidate, 1.0, -1.0)[None, :]
        for row, sign in enumerate((1.0, -1.0)):
            stake = self.sizes.stakes(slice(None), sign, -self.uneven, self.uneven)
            self.even_log[row] += np.log1p(stake * (sign * arm + self.uneven))[0]
        self.sizes.see(arm, np.ones_like(arm, bool))
        self.even_best = np.maximum(self.even_best, self.even_log)
        return self.even_best

    def _ratio(self, candidate: NDArray[np.bool_]) -> Floats:
        mine = np.where(candidate, self.arms[0], self.arms[1])
        self.ratio_log += np.log((STRENGTH / 2 + mine) / (STRENGTH + self.arms.sum(axis=0)) / 0.5)
        self.arms += np.array([candidate, ~candidate])
        return self.ratio_log


class _Line:
    """`regression.Regression`, written as sums: what is foretold of each session, before it is seen."""

    def __init__(self, runs: int, better: np.bool_) -> None:
        self.better = bool(better)
        self.n, self.x, self.y, self.xx, self.xy = (np.zeros(runs) for _ in range(5))

    def take(self, expected: Floats, value: Floats, where: NDArray[np.bool_]) -> Floats:
        expected = expected if self.better else 1.0 - expected
        count = np.maximum(self.n, 1)
        slope = (self.xy - self.x * self.y / count + 1) / (self.xx - self.x**2 / count + 1)
        found = np.clip((self.y + 0.5) / (self.n + 1) + slope * (expected - (self.x + 0.5) / (self.n + 1)), 0, 1)
        self.n += where
        self.x += where * expected
        self.y += where * value
        self.xx += where * expected**2
        self.xy += where * expected * value
        return np.asarray(found, np.float64)


class _Chart:
    """`confidence.ConfidenceSequence`, at the true mean alone: does the interval hold it?"""

    def __init__(self, alpha: float, true: float, runs: int) -> None:
        self.alpha, self.true = alpha, true
        self.total, self.squares, self.count = np.full(runs, 0.5), np.full(runs, 0.25), np.zeros(runs)
        self.up, self.down = np.zeros(runs), np.zeros(runs)

    def see(self, value: Floats, where: NDArray[np.bool_]) -> NDArray[np.bool_]:
        time = self.count + 1
        bet = np.sqrt(2 * math.log(2 / self.alpha) / (self.squares / time * time * np.log1p(time)))
        off = value - self.true
        self.up += where * np.log1p(np.minimum(bet, 0.5 / self.true) * off)
        self.down += where * np.log1p(-np.minimum(bet, 0.5 / (1 - self.true)) * off)
        self.count += where
        self.total += where * value
        self.squares += where * (value - self.total / (time + 1)) ** 2
        missed: NDArray[np.bool_] = np.maximum(self.up, self.down) >= math.log(2 / self.alpha)
        return missed


class _Naive:
    """What people do without such tests."""

    def __init__(self, runs: int) -> None:
        self.sums, self.squares, self.counts = np.zeros((2, runs)), np.zeros((2, runs)), np.zeros((2, runs))
        self.window_sums, self.window_counts = np.zeros((2, runs)), np.zeros((2, runs))
        self.in_a_row = np.zeros(runs)

    def see(
        self, value: Floats, candidate: NDArray[np.bool_], known: NDArray[np.bool_]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        arms = np.array([candidate, ~candidate]) & known
        for total, count in ((self.sums, self.counts), (self.window_sums, self.window_counts)):
            total += arms * value
            count += arms
        self.squares += arms * value**2
        counts = np.maximum(self.counts, 1)
        mean = self.sums / counts
        spread = np.sqrt(np.maximum((self.squares / counts - mean**2) / counts, 1e-12).sum(axis=0))
        z_says = (mean[0] - mean[1] < -1.645 * spread) & (self.counts.min(axis=0) >= _NAIVE_MIN)
        over = self.window_counts.min(axis=0) >= _WINDOW
        window = self.window_sums / np.maximum(self.window_counts, 1)
        self.in_a_row = np.where(over, np.where(window[0] < window[1], self.in_a_row + 1, 0), self.in_a_row)
        self.window_sums *= ~over
        self.window_counts *= ~over
        return z_says, self.in_a_row >= _BAD_WINDOWS


def _entry_gaps(plan: RolloutPlan) -> tuple[Floats, list[int]]:
    """Of each stage that needs it: what has to be ruled out of each guardrail, halved; and the stages."""
    most = Fraction(1, plan.slots + 1)
    parts = {place: plan.to_rule_out(min(stage.share, most)) for place, stage in enumerate(plan.stages) if place}
    needed = {place: float(part) for place, part in parts.items() if part is not None}
    gaps = np.array([[[part / 2] for _ in plan.guardrails] for part in needed.values()])
    return gaps.reshape(len(needed), len(plan.guardrails), 1), list(needed)


def _first(found: Indices, now: NDArray[np.bool_], number: int) -> None:
    found[now & (found == NEVER)] = number


def _at_s(found: Indices, age_s: float, world: World) -> Floats:
    return np.asarray(np.where(found < NEVER, found * world.every_s + age_s, np.inf), np.float64)


def _look(name: str) -> Look:
    return "maturity" if name == "maturity" else "closing"
