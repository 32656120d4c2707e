"""Trace of a session: the experiences that were made of it, and the versions that were trained on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from headrace.errors import UsageError
from headrace.topics import Range
from headrace_operations.lineage.versions import Reader, RevisionKey
from headrace_schemas import Experience, TrainingMetrics, TrainingOutcome, Trajectory
from headrace_schemas.values.ids import session_key

REVISIONS_MAX = 100_000
"""Maximum number of experience revisions of one session."""


@dataclass(frozen=True, slots=True)
class TrainingStatus:
    """Result of one revision of an experience in one lineage: `trained`, `dropped` or `undone`.

    `account` is the number of the save (checkpoint of the trainer) that reported it. `version` is the first version
    that contains the revision, or None if no version does.
    """

    lineage: str
    outcome: str
    reason: str | None
    account: int
    version: str | None


@dataclass(frozen=True, slots=True)
class RevisionTrace:
    """One revision of an experience of the session, with its result in each lineage that reported it (`fates`)."""

    experience_id: str
    revision: int
    trajectory_id: str
    turn_ids: tuple[str, ...]
    reward: float | None
    no_reward: str | None
    parts: Mapping[str, float]
    partition: int
    offset: int
    fates: tuple[TrainingStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """One trajectory of the session, with the reasons why turns of it are in no experience.

    `left_out` has the reason for each such turn. `held_out` is the reason if no turn of the run is trained, otherwise
    None.
    """

    trajectory_id: str
    turn_ids: tuple[str, ...]
    left_out: Mapping[str, str]
    held_out: str | None


@dataclass(frozen=True, slots=True)
class SessionTrace:
    """Trace of one session: its runs, and one page of the experience revisions that were derived from them."""

    session_id: str
    session_key: str
    runs: tuple[Run, ...]
    total: int
    entries: tuple[RevisionTrace, ...]


@dataclass(slots=True)
class _LineageReports:
    """Training reports of one lineage, reduced to the experiences of the session."""

    last: int = -1
    outcomes: dict[RevisionKey, tuple[TrainingOutcome, int]] = field(default_factory=dict)
    undone: dict[RevisionKey, bool] = field(default_factory=dict)
    """Undone revisions, with whether each is queued for training again."""
    holders: dict[RevisionKey, str] = field(default_factory=dict)
    undone_outcomes: dict[RevisionKey, tuple[TrainingOutcome, int, str | None]] = field(default_factory=dict)
    """Last outcome of each undone revision, with its save and the version that contained it."""

    def add(self, report: TrainingMetrics, experience_ids: Mapping[str, object]) -> None:
        """Apply the entries of a report about `experience_ids`.

        Reports must be added in the order of the trainer's saves.
        """
        if report.account <= self.last:
            return
        self.last = report.account
        for outcome in report.verdicts:
            if outcome.experience_id in experience_ids:
                self._apply_outcome((outcome.experience_id, outcome.revision), outcome, report.account)
        for undone in report.undone:
            if undone.experience_id in experience_ids:
                self._apply_undo((undone.experience_id, undone.revision), undone.queued)
        for restored in report.restored:
            self._apply_restore((restored.experience_id, restored.revision))
        for name in filter(self._is_trained, self.outcomes if report.version else ()):
            self.holders.setdefault(name, report.version or "")

    def _apply_outcome(self, name: RevisionKey, outcome: TrainingOutcome, account: int) -> None:
        if not self._is_trained(name):
            self.outcomes[name] = outcome, account
            self.undone.pop(name, None)

    def _apply_undo(self, name: RevisionKey, queued: bool) -> None:
        if self._is_trained(name):
            self.undone_outcomes[name] = (*self.outcomes[name], self.holders.pop(name, None))
        self.undone[name] = queued

    def _apply_restore(self, name: RevisionKey) -> None:
        if name in self.undone_outcomes:
            outcome, account, holder = self.undone_outcomes.pop(name)
            self.undone.pop(name, None)
            self.outcomes[name] = outcome, account
            self.holders |= {name: holder} if holder else {}

    def _is_trained(self, name: RevisionKey) -> bool:
        """Return whether the newest weights of the lineage contain the training of the revision."""
        return name in self.outcomes and self.outcomes[name][0].dropped is None and name not in self.undone

    def status(self, lineage: str, name: RevisionKey) -> TrainingStatus | None:
        """Return the result of a revision in this lineage, or None if the lineage has not reported it."""
        if name not in self.outcomes:
            return None
        outcome, account = self.outcomes[name]
        if name in self.undone:
            return TrainingStatus(lineage, "undone", "queued again" if self.undone[name] else None, account, None)
        if outcome.dropped is not None:
            return TrainingStatus(lineage, "dropped", outcome.reason, account, None)
        return TrainingStatus(lineage, "trained", None, account, self.holders.get(name))


async def trace_session(topics: Reader, session_id: str, *, tenant: str, after: int, limit: int) -> SessionTrace:
    """Trace a session through the topics and return one page of its revisions.

    Raises:
        UsageError: no topic has a trajectory or an experience of the session.
    """
    key_of_session = session_key(tenant, session_id)
    runs = await _runs(topics, key_of_session, session_id)
    entries = await _revisions(topics, key_of_session, session_id)
    lineages = await _read_lineage_reports(topics, {entry.experience_id for entry in entries.values()})
    if not runs and not entries:
        raise UsageError(
            f"session {session_id!r} of tenant {tenant!r}: no topic has a trajectory or an experience of this session"
        )
    ordered = sorted(entries, key=lambda name: (entries[name].partition, entries[name].offset))
    chosen = ordered[after : after + limit]
    return SessionTrace(
        session_id=session_id,
        session_key=key_of_session,
        runs=tuple(runs),
        total=len(ordered),
        entries=tuple(_with_statuses(entries[name], lineages) for name in chosen),
    )


async def _runs(topics: Reader, key: str, session_id: str) -> list[Run]:
    runs: dict[str, Run] = {}
    async for entry in topics.read(Range(Trajectory.topic, keys=(key,))):
        trajectory = entry.event
        if isinstance(trajectory, Trajectory) and trajectory.session_id == session_id:
            held_out = "eval" if trajectory.purpose == "eval" else trajectory.untrained
            left_out = {item.turn_id: item.full_reason for item in trajectory.left_out}
            run = Run(trajectory.trajectory_id, trajectory.turn_ids, left_out, held_out)
            runs.setdefault(trajectory.trajectory_id, run)
    return list(runs.values())


async def _revisions(topics: Reader, key: str, session_id: str) -> dict[RevisionKey, RevisionTrace]:
    traces: dict[RevisionKey, RevisionTrace] = {}
    async for entry in topics.read(Range(Experience.topic, keys=(key,))):
        experience = entry.event
        if isinstance(experience, Experience) and experience.session_id == session_id:
            trace = RevisionTrace(
                experience_id=experience.experience_id,
                revision=experience.revision,
                trajectory_id=experience.trajectory_id,
                turn_ids=experience.turn_ids,
                reward=experience.reward,
                no_reward=experience.no_reward,
                parts={part.source: part.value for part in experience.parts},
                partition=entry.partition,
                offset=entry.offset,
            )
            traces.setdefault((experience.experience_id, experience.revision), trace)
            if len(traces) > REVISIONS_MAX:
                raise UsageError(f"session {session_id!r} has more than {REVISIONS_MAX} experience revisions")
    return traces


async def _read_lineage_reports(topics: Reader, experience_ids: set[str]) -> dict[str, _LineageReports]:
    lineages: dict[str, _LineageReports] = defaultdict(_LineageReports)
    requested = dict.fromkeys(experience_ids)
    if requested:
        async for entry in topics.read(Range(TrainingMetrics.topic)):
            if isinstance(entry.event, TrainingMetrics):
                lineages[entry.event.lineage].add(entry.event, requested)
    return lineages


def _with_statuses(entry: RevisionTrace, lineages: Mapping[str, _LineageReports]) -> RevisionTrace:
    name = entry.experience_id, entry.revision
    statuses = (reports.status(lineage, name) for lineage, reports in sorted(lineages.items()))
    return replace(entry, fates=tuple(status for status in statuses if status is not None))
