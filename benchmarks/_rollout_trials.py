"""Statistics of `headrace_registry.rollouts.evidence` for thousands of rollouts at once, in numpy.

The code is independent of the registry's, so that the two verify each other. Every test continues to the horizon,
whatever was decided, so that error rates hold for continuous monitoring.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from benchmarks._rollout_worlds import LOOKS, Floats, Sessions, World, draw_sessions
from headrace_registry.rollouts.plan import ReadingAge, RolloutPlan
from headrace_statistics import e_process
from headrace_statistics.e_process import PARTS

Indices = NDArray[np.int64]
NEVER = 2**40
STRENGTH = 100.0
_NAIVE_MIN = 30
_WINDOW, _BAD_WINDOWS = 20, 5


@dataclass
class Crossings:
    """First session, from 0, at which each test rejected, by rollout; `NEVER` if it did not."""

    harm: dict[tuple[str, str], Indices]
    safe: dict[str, Indices]
    even: Indices
    """First session at which the arms were shown to be of equal size."""
    ratio: Indices
    uncovered: Indices
    """First session at which the reward's confidence sequence excluded the true difference."""
    naive_z: Indices
    """First session at which a one-sided z-test at 5 %, repeated after each session from 30 per arm on, rejected."""
    naive_windows: Indices
    """First session at which the candidate had been worse in five consecutive windows of 20 sessions per arm."""
    candidates: NDArray[np.int32]
    """Number of the candidate's sessions so far: sessions by rollouts."""
    valued: NDArray[np.int32]
    """Number of mature sessions with a reward, of the arm with fewer of them."""
    entries: Indices
    """First session at which the next share of a stage was no longer a risk, by stage and rollout."""

    def harmed_at_s(self, plan: RolloutPlan, world: World) -> Floats:
        """Return the seconds from the beginning of the rollout to its rollback, or infinity."""
        times = [_at_s(sessions, plan.age_s(_look(look)), world) for (_, look), sessions in self.harm.items()]
        return np.asarray(np.min(times, axis=0), np.float64)

    def safe_at_s(self, plan: RolloutPlan, world: World) -> Floats:
        """Return the seconds until the last guardrail was shown to be safe and the arms to be of equal size."""
        worst = np.max(list(self.safe.values()), axis=0)
        return np.maximum(_at_s(worst, plan.age_s(plan.last_reading_age), world), self.even_at_s(plan, world))

    def even_at_s(self, plan: RolloutPlan, world: World) -> Floats:
        return _at_s(self.even, plan.age_s("maturity"), world)

    def uneven_at_s(self, plan: RolloutPlan, world: World) -> Floats:
        """Return the seconds until the sample ratio was found to differ from the plan's."""
        return _at_s(self.ratio, plan.age_s("maturity"), world)

    def exposed(self, at_s: Floats, world: World) -> Floats:
        """Return the number of the candidate's sessions that had begun at `at_s`, or infinity."""
        horizon, runs = self.candidates.shape
        counts = np.full(runs, np.inf)
        is_finite = np.isfinite(at_s)
        begun = (at_s[is_finite] / world.every_s).astype(np.int64) + 1
        inside = np.minimum(begun, horizon)
        counts[is_finite] = self.candidates[inside - 1, np.flatnonzero(is_finite)] + (begun - inside) / 2
        return counts


def play(
    chance: np.random.Generator,
    plan: RolloutPlan,
    world: World,
    sessions: int,
    runs: int,
    on_session: Callable[[], None] = lambda: None,
    source: Callable[[int], Sessions] | None = None,
) -> Crossings:
    """Play `sessions` sessions, of both arms together, of each of `runs` rollouts. `on_session` is called after each
    session."""
    playing = _Playing(plan, world, sessions, runs)
    for number in range(sessions):
        playing.take(number, source(number) if source else draw_sessions(chance, world, number, runs))
        on_session()
    return playing.crossings


_READ_ONCE = ("tool_errors", "loops")
"""Metrics that are equal at both looks, because they describe the session itself."""


class _Gamblers:
    """`EProcess` on several sequences of each run, with several bets on each sequence."""

    def __init__(self, rows: int, runs: int) -> None:
        self.count, self.total, self.squares = (np.zeros((rows, runs)) for _ in range(3))

    def stakes(self, rows: slice | list[int], sign: float, null: Floats, gap: Floats) -> Floats:
        """Return the stakes before a value is observed. `null` and `gap` have one entry for each row, or for each bet
        and row."""
        weight = self.count[rows] + 1
        variance = (1 + self.squares[rows]) / weight
        advantage = (sign * self.total[rows] + null + gap) / weight - null - np.sqrt(variance / weight)
        edge = np.maximum(gap, advantage)
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
            guardrail.metric: ("maturity",)
            if guardrail.metric in _READ_ONCE
            else tuple(look for look in LOOKS if look in plan.reading_ages)
            for guardrail in plan.guardrails
        }
        self.rows = [(guardrail, look) for guardrail in plan.guardrails for look in looks[guardrail.metric]]
        names = [(guardrail.metric, look) for guardrail, look in self.rows]
        self.reward = names.index(("reward", "maturity"))
        self.better = np.array([[guardrail.measured.higher_is_better] for guardrail, _ in self.rows])
        self.centre, self.seen = np.full((len(self.rows), runs), 0.5), np.ones((len(self.rows), runs))
        self.lines = {row: _Line(runs, self.better[row, 0]) for row in range(len(self.rows))}
        self.gamblers = _Gamblers(len(self.rows), runs)
        self.harm_null = np.array([[guardrail.tolerated / 2] for guardrail, _ in self.rows])
        self.harm_gap = np.array([[[times * guardrail.margin / 2] for guardrail, _ in self.rows] for times, _ in PARTS])
        self.harm_log = np.log(np.array([[[part]] for _, part in PARTS])) * np.ones((1, len(self.rows), runs))
        self.safe_rows = [names.index((guardrail.metric, looks[guardrail.metric][-1])) for guardrail in plan.guardrails]
        self.safe_gap = np.array([[guardrail.margin / 2] for guardrail in plan.guardrails])
        self.safe_log = np.zeros((len(plan.guardrails), runs))
        self.safe_needed = -math.log(e_process.promotion_error(plan.alpha, 1))
        self.tests = [
            (guardrail.metric, look) for guardrail in plan.guardrails for look in LOOKS if look in plan.reading_ages
        ]
        self.test_rows = [names.index(name if name in names else (name[0], "maturity")) for name in self.tests]
        errors = [
            plan.harm_error(guardrail, _look(look))
            for guardrail in plan.guardrails
            for look in LOOKS
            if look in plan.reading_ages
        ]
        self.harm_needed = -np.log(np.array(errors))[:, None]
        self.harm, self.safe = (np.full((number, runs), NEVER) for number in (len(self.tests), len(plan.guardrails)))
        self.first_rows = [names.index((guardrail.metric, "maturity")) for guardrail in plan.guardrails]
        self.entry_gap, self.entry_stages = _entry_gaps(plan)
        self.entry_log = np.zeros((len(self.entry_stages), len(plan.guardrails), runs))
        self.entry = np.full(self.entry_log.shape, NEVER)
        self.entry_needed = -math.log(plan.alpha)
        self.valued = np.zeros((2, runs), np.int32)
        self.arms, self.ratio_log = np.zeros((2, runs)), np.zeros(runs)
        self.sizes, self.even_log, self.uneven = _Gamblers(1, runs), np.zeros((2, runs)), np.full((1, 1), plan.uneven)
        self.even_best = np.full((2, runs), -np.inf)
        self.chart = _Chart(plan.alpha, 0.5 - world.worse / 4, runs)
        self.naive = _Naive(runs)
        self.crossings = Crossings(
            {name: self.harm[row] for row, name in enumerate(self.tests)},
            {guardrail.metric: self.safe[row] for row, guardrail in enumerate(plan.guardrails)},
            candidates=np.zeros((sessions, runs), np.int32),
            valued=np.zeros((sessions, runs), np.int32),
            entries=np.zeros((len(plan.stages), runs), np.int64),
            even=np.full(runs, NEVER),
            ratio=np.full(runs, NEVER),
            uncovered=np.full(runs, NEVER),
            naive_z=np.full(runs, NEVER),
            naive_windows=np.full(runs, NEVER),
        )

    def take(self, number: int, session: Sessions) -> None:
        candidate, crossings = session.candidate, self.crossings
        values = np.array([session.values[guardrail.metric, look] for guardrail, look in self.rows])
        has_value = ~np.isnan(values)
        goodness = np.where(has_value, np.where(self.better, values, 1.0 - values), 0.5)
        centre = self.centre / self.seen
        for row, (guardrail, _) in enumerate(self.rows):
            if guardrail.metric in session.expected:
                centre[row] = self.lines[row].take(session.expected[guardrail.metric], goodness[row], has_value[row])
        contrast = np.where(candidate, 1.0, -1.0) * (goodness - centre)
        self.centre += has_value * goodness
        self.seen += has_value
        self._bet(np.where(has_value, contrast, np.nan))
        self.gamblers.see(contrast, has_value)
        wealth = np.logaddexp(*self.harm_log)[self.test_rows]
        _first(self.harm, wealth >= self.harm_needed, number)
        _first(self.safe, self.safe_log >= self.safe_needed, number)
        _first(crossings.ratio, self._ratio(candidate) >= -math.log(self.plan.sample_ratio_error), number)
        _first(crossings.even, np.min(self._even(candidate), axis=0) >= self.safe_needed, number)
        crossings.candidates[number] = self.arms[0]
        seen = has_value[self.reward]
        self.valued += np.array([candidate & seen, ~candidate & seen])
        crossings.valued[number] = self.valued.min(axis=0)
        _first(self.entry, self.entry_log >= self.entry_needed, number)
        crossings.entries[self.entry_stages] = self.entry.max(axis=1)
        _first(crossings.uncovered, self.chart.see((contrast[self.reward] + 1) / 2, seen), number)
        bad_z, bad_windows = self.naive.see(goodness[self.reward], candidate, seen)
        _first(crossings.naive_z, bad_z, number)
        _first(crossings.naive_windows, bad_windows, number)

    def _bet(self, contrast: Floats) -> None:
        """Bet on contrasts. NaN contrasts are skipped."""
        harm = self.gamblers.stakes(slice(None), -1.0, self.harm_null, self.harm_gap)
        self.harm_log += np.nan_to_num(np.log1p(harm * (-contrast - self.harm_null)))
        safe = self.gamblers.stakes(self.safe_rows, 1.0, -self.safe_gap, self.safe_gap)
        self.safe_log += np.nan_to_num(np.log1p(safe * (contrast[self.safe_rows] + self.safe_gap)))

        if self.entry_stages:
            entry = self.gamblers.stakes(self.first_rows, 1.0, -self.entry_gap, self.entry_gap)
            self.entry_log += np.nan_to_num(np.log1p(entry * (contrast[self.first_rows] + self.entry_gap)))

    def _even(self, candidate: NDArray[np.bool_]) -> Floats:
        """Return the largest value of each bet so far, because a test that rejected once stays rejected."""
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
    """`regression.Regression` as sums: the prediction for each session before its value is observed."""

    def __init__(self, runs: int, better: np.bool_) -> None:
        self.better = bool(better)
        self.n, self.x, self.y, self.xx, self.xy = (np.zeros(runs) for _ in range(5))

    def take(self, expected: Floats, value: Floats, where: NDArray[np.bool_]) -> Floats:
        expected = expected if self.better else 1.0 - expected
        count = np.maximum(self.n, 1)
        slope = (self.xy - self.x * self.y / count + 1) / (self.xx - self.x**2 / count + 1)
        prediction = np.clip((self.y + 0.5) / (self.n + 1) + slope * (expected - (self.x + 0.5) / (self.n + 1)), 0, 1)
        self.n += where
        self.x += where * expected
        self.y += where * value
        self.xx += where * expected**2
        self.xy += where * expected * value
        return np.asarray(prediction, np.float64)


class _Chart:
    """`confidence.ConfidenceSequence` evaluated at the true mean: whether the interval contains it."""

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
    """Tests in common practice, which are not valid under continuous monitoring."""

    def __init__(self, runs: int) -> None:
        self.sums, self.squares, self.counts = np.zeros((2, runs)), np.zeros((2, runs)), np.zeros((2, runs))
        self.window_sums, self.window_counts = np.zeros((2, runs)), np.zeros((2, runs))
        self.in_a_row = np.zeros(runs)

    def see(
        self, value: Floats, candidate: NDArray[np.bool_], has_value: NDArray[np.bool_]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        arms = np.array([candidate, ~candidate]) & has_value
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
    """Return, by stage with such a condition, half of the loss to rule out for each guardrail, and the indices of the
    stages.
    """
    most = Fraction(1, plan.slots + 1)
    parts = {
        number: plan.loss_to_rule_out(min(stage.share, most)) for number, stage in enumerate(plan.stages) if number
    }
    needed = {number: float(part) for number, part in parts.items() if part is not None}
    gaps = np.array([[[part / 2] for _ in plan.guardrails] for part in needed.values()])
    return gaps.reshape(len(needed), len(plan.guardrails), 1), list(needed)


def _first(crossings: Indices, now: NDArray[np.bool_], number: int) -> None:
    crossings[now & (crossings == NEVER)] = number


def _at_s(sessions: Indices, age_s: float, world: World) -> Floats:
    return np.asarray(np.where(sessions < NEVER, sessions * world.every_s + age_s, np.inf), np.float64)


def _look(name: str) -> ReadingAge:
    return "maturity" if name == "maturity" else "closing"
