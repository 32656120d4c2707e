"""Exposure of all traffic to a candidate: its share, stage by stage, until its rollback.

The comparison uses sessions of candidate and control only. Other sessions are computed from the share: n sessions of
both arms at the share s are n / 2s sessions of users. A stage ends by the registry's rule: enough mature units, enough
units with a value in each arm, and the loss ruled out that the next share would risk.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks._rollout_trials import NEVER, Crossings
from benchmarks._rollout_worlds import Floats, World
from headrace_registry.rollouts.plan import RolloutPlan


@dataclass(frozen=True)
class Ramp:
    """Stages by rollout."""

    begins: np.ndarray
    """First session of both arms with the share of the stage, by stage and rollout; `NEVER` if there is none."""
    candidates: np.ndarray
    shares: Floats

    def exposed(self, until: np.ndarray) -> Floats:
        """Return the share of all sessions that met the candidate in its first `until` sessions of both arms; NaN
        without sessions."""
        horizon, runs = self.candidates.shape
        everybody = np.zeros(runs)
        for stage, share in enumerate(self.shares):
            last = stage + 1 == len(self.shares)
            end = until if last else np.minimum(until, self.begins[stage + 1])
            everybody += np.maximum(end - self.begins[stage], 0) / (2 * share)
        is_rolled_back = (until > 0) & (until <= horizon)
        met = np.full(runs, np.nan)
        met[is_rolled_back] = (
            self.candidates[until[is_rolled_back] - 1, np.flatnonzero(is_rolled_back)] / everybody[is_rolled_back]
        )
        return met


def ramp(crossings: Crossings, plan: RolloutPlan, world: World) -> Ramp:
    """Return where each stage begins. Sessions that began before a reading are younger than the reading."""
    horizon, runs = crossings.candidates.shape
    lag = round(plan.maturity_s / world.every_s)
    begins = np.full((len(plan.stages), runs), NEVER)
    begins[0] = 0
    for number, stage in enumerate(plan.stages[:-1]):
        enough = _first_with(crossings.candidates, stage.units_min)
        enough_values = _first_with(crossings.valued, stage.units_min)
        left = np.max([enough, enough_values, crossings.entries[number + 1], begins[number]], axis=0)
        begins[number + 1] = np.where(left < horizon, left + 1 + lag, NEVER)
    return Ramp(begins, crossings.candidates, np.array([float(stage.share) for stage in plan.stages]))


def _first_with(counts: np.ndarray, minimum: int) -> np.ndarray:
    """Return the first session, from 0, after which the count is reached; `NEVER` if it never is."""
    reached = counts >= minimum
    return np.where(reached.any(axis=0), reached.argmax(axis=0), NEVER)
