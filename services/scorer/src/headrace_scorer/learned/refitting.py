"""A reward model as a source of rewards: its periodic fitting beside the stream, and its single fitting in a replay.

Two replicas may fit at the same time. Equal thumbs give an equal model, and the model that is stored last is used.

The features of a run are known only after its reward functions were called. Therefore a replay with a reward model
passes over the runs twice: first to compute features, then, from a temporary file, to write experiences.

The reward of a run depends only on its features and on the fitted model, which are both in the database. So every
replica computes the same reward.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.errors import Unavailable
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.isolation import is_fatal
from headrace_runtime.stream.processor import Processor
from headrace_schemas import Event, Reward, Trajectory
from headrace_schemas.values.ids import matches_any
from headrace_scorer import metrics
from headrace_scorer.feedback_entries import EntryKey
from headrace_scorer.functions.loading import RewardFunction
from headrace_scorer.learned import store
from headrace_scorer.learned.columns import features_of
from headrace_scorer.learned.models import (
    PREFIX,
    REWARD_MODELS,
    THUMBS_MAX,
    UNRATED_RUNS_MAX,
    Features,
    FittedModel,
    LearnedSettings,
    QualityEstimate,
    Thumb,
    ThumbedRun,
)
from headrace_scorer.learned.store import TrainingData
from headrace_scorer.ledger import LedgerEntries
from headrace_scorer.reward_policy import SourceReward

CHANGE_MIN = 0.05
"""Smallest change of a run's value that causes a new revision of its reward. Each revision is trained."""

_CACHED_MAX = 64


class LearnedSource:
    """The reward model that the settings choose, as the source of rewards `learned:<model>`.

    Args:
        functions: function that returns the reward functions that are loaded now.
    """

    def __init__(self, settings: LearnedSettings, functions: Callable[[], Sequence[RewardFunction]]) -> None:
        assert settings.model is not None
        self.settings = settings
        self.model = REWARD_MODELS.get(settings.model)
        self.name = settings.source
        self._functions = functions
        self._fitted: OrderedDict[str, FittedModel] = OrderedDict()

    def counts(self, source: str) -> bool:
        """Return whether the rewards of a source are features of the model.

        Sources that read feedback or learn from it are never features.
        """
        readers = {function.source for function in self._functions() if "feedback" in function.parameters}
        selected = matches_any(self.settings.features, source)
        is_teacher = matches_any(self.settings.teachers, source)
        return selected and not is_teacher and source not in readers and not source.startswith(PREFIX)

    def features(self, trajectory: Trajectory, entries: LedgerEntries) -> dict[str, float]:
        """Return the features of a run, computed from the trajectory and its ledger entries."""
        return features_of(trajectory, entries.rewards(), self.counts)

    async def new_rewards(
        self, tx: AsyncConnection, now: datetime, trajectory: Trajectory, arrived_ms: int, entries: LedgerEntries
    ) -> list[Reward]:
        """Store the features of a run for later fits, and return the model's new reward for the run.

        The list is empty if an earlier reward exists and differs by less than `change_min`.
        """
        features = self.features(trajectory, entries)
        await store.store_features(tx, trajectory.trajectory_id, trajectory.tenant, arrived_ms, features)
        fitted = await self.fitted(tx, trajectory.tenant)
        reward = reward_of(self.name, now, trajectory, fitted, features, entries)
        return [reward] if self._has_changed(reward, entries) else []

    async def fitted(self, tx: AsyncConnection, tenant: str) -> FittedModel | None:
        """Return the model fitted for a tenant, or None before the first fit."""
        model_id = await store.current_model_id(tx, tenant, self.name)
        if model_id is None:
            return None
        if model_id not in self._fitted:
            self._fitted[model_id] = self.model.read(await store.model_payload(tx, tenant, self.name))
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
    """Return the next revision of the reward that a reward model gives a trajectory.

    The reward is an abstention before the first fit (`fitted` is None), or if the model is uncertain.
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


REFIT_SHARE = 0.05
"""Share of thumbs that must be new or changed before the model is fitted again."""
_RESCORED_MAX = 20_000
"""Runs that are scored again after the model was fitted again. The newest count."""

log = get_logger(__name__)
_IN_MEMORY_BYTES = 16 << 20


async def run(learned: LearnedSource, processor: Processor) -> None:
    """Refit reward models periodically until cancelled."""
    while True:
        await processor.clock.sleep(learned.settings.refit_s)
        try:
            await refit(learned, processor)
        except Unavailable as error:
            log.warning("refit_postponed", error=str(error))


async def refit(learned: LearnedSource, processor: Processor) -> None:
    """Fit the reward model of each tenant with enough new thumbs.

    If a model has changed, mark its runs for rescoring.
    """
    async with processor.database.transaction() as tx:
        tenants = await store.tenants_to_refit(tx, learned.name, REFIT_SHARE)
    for tenant in tenants:
        try:
            async with processor.database.transaction() as tx:
                data = await store.training_data(tx, tenant, learned.name, THUMBS_MAX, UNRATED_RUNS_MAX)
            fitted = await asyncio.to_thread(_fit, learned, data)
            await _store_model(learned, processor, data, fitted)
        except Exception as error:  # the earlier model stays in use, and the next tenant is fitted
            if is_fatal(error):
                raise
            log.exception("refit_failed", source=learned.name, tenant=tenant)
            metrics.REFITS.labels(learned.name, "failed").inc()
            async with processor.database.transaction() as tx:
                await store.wait_for_thumbs(tx, tenant, learned.name)


def _fit(learned: LearnedSource, data: TrainingData) -> FittedModel:
    return learned.model.fit(data.rated_runs(), data.unrated_features(), learned.settings.requirements)


async def _store_model(learned: LearnedSource, processor: Processor, data: TrainingData, fitted: FittedModel) -> None:
    async def step(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
        if await store.store_model(tx, now, learned.name, data, fitted.model_id, fitted.to_json()):
            await store.mark_for_rescoring(tx, data.tenant, _RESCORED_MAX)
        return []

    await processor.step(step)
    facts = fitted.facts()
    metrics.REFITS.labels(learned.name, "silent" if facts.get("silent") else "speaks").inc()
    logged = {name: facts.get(name) for name in ("thumbs", "raters", "silent", "auroc")}  # names of people are left out
    log.info("reward_model_fitted", source=learned.name, tenant=data.tenant, model_id=fitted.model_id, **logged)


@dataclass(slots=True)
class _Tenant:
    """Newest rated and unrated runs of one tenant in a replay, in the order of the trajectories."""

    rated: deque[ThumbedRun]
    unrated: deque[Features]


@dataclass(slots=True)
class LearnedReplay:
    """Reward models of a replay, one for each tenant.

    Call `add_run` for every run, then `fit`, then `reward` for each run.
    """

    source: LearnedSource
    _tenants: dict[str, _Tenant] = field(default_factory=dict)
    _fitted: dict[str, FittedModel] = field(default_factory=dict)

    def add_run(self, trajectory: Trajectory, features: Features, rater_values: Mapping[str, float]) -> None:
        """Add a run with the rating of each person, by rater. A run without ratings is an unrated run."""
        empty = _Tenant(deque(maxlen=THUMBS_MAX), deque(maxlen=UNRATED_RUNS_MAX))
        runs = self._tenants.setdefault(trajectory.tenant, empty)
        if rater_values:
            thumbs = tuple(Thumb(rater, value) for rater, value in sorted(rater_values.items()))
            runs.rated.append(ThumbedRun(trajectory.trajectory_id, features, thumbs))
        else:
            runs.unrated.append(features)

    async def fit(self) -> None:
        """Fit the reward model of each tenant in a thread."""
        fit, requirements = self.source.model.fit, self.source.settings.requirements
        for tenant, runs in sorted(self._tenants.items()):
            if runs.rated:
                self._fitted[tenant] = await asyncio.to_thread(fit, list(runs.rated), list(runs.unrated), requirements)

    def reward(self, trajectory: Trajectory, features: Features) -> dict[EntryKey, SourceReward]:
        """Return, by ledger key, the reward that the model of the run's tenant gives to the run.

        It is an abstention if there is no model or the model abstains.

        Args:
            trajectory: the run.
            features: values of the run's features, from which the model predicts the thumb.
        """
        fitted = self._fitted.get(trajectory.tenant)
        likely = None if fitted is None else fitted.judge(features)
        outcome, value = ("abstained", None) if likely is None else ("scored", likely.paid)
        name = self.source.name
        return {EntryKey.reward(name): SourceReward(name, None, outcome, value)}  # type: ignore[arg-type]


class TemporaryLines:
    """Lines that are written once and then read. A few lines stay in memory; many go to a temporary file."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES)  # noqa: SIM115 (`close`)

    def write(self, *lines: bytes) -> None:
        """Write lines, which must not contain line breaks."""
        self._file.writelines(line + b"\n" for line in lines)

    def read(self, count: int) -> Iterator[list[bytes]]:
        """Yield all lines from the beginning, `count` at a time."""
        self._file.seek(0)
        while first := self._file.readline():
            yield [first[:-1], *(self._file.readline()[:-1] for _ in range(count - 1))]

    def close(self) -> None:
        """Delete the lines and their file."""
        self._file.close()
