"""A reward model as a source of rewards.

The reward of a run depends only on its features and on the fitted model, which are both in the database. So every
replica computes the same reward.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_schemas import Reward, Trajectory
from headrace_schemas.values.ids import fits_any
from headrace_scorer.feedback_entries import EntryKey
from headrace_scorer.functions.loading import RewardFunction
from headrace_scorer.learned import store
from headrace_scorer.learned.columns import features_of
from headrace_scorer.learned.models import REWARD_MODELS, Features, FittedModel, QualityEstimate
from headrace_scorer.learned.settings import PREFIX, LearnedSettings
from headrace_scorer.ledger import LedgerEntries

CHANGE_MIN = 0.05
"""Smallest change of a run's value that causes a new revision of its reward. Each revision is trained."""

_CACHED_MAX = 64


class LearnedSource:
    """The source `learned:<model>`.

    Args:
        functions: returns the reward functions that are loaded now.
    """

    def __init__(self, settings: LearnedSettings, functions: Callable[[], Sequence[RewardFunction]]) -> None:
        assert settings.model is not None
        self.settings = settings
        self.model = REWARD_MODELS.get(settings.model)
        self.name = settings.source
        self._functions = functions
        self._fitted: OrderedDict[str, FittedModel] = OrderedDict()

    def counts(self, source: str) -> bool:
        """Return whether the rewards of a source are features.

        Sources that read feedback or learn from it are never features.
        """
        readers = {function.source for function in self._functions() if "feedback" in function.parameters}
        selected = fits_any(self.settings.features, source)
        is_teacher = fits_any(self.settings.teachers, source)
        return selected and not is_teacher and source not in readers and not source.startswith(PREFIX)

    def features(self, trajectory: Trajectory, entries: LedgerEntries) -> dict[str, float]:
        """Return the features of a run."""
        return features_of(trajectory, entries.rewards(), self.counts)

    async def new_rewards(
        self, tx: AsyncConnection, now: datetime, trajectory: Trajectory, arrived_ms: int, entries: LedgerEntries
    ) -> list[Reward]:
        """Store the features of a run for later fits. Return its reward if it is new or has changed by `change_min`."""
        features = self.features(trajectory, entries)
        await store.store_features(tx, trajectory.trajectory_id, trajectory.tenant, arrived_ms, features)
        fitted = await self.fitted(tx, trajectory.tenant)
        reward = reward_of(self.name, now, trajectory, fitted, features, entries)
        return [reward] if self._has_changed(reward, entries) else []

    async def fitted(self, tx: AsyncConnection, tenant: str) -> FittedModel | None:
        """Return the tenant's fitted model; None before the first fit."""
        model_id = await store.current(tx, tenant, self.name)
        if model_id is None:
            return None
        if model_id not in self._fitted:
            self._fitted[model_id] = self.model.read(await store.payload(tx, tenant, self.name))
            while len(self._fitted) > _CACHED_MAX:
                self._fitted.popitem(last=False)
        return self._fitted[model_id]

    def _has_changed(self, reward: Reward, entries: LedgerEntries) -> bool:
        before = entries.reward(EntryKey.reward(self.name))
        if before is None or before["outcome"] != reward.outcome:
            return True
        if reward.value is None or before["value"] is None:
            return False
        return abs(reward.value - float(before["value"])) >= max(CHANGE_MIN, 1e-12)


def reward_of(
    source: str,
    now: datetime,
    trajectory: Trajectory,
    fitted: FittedModel | None,
    features: Features,
    entries: LedgerEntries,
) -> Reward:
    """Return the next revision of a reward model's reward.

    It abstains without a model, or if the model is uncertain.
    """
    likely: QualityEstimate | None = None if fitted is None else fitted.judge(features)
    reason = None
    if fitted is None:
        reason = "the reward model was not fitted yet"
    elif likely is None:
        silent = fitted.facts().get("silent")
        reason = str(silent) if silent else "uncertain: the interval is wider than scorer.learned.width_max"
    return Reward(
        time=now,
        trajectory_id=trajectory.trajectory_id,
        session_key=trajectory.session_key,
        tenant=trajectory.tenant,
        source=source,
        revision=entries.next_revision(EntryKey.reward(source)),
        outcome="abstained" if likely is None else "scored",
        value=None if likely is None else likely.paid,
        criteria={} if likely is None else {"likely": likely.value, "low": likely.low, "high": likely.high},
        reason=reason,
        judged_by=None if fitted is None else fitted.model_id,
    )
