"""Ratings of the items of a queue: reservations and verdicts of a rater, and the answers of all raters and judges."""

from __future__ import annotations

import uuid
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import ColumnElement, Select, Table, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_console.read_model import review_tables, tables
from headrace_console.read_model.packing import unpack_id
from headrace_console.read_model.queries import (
    Row,
    first_row,
    read_rows,
    read_turns,
    rewards_query,
    texts_of,
    turns_query,
)
from headrace_console.read_model.queues import Queue, nearest_score, of_queue, valid_verdicts
from headrace_console.read_model.row_sets import upsert_all
from headrace_console.read_model.verdicts import SAME, Verdict, is_repeated_pair, pair_of

_VERDICTS_BETWEEN = 5
"""Verdicts of a rater between the first and the second showing of a pair."""
_REPEATS_SEARCHED = 100


@dataclass(frozen=True, slots=True)
class Item:
    """Item of a review queue (a session or a turn), with the verdicts and the reservation of one rater."""

    name: bytes
    session: Row
    turn: Row | None
    verdicts: tuple[Row, ...]
    """Verdicts of this rater, the first one first."""
    is_reserved: bool
    """Whether the rater has, or had, a reservation."""
    repeated: bool
    """Whether the reservation is for the second showing of a pair."""

    @property
    def id(self) -> str:
        """Id of the session or turn that is rated: a hash, so that it does not reveal the session to the rater."""
        return unpack_id(self.name)

    @property
    def answer(self) -> str | None:
        """The rater's latest answer, or None if there is none or it was withdrawn."""
        return self.verdicts[-1]["answer"] if self.verdicts else None

    @property
    def number(self) -> int:
        """Number that the rater's next verdict about the item gets."""
        return self.verdicts[-1]["number"] + 1 if self.verdicts else 1


def _of_rater(table: Table, name: bytes, rater: str) -> ColumnElement[bool]:
    return (table.c.item == name) & (table.c.rater == rater)


async def item_of(tx: AsyncConnection, queue: Queue, name: bytes, rater: str) -> Item | None:
    """Return an item that the rater has reserved or rated, or None if the rater has done neither."""
    items, verdicts, reservations = review_tables.items, review_tables.verdicts, review_tables.reservations
    row = await first_row(tx, select(items).where(items.c.name == name, of_queue(queue)))
    if row is None:
        return None
    earlier = await read_rows(tx, select(verdicts).where(_of_rater(verdicts, name, rater)).order_by(verdicts.c.number))
    reservation = await first_row(tx, select(reservations).where(_of_rater(reservations, name, rater)))
    session = await first_row(tx, select(tables.sessions).where(tables.sessions.c.id == row["session"]))
    if session is None or not (earlier or reservation):
        return None
    return Item(
        bytes(row["name"]),
        session,
        await _turn_of(tx, row),
        tuple(earlier),
        reservation is not None,
        reservation is not None and reservation["repeated"],
    )


async def _turn_of(tx: AsyncConnection, item: Row) -> Row | None:
    """Return the turn to show for an item of a review queue; for an item that is a whole session, its last turn."""
    table = tables.turns
    is_own = table.c.id == item["turn"] if item["turn"] else table.c.session == item["session"]
    query = turns_query().where(is_own, table.c.log_offset >= 0).order_by(table.c.at_ms.desc(), table.c.id.desc())
    turns = await read_turns(tx, query.limit(1))
    return turns[0] if turns else None


async def reserve(
    tx: AsyncConnection, queue: Queue, name: bytes, rater: str, now_ms: int, *, repeated: bool = False
) -> None:
    """Reserve an item for a rater, in place of an earlier reservation of this item by the rater."""
    session = await tx.scalar(select(review_tables.items.c.session).where(review_tables.items.c.name == name))
    row = {
        "item": name,
        "rater": rater,
        "session": session,
        "until_ms": now_ms + 1000 * queue.rules.reserved_s,
        "skipped": False,
        "repeated": repeated,
    }
    await upsert_all(tx, review_tables.reservations, ("item", "rater"), [row])


async def reserve_next(tx: AsyncConnection, queue: Queue, rater: str, now_ms: int) -> bytes | None:
    """Reserve the next item for a rater and return its name, or None if there is none.

    The next item is the one that the rater has reserved and not rated; then a pair that the rater must rate a second
    time; then the first item that needs more ratings.
    """
    if queue.closed:
        return None
    name: bytes | None = await tx.scalar(_first(_open_reservation(queue, rater)))
    if name is not None:
        await _extend(tx, queue, name, rater, now_ms)
        return bytes(name)
    name = await _pair_to_repeat(tx, queue, rater)
    if name is not None:
        await reserve(tx, queue, name, rater, now_ms, repeated=True)
        return name
    name = await tx.scalar(_first(_free_items(queue, rater, now_ms)))
    if name is None:
        return None
    await reserve(tx, queue, name, rater, now_ms)
    return bytes(name)


async def _extend(tx: AsyncConnection, queue: Queue, name: bytes, rater: str, now_ms: int) -> None:
    """Prolong a rater's reservation of an item by the queue's full reservation time, from now on."""
    table, until_ms = review_tables.reservations, now_ms + 1000 * queue.rules.reserved_s
    await tx.execute(update(table).where(_of_rater(table, name, rater)).values(until_ms=until_ms))


def _first(query: Select[tuple[bytes]]) -> Select[tuple[bytes]]:
    """Return a query for the first of the items of `query`, in the order of the queue."""
    return query.order_by(review_tables.items.c.position, review_tables.items.c.name).limit(1)


def _open_reservation(queue: Queue, rater: str) -> Select[tuple[bytes]]:
    items, reservations = review_tables.items, review_tables.reservations
    query = select(items.c.name).join(reservations, reservations.c.item == items.c.name)
    query = query.where(of_queue(queue))
    return query.where(reservations.c.rater == rater, ~reservations.c.skipped)


def _free_items(queue: Queue, rater: str, now_ms: int) -> Select[tuple[bytes]]:
    """Return a query for items that need more ratings and that the rater has neither rated, reserved nor skipped."""
    items, reservations, rated = review_tables.items, review_tables.reservations, valid_verdicts()
    is_rated = select(rated.c.item).where(rated.c.item == items.c.name, rated.c.rater == rater).exists()
    is_reserved = (
        select(reservations.c.item).where(reservations.c.item == items.c.name, reservations.c.rater == rater).exists()
    )
    verdicts = select(func.count()).select_from(rated).where(rated.c.item == items.c.name).scalar_subquery()
    reserved = (
        select(func.count())
        .select_from(reservations)
        .where(reservations.c.item == items.c.name, reservations.c.until_ms > now_ms, ~reservations.c.skipped)
        .scalar_subquery()
    )
    query = select(items.c.name).where(of_queue(queue))
    return query.where(~is_rated, ~is_reserved, verdicts + reserved < queue.rules.ratings)


async def _pair_to_repeat(tx: AsyncConnection, queue: Queue, rater: str) -> bytes | None:
    """Return the name of a pair that the rater must rate a second time, with swapped sides, or None.

    At least `_VERDICTS_BETWEEN` verdicts of the rater lie between the two ratings.
    """
    if queue.rules.question != "pair":
        return None
    items, table = review_tables.items, review_tables.verdicts
    reservations = review_tables.reservations
    skipped = (
        select(reservations.c.item).where(reservations.c.item == table.c.item, reservations.c.rater == rater).exists()
    )
    query = select(table.c.item, table.c.number, table.c.answer).join(items, items.c.name == table.c.item)
    query = query.where(of_queue(queue), table.c.rater == rater, ~skipped)
    rows = (
        await tx.execute(query.order_by(table.c.at_ms.desc(), table.c.number.desc()).limit(_REPEATS_SEARCHED))
    ).all()
    numbers: dict[bytes, int] = {}
    for row in rows:
        numbers[bytes(row.item)] = max(row.number, numbers.get(bytes(row.item), 0))
    for row in rows[_VERDICTS_BETWEEN:]:
        name = bytes(row.item)
        if numbers[name] == 1 and row.answer is not None and is_repeated_pair(str(uuid.UUID(bytes=name)), rater):
            return name
    return None


async def skip(tx: AsyncConnection, name: bytes, rater: str) -> None:
    """Mark an item as skipped by the rater, so that it is not offered again and other raters may reserve it."""
    table = review_tables.reservations
    await tx.execute(update(table).where(_of_rater(table, name, rater)).values(skipped=True, until_ms=0))


async def offer_skipped(tx: AsyncConnection, queue: Queue, rater: str) -> None:
    """Make the items that the rater has skipped available to the rater again."""
    items, table = review_tables.items, review_tables.reservations
    names = select(items.c.name).where(of_queue(queue))
    await tx.execute(delete(table).where(table.c.rater == rater, table.c.skipped, table.c.item.in_(names)))


async def count_skipped(tx: AsyncConnection, queue: Queue, rater: str) -> int:
    """Return the number of items that the rater has skipped."""
    items, table = review_tables.items, review_tables.reservations
    query = select(func.count()).select_from(table).join(items, items.c.name == table.c.item)
    query = query.where(of_queue(queue))
    return await tx.scalar(query.where(table.c.rater == rater, table.c.skipped)) or 0


async def last_rated(tx: AsyncConnection, queue: Queue, rater: str) -> Row | None:
    """Return the row of the rater's latest valid verdict in a queue, or None."""
    items, rated = review_tables.items, valid_verdicts()
    query = select(rated).join(items, items.c.name == rated.c.item)
    query = query.where(of_queue(queue), rated.c.rater == rater)
    return await first_row(tx, query.order_by(rated.c.at_ms.desc(), rated.c.number.desc()))


async def store_verdict(tx: AsyncConnection, verdict: Verdict, session: int) -> None:
    """Store a rater's verdict about a queue's item before it is sent as feedback, and release the rater's reservation
    of the item.
    """
    await upsert_all(tx, review_tables.verdicts, ("item", "rater", "number"), [verdict.row(session, -1)])
    table = review_tables.reservations
    await tx.execute(delete(table).where(_of_rater(table, verdict.name, verdict.rater)))


async def remove_verdict(tx: AsyncConnection, verdict: Verdict) -> None:
    """Delete a verdict that could not be sent to the gateway, unless its event was read from the topic meanwhile."""
    table = review_tables.verdicts
    await tx.execute(
        delete(table).where(
            _of_rater(table, verdict.name, verdict.rater), table.c.number == verdict.number, table.c.log_offset < 0
        )
    )


ITEMS_MAX = 500
"""Largest number of compared items: those of the random part that were drawn last."""
_JUDGE_PREFIX = "judge:"
_ROWS_MAX = 20_000


@dataclass(slots=True)
class AnsweredItem:
    """An item of the random sample of a queue, with the answers of all raters and judges."""

    id: str
    session: int
    session_key: str
    turn: int
    choices: int
    """Number of answers of the turn."""
    by_rater: dict[str, Hashable] = field(default_factory=dict)
    """Valid answer by rater: a number for a score, otherwise a text."""
    by_judge: dict[str, Hashable] = field(default_factory=dict)
    """Answer that the reward of each judge implies, by judge."""
    verdicts: list[Row] = field(default_factory=list)
    """All verdicts, in the order of their numbers."""


async def random_items(tx: AsyncConnection, queue: Queue) -> list[AnsweredItem]:
    """Return the items of a queue that were drawn at random and rated, with the answers of raters and judges."""
    items, sessions, turns, verdicts = review_tables.items, tables.sessions, tables.turns, review_tables.verdicts
    is_rated = select(verdicts.c.item).where(verdicts.c.item == items.c.name).exists()
    query = select(items, sessions.c.session_key, func.coalesce(turns.c.choices, 1).label("choices"))
    query = query.join(sessions, sessions.c.id == items.c.session).outerjoin(turns, turns.c.id == items.c.turn)
    query = query.where(of_queue(queue), items.c.drawn_at_random, is_rated)
    rows = await read_rows(tx, query.order_by(items.c.position.desc()).limit(ITEMS_MAX))
    answered = {
        bytes(row["name"]): AnsweredItem(
            unpack_id(row["name"]), row["session"], row["session_key"], row["turn"], row["choices"]
        )
        for row in rows
    }
    ordered = select(verdicts).where(verdicts.c.item.in_(answered)).order_by(verdicts.c.number).limit(_ROWS_MAX)
    for row in await read_rows(tx, ordered):
        answered[bytes(row["item"])].verdicts.append(row)
    rated = valid_verdicts()
    for row in await read_rows(tx, select(rated).where(rated.c.item.in_(answered)).limit(_ROWS_MAX)):
        is_score = queue.rules.question == "score"
        answered[bytes(row["item"])].by_rater[row["rater"]] = float(row["answer"]) if is_score else row["answer"]
    await _add_judges(tx, queue, list(answered.values()))
    return list(answered.values())


async def _add_judges(tx: AsyncConnection, queue: Queue, items: Sequence[AnsweredItem]) -> None:
    """Add to each item the answers that the rewards of judges imply. Rewards imply answers to scores and pairs only."""
    if queue.rules.question in ("label", "edit"):
        return
    sessions = tables.sessions
    query = rewards_query(sessions.c.id.label("session")).where(
        sessions.c.id.in_({item.session for item in items}), tables.rewards.c.value.is_not(None)
    )
    rows = await read_rows(tx, query.limit(_ROWS_MAX))
    texts = await texts_of(tx, {row["source"] for row in rows})
    rewards: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        if texts[row["source"]].startswith(_JUDGE_PREFIX):
            rewards.setdefault((row["session"], texts[row["source"]]), []).append(row)
    by_session = {item.session: item for item in items}
    for (session, judge), of_judge in rewards.items():
        answer = _answer_of(queue, by_session[session], of_judge)
        if answer is not None:
            by_session[session].by_judge[judge] = answer


def _answer_of(queue: Queue, item: AnsweredItem, rewards: Sequence[Row]) -> Hashable | None:
    """Return the answer that a judge's rewards imply: the nearest score, or the choice of the pair with the higher
    reward.
    """
    about_turn = {row["choice"]: row["value"] for row in rewards if row["turn"] == item.turn and item.turn}
    if queue.rules.question == "pair":
        return _better(item, about_turn)
    about_run = [row["value"] for row in rewards if not row["turn"]]
    values = list(about_turn.values()) if queue.rules.about == "answer" and about_turn else about_run
    if not values:
        return None
    return nearest_score(values[-1])


def _better(item: AnsweredItem, values: Mapping[int, float]) -> Hashable | None:
    """Return the choice of a pair with the higher reward, or None if a choice has no reward."""
    first, second = pair_of(item.id, item.choices)
    if first not in values or second not in values:
        return None
    if values[first] == values[second]:
        return SAME
    return str(first if values[first] > values[second] else second)
