"""Where a session went: which experiences came of it, and which versions hold them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from headrace.errors import UsageError
from headrace.topics import Range
from headrace_operations.lineage.contents import Name
from headrace_operations.lineage.reading import Reader
from headrace_schemas import Experience, TrainingMetrics, TrainingOutcome, Trajectory
from headrace_schemas.ids import session_key

REVISIONS_MAX = 100_000
"""Of one session."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What one lineage made of a revision: `trained`, `dropped` or `undone`, with which save and in which version.

    `version` is the first one that holds it; None while none does.
    """

    lineage: str
    outcome: str
    reason: str | None
    account: int
    version: str | None


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """One revision of an experience of the session. No fates: no lineage has said anything yet."""

    experience_id: str
    revision: int
    trajectory_id: str
    turn_ids: tuple[str, ...]
    reward: float | None
    no_reward: str | None
    parts: Mapping[str, float]
    partition: int
    offset: int
    fates: tuple[Fate, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """A trajectory of the session, and why its turns are in no experience, where that is so."""

    trajectory_id: str
    turn_ids: tuple[str, ...]
    left_out: Mapping[str, str]
    held_out: str | None


@dataclass(frozen=True, slots=True)
class Where:
    """All of a session: its runs, and one page of the revisions that came of them."""

    session_id: str
    session_key: str
    runs: tuple[Run, ...]
    total: int
    entries: tuple[Whereabouts, ...]


@dataclass(slots=True)
class _Lineage:
    """The reports of one lineage about the revisions that are asked for."""

    last: int = -1
    outcomes: dict[Name, tuple[TrainingOutcome, int]] = field(default_factory=dict)
    undone: dict[Name, bool] = field(default_factory=dict)
    """Whether it waits to be trained again."""
    holders: dict[Name, str] = field(default_factory=dict)
    taken_back: dict[Name, tuple[TrainingOutcome, int, str | None]] = field(default_factory=dict)
    """The last training of each that was undone, with the version that held it."""

    def add(self, report: TrainingMetrics, asked: Mapping[str, object]) -> None:
        if report.account <= self.last:
            return
        self.last = report.account
        for outcome in report.verdicts:
            if outcome.experience_id in asked:
                self._take((outcome.experience_id, outcome.revision), outcome, report.account)
        for undone in report.undone:
            if undone.experience_id in asked:
                self._undo((undone.experience_id, undone.revision), undone.queued)
        for restored in report.restored:
            self._restore((restored.experience_id, restored.revision))
        for name in filter(self._trained, self.outcomes if report.version else ()):
            self.holders.setdefault(name, report.version or "")

    def _take(self, name: Name, outcome: TrainingOutcome, account: int) -> None:
        if not self._trained(name):
            self.outcomes[name] = outcome, account
            self.undone.pop(name, None)

    def _undo(self, name: Name, queued: bool) -> None:
        if self._trained(name):
            self.taken_back[name] = (*self.outcomes[name], self.holders.pop(name, None))
        self.undone[name] = queued

    def _restore(self, name: Name) -> None:
        if name in self.taken_back:
            outcome, account, holder = self.taken_back.pop(name)
            self.undone.pop(name, None)
            self.outcomes[name] = outcome, account
            self.holders |= {name: holder} if holder else {}

    def _trained(self, name: Name) -> bool:
        """Whether the weights hold it now."""
        return name in self.outcomes and self.outcomes[name][0].dropped is None and name not in self.undone

    def fate(self, lineage: str, name: Name) -> Fate | None:
        if name not in self.outcomes:
            return None
        outcome, account = self.outcomes[name]
        if name in self.undone:
            return Fate(lineage, "undone", "queued again" if self.undone[name] else None, account, None)
        if outcome.dropped is not None:
            return Fate(lineage, "dropped", outcome.reason, account, None)
        return Fate(lineage, "trained", None, account, self.holders.get(name))


async def where(topics: Reader, session_id: str, *, tenant: str, after: int, limit: int) -> Where:
    """Raises `UsageError` for a session of which no topic knows anything."""
    key = session_key(tenant, session_id)
    runs = await _runs(topics, key, session_id)
    entries = await _revisions(topics, key, session_id)
    lineages = await _fates(topics, {entry.experience_id for entry in entries.values()})
    if not runs and not entries:
        raise UsageError(f"session {session_id!r} of tenant {tenant!r}: no trajectory and no experience is known of it")
    ordered = sorted(entries, key=lambda name: (entries[name].partition, entries[name].offset))
    chosen = ordered[after : after + limit]
    return Where(
        session_id=session_id,
        session_key=key,
        runs=tuple(runs),
        total=len(ordered),
        entries=tuple(_with_fates(entries[name], lineages) for name in chosen),
    )


async def _runs(topics: Reader, key: str, session_id: str) -> list[Run]:
    found: dict[str, Run] = {}
    async for entry in topics.read(Range(Trajectory.topic, keys=(key,))):
        one = entry.event
        if isinstance(one, Trajectory) and one.session_id == session_id:
            held_out = "eval" if one.purpose == "eval" else one.untrained
            left_out = {item.turn_id: item.full_reason for item in one.left_out}
            found.setdefault(one.trajectory_id, Run(one.trajectory_id, one.turn_ids, left_out, held_out))
    return list(found.values())


async def _revisions(topics: Reader, key: str, session_id: str) -> dict[Name, Whereabouts]:
    found: dict[Name, Whereabouts] = {}
    async for entry in topics.read(Range(Experience.topic, keys=(key,))):
        one = entry.event
        if isinstance(one, Experience) and one.session_id == session_id:
            made = Whereabouts(
                experience_id=one.experience_id,
                revision=one.revision,
                trajectory_id=one.trajectory_id,
                turn_ids=one.turn_ids,
                reward=one.reward,
                no_reward=one.no_reward,
                parts={part.source: part.value for part in one.parts},
                partition=entry.partition,
                offset=entry.offset,
            )
            found.setdefault((one.experience_id, one.revision), made)
            if len(found) > REVISIONS_MAX:
                raise UsageError(f"session {session_id!r} has more than {REVISIONS_MAX} revisions of experiences")
    return found


async def _fates(topics: Reader, asked: set[str]) -> dict[str, _Lineage]:
    lineages: dict[str, _Lineage] = defaultdict(_Lineage)
    wanted = dict.fromkeys(asked)
    if wanted:
        async for entry in topics.read(Range(TrainingMetrics.topic)):
            if isinstance(entry.event, TrainingMetrics):
                lineages[entry.event.lineage].add(entry.event, wanted)
    return lineages


def _with_fates(entry: Whereabouts, lineages: Mapping[str, _Lineage]) -> Whereabouts:
    name = entry.experience_id, entry.revision
    fates = (one.fate(lineage, name) for lineage, one in sorted(lineages.items()))
    return replace(entry, fates=tuple(fate for fate in fates if fate is not None))
