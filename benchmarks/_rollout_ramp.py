"""How much of all traffic met a candidate: what its ramp gave it, stage by stage, until it was taken back.

The comparison is of candidate and control alone; everybody else is counted by the share: n sessions of both arms at
the share s are n / 2s sessions of users. A stage is left by the registry's rule: enough mature units, enough of each
arm that said something, and the loss ruled out that its share would risk.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks._rollout_trials import NEVER, Crossings
from benchmarks._rollout_worlds import Floats, World
from headrace_registry.rollouts.plan import RolloutPlan


@dataclass(frozen=True)
class Ramp:
    """By rollout."""

    begins: np.ndarray
    """Stage by rollout: the session of both arms that is the first with its share; `NEVER`: none is."""
    candidates: np.ndarray
    shares: Floats

    def exposed(self, until: np.ndarray) -> Floats:
        """Part of all sessions that met the candidate in its first `until` sessions of both arms; NaN for none."""
        horizon, runs = self.candidates.shape
        everybody = np.zeros(runs)
        for stage, share in enumerate(self.shares):
            last = stage + 1 == len(self.shares)
            end = until if last else np.minimum(until, self.begins[stage + 1])
            everybody += np.maximum(end - self.begins[stage], 0) / (2 * share)
        done = (until > 0) & (until <= horizon)
        met = np.full(runs, np.nan)
        met[done] = self.candidates[until[done] - 1, np.flatnonzero(done)] / everybody[done]
        return met


def ramp(found: Crossings, plan: RolloutPlan, world: World) -> Ramp:
    """Where each stage begins. What began before a reading was taken is younger than it."""
    horizon, runs = found.candidates.shape
    lag = round(plan.maturity_s / world.every_s)
    begins = np.full((len(plan.stages), runs), NEVER)
    begins[0] = 0
    for place, stage in enumerate(plan.stages[:-1]):
        enough = _first_with(found.candidates, stage.units_min)
        said = _first_with(found.said, stage.units_min)
        left = np.max([enough, said, found.entries[place + 1], begins[place]], axis=0)
        begins[place + 1] = np.where(left < horizon, left + 1 + lag, NEVER)
    return Ramp(begins, found.candidates, np.array([float(stage.share) for stage in plan.stages]))


def _first_with(counts: np.ndarray, wanted: int) -> np.ndarray:
    """The session, from 0, after which there are so many; `NEVER`: there never are."""
    reached = counts >= wanted
    return np.where(reached.any(axis=0), reached.argmax(axis=0), NEVER)
