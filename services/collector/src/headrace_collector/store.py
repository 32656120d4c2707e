"""Reads and writes the tables of the collector. Every function runs in its caller's transaction."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import RowMapping, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_collector.facts import Contents, TurnContent, TurnFacts, join_digests, split_digests
from headrace_collector.feedback_targets import OrderedFeedback
from headrace_collector.prompts import Prompts
from headrace_collector.runs import SessionRun
from headrace_collector.schema import feedback, sessions, turns
from headrace_runtime.clock import epoch_ms
from headrace_runtime.errors import InvalidEvent
from headrace_runtime.process.event_loop import run_off_loop
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.tables import split_into_batches, take_within_limits, upsert
from headrace_schemas import Feedback, Turn
from headrace_schemas.values.text import printable

log = get_logger(__name__)
_CLOSED_MAX = 1000
_FEEDBACK_MAX = 4096
"""Largest number of feedback events of one session that count when a run is closed."""
_FEEDBACK_BYTES_MAX = 16 << 20
"""JSON bytes of these events together. The newest event counts, whatever its size."""
_FEEDBACK_COST_BYTES = 512
"""Bytes of JSON that take as long to parse as the overhead of one event."""
_EVENTS_AT_ONCE = 500
"""Largest number of feedback events in one SQL statement."""
_SUMMED = ("open_turns", "open_completions", "open_sequences", "open_added")
_COLUMN_NAMES = {"log_offset": "place"}
"""Columns that are named differently from the field of `TurnFacts`."""
_STORED_FACTS = [field.name for field in fields(TurnFacts) if field.name not in ("base", "opening")]
_FACTS = [turns.c[_COLUMN_NAMES.get(name, name)].label(name) for name in _STORED_FACTS]


@dataclass(frozen=True, slots=True)
class SessionSize:
    """Size of the open turns of a session, which is limited."""

    completions: int
    sequences: int
    """Number of completions that may continue no other one, and so need a branch or a dialogue of their own."""
    longest_tokens: int
    """Tokens of the longest prompt with its completion."""
    added_tokens: int
    """Tokens of all turns, without those that a turn shares with the turn that it extends."""

    @classmethod
    def of(cls, runs: Iterable[SessionRun]) -> SessionSize:
        turns = [turn for run in runs for turn in run.turns]
        return cls(
            sum(turn.completions for turn in turns),
            sum(turn.sequences for turn in turns),
            max((turn.tokens for turn in turns), default=0),
            sum(turn.added_tokens for turn in turns),
        )


async def add_turn(
    tx: AsyncConnection, turn: Turn, facts: TurnFacts, partition: int, check_ms: int
) -> SessionSize | None:
    """Store a turn as open, and return the size of its session's open turns; None if the turn is already stored.

    Raises:
        InvalidEvent: another session has a turn of this id.
    """
    row = {_COLUMN_NAMES.get(name, name): getattr(facts, name) for name in _STORED_FACTS} | {
        "session_key": turn.session_key,
        "prefixes": join_digests(facts.prefixes),
        "replies": join_digests(facts.replies),
        "payload": turn.to_json(),
    }
    if not await upsert(tx, turns, {"turn_id": row.pop("turn_id")}, row, update=False):
        owner = await tx.scalar(select(turns.c.session_key).where(turns.c.turn_id == turn.turn_id))
        if owner not in (None, turn.session_key):
            raise InvalidEvent("turn_taken", f"turn_id: {printable(turn.turn_id)!r} is a turn of another session")
        return None
    return await _open(tx, turn, facts, partition, check_ms)


async def _open(tx: AsyncConnection, turn: Turn, facts: TurnFacts, partition: int, check_ms: int) -> SessionSize:
    added = {
        "session_key": turn.session_key,
        "tenant": turn.tenant,
        "partition": partition,
        "open_turns": 1,
        "open_completions": facts.completions,
        "open_sequences": facts.sequences,
        "open_tokens": facts.tokens,
        "open_added": facts.added_tokens,
        "began": facts.log_offset,
        "seen_ms": facts.seen_ms,
        "check_ms": check_ms,
    }
    row = (await tx.execute(_open_turn_statement(tx.dialect.name), added)).one()
    return SessionSize(row.open_completions, row.open_sequences, row.open_tokens, row.open_added)


@cache
def _open_turn_statement(dialect: str) -> Any:
    """Return the statement that adds a turn to its session's row.

    If the session has open turns already, the time of its idle check is not changed.
    """
    insert: Any = (sqlite.insert if dialect == "sqlite" else postgresql.insert)(sessions)
    new = insert.excluded
    summed = {name: sessions.c[name] + new[name] for name in _SUMMED}
    earlier, later = (func.min, func.max) if dialect == "sqlite" else (func.least, func.greatest)
    changes = {
        "partition": new.partition,
        "seen_ms": new.seen_ms,
        "began": earlier(sessions.c.began, new.began),
        "open_tokens": later(sessions.c.open_tokens, new.open_tokens),
        **summed,
    }
    return insert.on_conflict_do_update(
        index_elements=[sessions.c.session_key],
        set_={**changes, "check_ms": func.coalesce(sessions.c.check_ms, new.check_ms)},
    ).returning(sessions.c.open_completions, sessions.c.open_sequences, sessions.c.open_tokens, sessions.c.open_added)


async def lock_session(tx: AsyncConnection, session_key: str) -> RowMapping | None:
    """Return the session's row, locked until this transaction ends, or None if the session is not stored."""
    query = select(sessions).where(sessions.c.session_key == session_key).with_for_update()
    return (await tx.execute(query)).mappings().one_or_none()


async def facts_of_session(tx: AsyncConnection, session_key: str, since_ms: int) -> list[TurnFacts]:
    """Return the facts about all open turns of a session and about its newest turns closed since `since_ms`.

    The number of closed turns is limited, because a session key may be in use for ever.
    """
    session_turns = select(*_FACTS).where(turns.c.session_key == session_key)
    closed = session_turns.where(turns.c.closed_ms >= since_ms).order_by(turns.c.closed_ms.desc()).limit(_CLOSED_MAX)
    rows: list[RowMapping] = []
    for query in (session_turns.where(turns.c.closed_ms.is_(None)), closed):
        rows += (await tx.execute(query)).mappings()
    facts: dict[str, TurnFacts] = {}
    for row in sorted(rows, key=lambda row: row["log_offset"]):  # a turn comes after the one that it extends
        facts[row["turn_id"]] = _facts(row, facts.get(row["extends"]))
    return [facts[row["turn_id"]] for row in rows]


def _facts(row: RowMapping, base: TurnFacts | None = None) -> TurnFacts:
    packed = {name: split_digests(row[name]) for name in ("prefixes", "replies")}
    return TurnFacts(**{**row, **packed}, base=base)


async def load_turns(tx: AsyncConnection, turn_ids: Collection[str]) -> tuple[list[Turn], Prompts]:
    """Return the turns whose content is still stored, in the order in which they were captured, and their prompts.

    The prompts include the turns that these turns extend, whatever their runs.
    """
    first = select(turns.c.turn_id, turns.c.extends).where(turns.c.turn_id.in_(turn_ids))
    chain = first.cte("chain", recursive=True)
    chain = chain.union(select(turns.c.turn_id, turns.c.extends).join(chain, turns.c.turn_id == chain.c.extends))
    query = (
        select(turns.c.turn_id, turns.c.payload)
        .join(chain, turns.c.turn_id == chain.c.turn_id)
        .where(turns.c.payload.is_not(None))
        .order_by(turns.c.place, turns.c.turn_id)
    )
    payloads = {row.turn_id: row.payload for row in await tx.execute(query)}
    return await run_off_loop(sum(map(len, payloads.values())), lambda: _read_turns(payloads, set(turn_ids)))


def _read_turns(payloads: Mapping[str, bytes], turn_ids: Collection[str]) -> tuple[list[Turn], Prompts]:
    shared: dict[int, int] = {}
    events = {name: _share_token_objects(Turn.from_stored(payload), shared) for name, payload in payloads.items()}
    return [turn for name, turn in events.items() if name in turn_ids], Prompts(events.values())


def _share_token_objects(turn: Turn, shared: dict[int, int]) -> Turn:
    """Return the turn with interned token ids: equal ids are one `int` object of `shared`.

    Each prompt of a run contains most of the one before it, and separate objects would take five times the memory.
    """
    ids = turn.prompt_token_ids
    return turn.model_copy(update={"prompt_token_ids": tuple(map(shared.setdefault, ids, ids))})


async def load_payloads(tx: AsyncConnection, turn_ids: Collection[str]) -> list[tuple[str, str, bytes | None]]:
    """Return the id, the session key and the stored content of each turn, without parsing the content."""
    columns = turns.c.turn_id, turns.c.session_key, turns.c.payload
    rows = await tx.execute(select(*columns).where(turns.c.turn_id.in_(turn_ids)).order_by(turns.c.place))
    return [(row.turn_id, row.session_key, row.payload) for row in rows]


async def open_turn_ids(tx: AsyncConnection, session_key: str) -> Sequence[str]:
    """Return the ids of a session's open turns."""
    query = select(turns.c.turn_id).where(turns.c.session_key == session_key, turns.c.closed_ms.is_(None))
    return (await tx.execute(query)).scalars().all()


async def load_contents(tx: AsyncConnection, turn_ids: Collection[str]) -> Contents:
    """Return the tokens and messages of these turns, by turn id, for building trajectories of them."""
    turns, prompts = await load_turns(tx, turn_ids)
    names = [turn.turn_id for turn in turns if turn.turn_id in prompts]
    size_bytes = sum(prompts.prompt(name).length_bytes for name in names)
    return await run_off_loop(size_bytes, lambda: {name: TurnContent.of(prompts.whole_turn(name)) for name in names})


async def feedback_of_session(
    tx: AsyncConnection, session_key: str, tenant: str, since_ms: int
) -> list[OrderedFeedback]:
    """Return the feedback that may apply to an open run of the session, or was last used since `since_ms`, in log
    order.

    Of more than `_FEEDBACK_MAX` events or `_FEEDBACK_BYTES_MAX` bytes the newest count, of used ones those that were
    used last: feedback may wait for turns for minutes, and a session may get any number of it.
    """
    table = feedback.c
    select_sizes = select(table.event_id, func.length(table.payload), table.source_offset)
    unused = select_sizes.where(table.session_key == session_key, table.used_ms.is_(None))
    used = select_sizes.where(table.session_key == session_key, table.used_ms >= since_ms)
    sizes: list[Any] = []  # two queries, each of which reads a bounded part of the index, in its order
    for query in (unused, used):
        query = query.order_by(table.used_ms.desc(), table.source_offset.desc())
        sizes += (await tx.execute(query.limit(_FEEDBACK_MAX + 1))).all()
    sizes.sort(key=lambda row: row[2], reverse=True)
    counted = take_within_limits(sizes, _FEEDBACK_MAX, lambda row: (row[1],), (_FEEDBACK_BYTES_MAX,))
    if len(counted) < len(sizes):
        log.warning("feedback_left_out", session=session_key, counted=len(counted))
    columns = feedback.c.event_id, feedback.c.payload, feedback.c.source_offset, feedback.c.turns_until
    rows: list[Any] = []
    for part in split_into_batches((name for name, *_ in counted), _EVENTS_AT_ONCE):
        query = select(*columns).where(feedback.c.event_id.in_(part))
        rows += (await tx.execute(query)).all()
    size_bytes = sum(length_bytes for _, length_bytes, _ in counted)
    return await run_off_loop(size_bytes + _FEEDBACK_COST_BYTES * len(rows), lambda: _ordered_feedback(rows, tenant))


def _ordered_feedback(rows: Iterable[Any], tenant: str) -> list[OrderedFeedback]:
    ordered = []
    for row in rows:
        event = read_feedback(row.payload)
        if event is not None and event.tenant == tenant:
            ordered.append(OrderedFeedback(event, row.source_offset, row.turns_until, row.event_id))
    return sorted(ordered, key=lambda item: item.log_offset)


def read_feedback(payload: bytes) -> Feedback | None:
    """Parse stored feedback. Return None if an older release accepted it but it breaks a present rule; such feedback is
    ignored.
    """
    try:
        return Feedback.from_stored(payload)
    except InvalidEvent as error:
        log.warning("stored_feedback_left_out", error=str(error))
        return None


async def close_turns(tx: AsyncConnection, turn_ids: Collection[str], trajectory_id: str, now: datetime) -> None:
    """Mark turns as closed, as part of a trajectory."""
    values = {"trajectory_id": trajectory_id, "closed_ms": epoch_ms(now)}
    await tx.execute(update(turns).where(turns.c.turn_id.in_(turn_ids)).values(values))


async def mark_used(tx: AsyncConnection, event_ids: Collection[str], now: datetime) -> None:
    """Mark stored feedback as not needed by any open or later run, so that it is deleted after its retention."""
    if event_ids:
        used = update(feedback).where(feedback.c.event_id.in_(event_ids), feedback.c.used_ms.is_(None))
        await tx.execute(used.values(used_ms=epoch_ms(now)))


async def update_open_size(
    tx: AsyncConnection, session_key: str, open_runs: Iterable[SessionRun], idle_ms: int
) -> None:
    """Store the total size of the session's open runs in its row."""
    runs: Sequence[SessionRun] = list(open_runs)
    size = SessionSize.of(runs)
    values = {
        "open_turns": sum(len(run.turns) for run in runs),
        "open_completions": size.completions,
        "open_sequences": size.sequences,
        "open_tokens": size.longest_tokens,
        "open_added": size.added_tokens,
        "check_ms": min((run.seen_ms + idle_ms for run in runs), default=None),
    }
    await tx.execute(update(sessions).where(sessions.c.session_key == session_key).values(values))
