"""A reward model as a source of rewards: what it says of a run follows from the run's features and from what it has
learned, both of which are in the database. So the same tables give the same reward, whichever replica makes it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_schemas import Reward, Trajectory
from headrace_schemas.source_patterns import fits_any
from headrace_scorer.feedback_entries import EntryKey
from headrace_scorer.functions.loading import RewardFunction
from headrace_scorer.learned import store
from headrace_scorer.learned.features import features_of
from headrace_scorer.learned.models import REWARD_MODELS, Features, FittedModel, LikelyThumb
from headrace_scorer.learned.settings import PREFIX, LearnedSettings
from headrace_scorer.ledger import LedgerEntries

_KEPT_MAX = 64


class LearnedSource:
    """The source `learned:<model>`. `functions` returns the reward functions that are loaded now."""

    def __init__(self, settings: LearnedSettings, functions: Callable[[], Sequence[RewardFunction]]) -> None:
        assert settings.model is not None
        self.settings = settings
        self.model = REWARD_MODELS.get(settings.model)
        self.name = settings.source
        self._functions = functions
        self._fitted: OrderedDict[str, FittedModel] = OrderedDict()

    def counts(self, source: str) -> bool:
        """Whether what a source says is a feature: never what has read feedback, nor what has learned from it."""
        readers = {one.source for one in self._functions() if "feedback" in one.parameters}
        named = fits_any(self.settings.features, source)
        taught = fits_any(self.settings.teachers, source)
        return named and not taught and source not in readers and not source.startswith(PREFIX)

    def features(self, trajectory: Trajectory, entries: LedgerEntries) -> dict[str, float]:
        return features_of(trajectory, entries.rewards(), self.counts)

    async def speak(
        self, tx: AsyncConnection, now: datetime, trajectory: Trajectory, arrived_ms: int, entries: LedgerEntries
    ) -> list[Reward]:
        """The reward of a run, where it is new or has changed by `change_min`. Its features are kept for learning."""
        features = self.features(trajectory, entries)
        await store.keep_features(tx, trajectory.trajectory_id, trajectory.tenant, arrived_ms, features)
        fitted = await self.fitted(tx, trajectory.tenant)
        made = reward_of(self.name, now, trajectory, fitted, features, entries)
        return [made] if self._is_news(made, entries) else []

    async def fitted(self, tx: AsyncConnection, tenant: str) -> FittedModel | None:
        """The tenant's reward model; None before there is one."""
        model_id = await store.current(tx, tenant, self.name)
        if model_id is None:
            return None
        if model_id not in self._fitted:
            self._fitted[model_id] = self.model.read(await store.payload(tx, tenant, self.name))
            while len(self._fitted) > _KEPT_MAX:
                self._fitted.popitem(last=False)
        return self._fitted[model_id]

    def _is_news(self, made: Reward, entries: LedgerEntries) -> bool:
        before = entries.reward(EntryKey.reward(self.name))
        if before is None or before["outcome"] != made.outcome:
            return True
        if made.value is None or before["value"] is None:
            return False
        return abs(made.value - float(before["value"])) >= max(self.settings.change_min, 1e-12)


def reward_of(
    source: str,
    now: datetime,
    trajectory: Trajectory,
    fitted: FittedModel | None,
    features: Features,
    entries: LedgerEntries,
) -> Reward:
    """What a reward model says of a run, as the next revision. No model, and one that is not sure, abstain."""
    likely: LikelyThumb | None = None if fitted is None else fitted.judge(features)
    reason = None
    if fitted is None:
        reason = "nothing was learned yet"
    elif likely is None:
        silent = fitted.facts().get("silent")
        reason = str(silent) if silent else "not sure: the interval is wider than scorer.learned.width_max"
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
