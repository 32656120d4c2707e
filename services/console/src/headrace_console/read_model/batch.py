"""Effect of a batch of events on the rows, in the transaction that also stores the positions.

A batch loads every row that its events may change, applies the events in memory and writes the rows at once. Counts
change by the difference between what the turns of the batch added to them before and after. All effects are idempotent
and independent of the order of events, so a batch may be read again after a crash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_console.read_model import tables
from headrace_console.read_model.events import EventEffects
from headrace_console.read_model.packing import pack_id
from headrace_console.read_model.rows import (
    ExperienceRow,
    Names,
    RowSet,
    SessionRow,
    TrajectoryRow,
    TurnRow,
    upsert_all,
)
from headrace_console.read_model.side_rows import SideRows
from headrace_console.read_model.standing import (
    CountKey,
    TurnState,
    count_changes,
    split_standing,
    standing_name,
    standing_of,
    state_of,
)
from headrace_schemas import DeadLetter, Event, Experience, Feedback, Reward, TrainingMetrics, Trajectory, Turn
from headrace_schemas.values.ids import derived_id


@dataclass(frozen=True, slots=True)
class Fact:
    """An event with its place on its topic."""

    event: Event
    partition: int
    offset: int


class Batch:
    """Rows of one batch. `apply` is called once."""

    def __init__(self, tx: AsyncConnection, names: Names, *, titles: bool) -> None:
        """Create an empty batch. `titles`: whether the first characters of each session are stored."""
        self._tx = tx
        self._names = names
        self.sessions = RowSet(tables.sessions, SessionRow, ("session_key", "tenant"))
        self.turns = RowSet(tables.turns, TurnRow, ("name", "tenant"))
        self.trajectories = RowSet(tables.trajectories, TrajectoryRow, ("name",))
        self.experiences = RowSet(tables.experiences, ExperienceRow, ("name",))
        self.side = SideRows()
        self._effects = EventEffects(self, names, titles=titles)

    def reward_target(self, event: Trajectory | Reward) -> tuple[SessionRow, TrajectoryRow]:
        """Return the session and the trajectory of an event, stubs if they were not read before."""
        session = self.sessions.add(event.session_key, self._names.number(event.tenant))
        return session, self.trajectories.add(trajectory_name(event.trajectory_id))

    def save_of(self, event: TrainingMetrics) -> tuple[int, int]:
        """Return the lineage and the number of the save that an event reports."""
        return self._names.number(event.lineage), event.account

    async def apply(self, facts: Sequence[Fact]) -> None:
        """Apply events, and write all rows that they change."""
        tx, events = self._tx, [fact.event for fact in facts]
        await self._names.refresh(tx)
        for rows in (self.sessions, self.turns, self.trajectories, self.experiences):
            await rows.begin(tx)
        await self._load_named(events)
        await self._load_members(events)
        await self.side.load(tx, events, self)
        shown = {turn.id: (turn.session, turn.standing, turn.sampled_tokens) for turn in self.turns}
        before = self._counts(self._states())
        for fact in facts:
            self._effects.apply(fact.event, fact.partition, fact.offset)
        await self.side.store_steps(tx)
        states = self._states()
        after = self._counts(states)
        after.subtract(before)
        await self._show(states, shown)
        await self._store(after)

    async def _load_named(self, events: Iterable[Event]) -> None:
        """Load the rows that events name."""
        sessions: set[tuple[str, int]] = set()
        turns: set[tuple[bytes, int]] = set()
        trajectories: set[tuple[bytes]] = set()
        experiences: set[tuple[bytes]] = set()
        for event in events:
            if isinstance(event, Turn | Trajectory | Experience | Reward | Feedback):
                tenant = self._names.number(event.tenant)
                sessions.add((event.session_key, tenant))
                turns.update((pack_id(turn_id), tenant) for turn_id in turn_ids_of(event))
            if isinstance(event, Trajectory | Reward):
                trajectories.add((trajectory_name(event.trajectory_id),))
            elif isinstance(event, Experience):
                experiences.add((pack_id(event.experience_id),))
            elif isinstance(event, TrainingMetrics):
                for outcomes in (event.verdicts, event.undone, event.restored):
                    experiences.update((pack_id(outcome.experience_id),) for outcome in outcomes)
        await self.sessions.load_keys(self._tx, sessions)
        await self.turns.load_keys(self._tx, turns)
        await self.trajectories.load_keys(self._tx, trajectories)
        await self.experiences.load_keys(self._tx, experiences)

    async def _load_members(self, events: Iterable[Event]) -> None:
        """Load the turns of the loaded trajectories and experiences, and the rows on which their standing depends."""
        tx = self._tx
        refused = {pack_id(event.source_id) for event in events if isinstance(event, DeadLetter)}
        if refused:
            await self.turns.load_where(tx, "name", refused)
            await self.trajectories.load_where(tx, "name", refused)
            await self.experiences.load_where(tx, "event", refused)
        owners = [*self.trajectories, *self.experiences]
        await self.turns.load_ids(tx, (turn for owner in owners for turn in owner.turns))
        await self.trajectories.load_ids(tx, (owner for turn in self.turns for owner in turn.trajectories))
        await self.experiences.load_ids(tx, (owner for turn in self.turns for owner in turn.experiences))
        await self.sessions.load_ids(tx, (turn.session for turn in self.turns))
        await self.sessions.load_ids(tx, (row.session for row in self.experiences))

    def _states(self) -> dict[int, TurnState]:
        states = {}
        for turn in self.turns:
            state = state_of(turn, [self.trajectories[row_id] for row_id in turn.trajectories], self._names)
            if state is not None:
                states[turn.id] = state
        return states

    def _experiences_of(self, turn: TurnRow) -> list[ExperienceRow]:
        return [self.experiences[row_id] for row_id in turn.experiences]

    def _counts(self, states: dict[int, TurnState]) -> Counter[CountKey]:
        counts: Counter[CountKey] = Counter()
        for state in states.values():
            counts.update(count_changes(state, self._experiences_of(state.turn), self._names))
        return counts

    async def _show(self, states: dict[int, TurnState], shown: dict[int, tuple[int, int, int]]) -> None:
        """Set the standing of each turn in the lineage that reported last on its model, and adjust its session."""
        lineages = await self.side.latest_lineages(self._tx, {state.model for state in states.values()})
        for turn in self.turns:
            state = states.get(turn.id)
            turn.standing = 0
            if state is not None:
                lineage = lineages.get(state.model, 0)
                standing = standing_of(state, self._experiences_of(turn), lineage, self._names)
                turn.standing = self._names.number(standing_name(standing))
            now = (turn.session, turn.standing, turn.sampled_tokens)
            if shown.get(turn.id) != now:
                self._count_in_session(shown.get(turn.id, (0, 0, 0)), -1)
                self._count_in_session(now, 1)

    def _count_in_session(self, shown: tuple[int, int, int], sign: int) -> None:
        session_id, standing, tokens = shown
        if not standing:
            return
        session = self.sessions[session_id]
        name, _ = split_standing(self._names.text(standing))
        session.turns += sign
        session.tokens += sign * tokens
        setattr(session, name, getattr(session, name) + sign)
        session.standing = max((at for at, kind in enumerate(tables.STANDINGS) if getattr(session, kind)), default=0)

    async def _store(self, counts: Counter[CountKey]) -> None:
        tx = self._tx
        await self._names.store(tx)
        for rows in (self.sessions, self.turns, self.trajectories, self.experiences):
            await rows.store(tx)
        changes = [key._asdict() | {"turns": turns} for key, turns in counts.items() if turns]
        await upsert_all(tx, tables.counts, CountKey._fields, changes, added="turns")
        await self.side.store(tx)


def turn_ids_of(event: Event) -> Sequence[str]:
    """Return the ids of the turns whose rows an event changes."""
    if isinstance(event, Turn):
        return (event.turn_id,)
    if isinstance(event, Trajectory | Experience):
        return event.turn_ids
    return (event.turn_id,) if isinstance(event, Reward) and event.turn_id is not None else ()


def trajectory_name(trajectory_id: str) -> bytes:
    """Return the packed event id of a trajectory."""
    return pack_id(derived_id("trajectory", trajectory_id))
