"""Application of a batch of events to the rows of the read model.

A batch loads every row that its events may change, applies the events in memory and writes the rows, all in the
transaction that also stores the positions on the topics. A turn contributes to the counts by its status: a batch adds
to the counts the difference of these contributions after and before it. Applying an event twice, or in another order,
gives the same rows, so a batch may be read again after a crash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_console.read_model import tables
from headrace_console.read_model.events import EventEffects
from headrace_console.read_model.packing import pack_id, unpack_id
from headrace_console.read_model.row_sets import RowSet, TurnSet, upsert_all, with_pauses
from headrace_console.read_model.rows import (
    ExperienceRow,
    LetterRow,
    Names,
    SessionRow,
    TrajectoryRow,
    TurnRow,
)
from headrace_console.read_model.side_rows import SideRows
from headrace_console.read_model.status import (
    CountKey,
    Statuses,
    TurnState,
    split_status,
    state_of,
)
from headrace_console.read_model.verdicts import is_verdict
from headrace_schemas import (
    DeadLetter,
    DeadLetterDecision,
    Event,
    Experience,
    Feedback,
    Reward,
    TrainingMetrics,
    Trajectory,
    Turn,
)
from headrace_schemas.values.ids import derived_id, key_of_response


@dataclass(frozen=True, slots=True)
class LogEvent:
    """An event with its partition and offset on its topic."""

    event: Event
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """Contributions of the loaded turns to the global counts and to the counts of their sessions, before a batch."""

    counts: Counter[CountKey]
    summaries: dict[int, Summary]


Summary = tuple[int, int, int]
"""Contribution of a turn to its session: the session, the status and the sampled tokens. Status 0 is not counted."""
_NOT_COUNTED: Summary = (0, 0, 0)


class Batch:
    """The loaded rows of one transaction, and the changes to them. Call either `apply` or `remove`, once."""

    def __init__(self, tx: AsyncConnection, names: Names, *, titles: bool, day: int) -> None:
        """Create an empty batch.

        Args:
            tx: the transaction of the batch.
            names: the table of texts, such as names of models, that rows refer to by number.
            titles: whether the first characters of each session are stored.
            day: the current day of the console, in days since 1970.
        """
        self._tx = tx
        self._names = names
        self.day = day
        self.sessions = RowSet(tables.sessions, SessionRow, ("session_key", "tenant"))
        self.turns = TurnSet(self.sessions)
        self.trajectories = RowSet(tables.trajectories, TrajectoryRow, ("name",))
        self.experiences = RowSet(tables.experiences, ExperienceRow, ("name",))
        self.letters = RowSet(tables.letters, LetterRow, ("name",))
        self._row_sets: tuple[RowSet[Any], ...] = (
            self.sessions,
            self.turns,
            self.trajectories,
            self.experiences,
            self.letters,
        )
        self.side = SideRows(day)
        self._effects = EventEffects(self, names, titles=titles)

    def session_of(
        self, event: Turn | Trajectory | Experience | Reward | Feedback, *, is_news: bool = True
    ) -> SessionRow:
        """Return the row of an event's session, created as a stub if no event of the session was read before.

        The row's `read_day` becomes today, unless `is_news` is False: then the caller sets it for an event not read
        before.
        """
        return self._session(event.session_key, self._names.number(event.tenant), is_news=is_news)

    def session_of_turn(self, turn_id: str, session: SessionRow) -> SessionRow:
        """Return the session that a turn belongs to.

        Args:
            turn_id: id of the turn. It usually contains the key of its session.
            session: session of the event that names the turn, for example of feedback. It is returned for an id without
                a key.
        """
        key = key_of_response(turn_id)
        return session if key in (None, session.session_key) else self._session(key, session.tenant)

    def _session(self, key: str, tenant: int, *, is_news: bool = True) -> SessionRow:
        session = self.sessions.add(key, tenant)
        if is_news:
            session.read_day = self.day
        return session

    def reward_target(self, event: Trajectory | Reward) -> tuple[SessionRow, TrajectoryRow]:
        """Return the rows of an event's session and trajectory, created as stubs if they were not read before."""
        session = self.session_of(event)
        trajectory = self.trajectories.add(trajectory_name(event.trajectory_id))
        trajectory.session = trajectory.session or session.id
        return session, trajectory

    def save_of(self, event: TrainingMetrics) -> tuple[int, int]:
        """Return the lineage and the number of the save (checkpoint of the trainer) that a training report is about."""
        return self._names.number(event.lineage), event.account

    async def apply(self, log_events: Sequence[LogEvent]) -> None:
        """Apply a batch of events to the console's tables, and write all rows that they change."""
        events = [log_event.event for log_event in log_events]
        await self._begin()
        await self._load_named(events)
        await self._load_members(events)
        await self.side.load(self._tx, log_events, self)
        before = await self._snapshot()
        async for log_event in with_pauses(log_events):
            self._effects.apply(log_event.event, log_event.partition, log_event.offset)
        await self.side.store_steps(self._tx)
        await self._store(before)

    async def remove(self, sessions: Collection[int], stubs: Collection[int], portion: int) -> bool:
        """Delete sessions with all their rows, and stubs of experiences.

        Args:
            sessions: numbers of the sessions.
            stubs: numbers of the experiences.
            portion: largest number of rows to delete from each table.

        Returns:
            Whether everything was deleted. Otherwise another call must delete the rest.
        """
        tx = self._tx
        await self._begin()
        rest = await self.side.delete(tx, sessions, portion)
        turns = await self.turns.load_where(tx, "session", sessions, portion)
        # A trajectory leads to its session's rewards, so it is deleted after them.
        trajectories = [] if any(rest) else await self.trajectories.load_where(tx, "session", sessions, portion)
        experiences = await self.experiences.load_where(tx, "session", sessions, portion)
        await self._load_members([])
        before = await self._snapshot()
        rest += [len(rows) >= portion for rows in (turns, trajectories, experiences)]
        experiences += await self.experiences.load_where(tx, "id", stubs)
        self._unlink(turns, trajectories, experiences)
        await self.side.delete_trained(tx, [row.id for row in experiences])
        if not any(rest):
            for session in await self.sessions.load_where(tx, "id", sessions):
                self.sessions.remove(session)
        await self._store(before)
        return not any(rest)

    def _unlink(
        self, turns: Sequence[TurnRow], trajectories: Sequence[TrajectoryRow], experiences: Sequence[ExperienceRow]
    ) -> None:
        """Remove rows from the batch, and remove their numbers from the lists in all other rows."""
        for turn in turns:
            self.turns.remove(turn)
        for trajectory in trajectories:
            self.trajectories.remove(trajectory)
        for experience in experiences:
            self.experiences.remove(experience)
        turn_ids, trajectory_ids, experience_ids = (
            {row.id for row in rows} for rows in (turns, trajectories, experiences)
        )
        for owner in (*self.trajectories, *self.experiences):
            owner.turns = tuple(number for number in owner.turns if number not in turn_ids)
        for turn in self.turns:
            turn.trajectories = tuple(number for number in turn.trajectories if number not in trajectory_ids)
            turn.experiences = tuple(number for number in turn.experiences if number not in experience_ids)

    async def _begin(self) -> None:
        await self._names.refresh(self._tx)
        last_ids = (await self._tx.execute(select(*(rows.last_id for rows in self._row_sets)))).one()
        for rows, last_id in zip(self._row_sets, last_ids, strict=True):
            rows.begin(last_id)

    async def _load_named(self, events: Iterable[Event]) -> None:
        """Load the rows of the sessions, turns, trajectories, experiences and dead letters that the events name."""
        sessions: set[tuple[str, int]] = set()
        turns: set[tuple[bytes, int]] = set()
        trajectories: set[tuple[bytes]] = set()
        experiences: set[tuple[bytes]] = set()
        letters: set[tuple[bytes]] = set()
        async for event in with_pauses(events):
            if isinstance(event, Turn | Trajectory | Experience | Reward | Feedback):
                tenant = self._names.number(event.tenant)
                sessions.add((event.session_key, tenant))
                for turn_id in turn_ids_of(event):
                    turns.add((pack_id(turn_id), tenant))
                    sessions.add((key_of_response(turn_id) or event.session_key, tenant))
            if isinstance(event, Trajectory | Reward):
                trajectories.add((trajectory_name(event.trajectory_id),))
            elif isinstance(event, Experience):
                experiences.add((pack_id(event.experience_id),))
            elif isinstance(event, TrainingMetrics):
                for outcomes in (event.verdicts, event.undone, event.restored):
                    experiences.update((pack_id(outcome.experience_id),) for outcome in outcomes)
            elif isinstance(event, DeadLetter):
                letters.add((pack_id(event.event_id),))
            elif isinstance(event, DeadLetterDecision):
                letters.add((pack_id(event.dead_letter_id),))
        await self.sessions.load_keys(self._tx, sessions)
        await self.turns.load_keys(self._tx, turns)
        await self.trajectories.load_keys(self._tx, trajectories)
        await self.experiences.load_keys(self._tx, experiences)
        await self.letters.load_keys(self._tx, letters)

    async def _load_members(self, events: Iterable[Event]) -> None:
        """Load the turns of the loaded trajectories and experiences, and the rows on which their status depends."""
        tx = self._tx
        letters = [event for event in events if isinstance(event, DeadLetter)]
        if letters:
            await self._load_refused(letters)
        owners = [*self.trajectories, *self.experiences]
        await self.turns.load_ids(tx, (turn for owner in owners for turn in owner.turns))
        await self.trajectories.load_ids(tx, (owner for turn in self.turns for owner in turn.trajectories))
        await self.experiences.load_ids(tx, (owner for turn in self.turns for owner in turn.experiences))
        await self.sessions.load_ids(tx, (turn.session for turn in self.turns))
        await self.sessions.load_ids(tx, (row.session for row in self.experiences))

    async def _load_refused(self, letters: Collection[DeadLetter]) -> None:
        """Load the rows of turns, trajectories and experiences whose events were dead-lettered."""
        tx, refused = self._tx, {pack_id(letter.source_id) for letter in letters}
        await self.turns.load_names(tx, refused)
        await self.trajectories.load_where(tx, "name", refused)
        keys = {letter.key for letter in letters if letter.source_topic == Experience.topic}
        sessions = await self.sessions.load_where(tx, "session_key", keys)
        for row in await self.experiences.load_where(tx, "session", [session.id for session in sessions]):
            row.event = pack_id(Experience.event_id_of(unpack_id(row.name), row.revision))

    async def _states(self) -> dict[int, TurnState]:
        states = {}
        async for turn in with_pauses(self.turns):
            state = state_of(turn, [self.trajectories[row_id] for row_id in turn.trajectories], self._names)
            if state is not None:
                states[turn.id] = state
        return states

    def _experiences_of(self, turn: TurnRow) -> list[ExperienceRow]:
        return [self.experiences[row_id] for row_id in turn.experiences]

    async def _counts(self, states: Mapping[int, TurnState], statuses: Statuses) -> Counter[CountKey]:
        counts: Counter[CountKey] = Counter()
        async for state in with_pauses(states.values()):
            for key, turns in statuses.count_changes(state, self._experiences_of(state.turn)).items():
                counts[key] += turns
        return counts

    async def _snapshot(self) -> _Snapshot:
        summaries = {turn.id: (turn.session, turn.status, turn.sampled_tokens) for turn in self.turns}
        return _Snapshot(await self._counts(await self._states(), Statuses(self._names)), summaries)

    async def _store(self, before: _Snapshot) -> None:
        """Add to the counts and to the sessions the differences from the snapshot `before`, and write all rows."""
        tx, states, statuses = self._tx, await self._states(), Statuses(self._names)
        counts = await self._counts(states, statuses)
        counts.subtract(before.counts)
        await self._summarize(states, statuses, before.summaries)
        await self._names.store(tx)
        for row_set in self._row_sets:
            await row_set.write_changes(tx)
        changes = [key._asdict() | {"turns": turns} for key, turns in counts.items() if turns]
        await upsert_all(tx, tables.counts, CountKey._fields, changes, added=("turns",))
        await self.side.store(tx)

    async def _summarize(
        self, states: Mapping[int, TurnState], statuses: Statuses, before: Mapping[int, Summary]
    ) -> None:
        """Compute the training status of each turn in this batch, and update the counts of the sessions that contain
        them.
        """
        lineages = await self.side.latest_lineages(self._tx, {state.model for state in states.values()})
        after = dict.fromkeys(before, _NOT_COUNTED)
        async for turn in with_pauses(self.turns):
            state = states.get(turn.id)
            turn.status = 0
            if state is not None:
                turn.status = statuses.status(state, self._experiences_of(turn), lineages.get(state.model, 0))
            after[turn.id] = (turn.session, turn.status, turn.sampled_tokens)
        for turn_id, summary in after.items():
            earlier = before.get(turn_id, _NOT_COUNTED)
            if earlier != summary:
                self._count_in_session(earlier, -1)
                self._count_in_session(summary, 1)

    def _count_in_session(self, summary: Summary, sign: int) -> None:
        session_id, status, tokens = summary
        if not status or session_id not in self.sessions:  # a removed session
            return
        session = self.sessions[session_id]
        name, _ = split_status(self._names.text(status))
        session.turns += sign
        session.tokens += sign * tokens
        setattr(session, name, getattr(session, name) + sign)
        session.status = max((at for at, kind in enumerate(tables.STATUSES) if getattr(session, kind)), default=0)


def turn_ids_of(event: Event) -> Sequence[str]:
    """Return the ids of the turns whose rows an event changes."""
    if isinstance(event, Turn):
        return (event.turn_id,)
    if isinstance(event, Trajectory | Experience):
        return event.turn_ids
    if isinstance(event, Feedback):
        return event.msg_ids[:1] if is_verdict(event) else ()
    return (event.turn_id,) if isinstance(event, Reward) and event.turn_id is not None else ()


@lru_cache(maxsize=4096)
def trajectory_name(trajectory_id: str) -> bytes:
    """Return the packed event id of a trajectory."""
    return pack_id(derived_id("trajectory", trajectory_id))
