"""Review queues: their rules, the items that they draw from sessions, and the progress of raters.

Every function runs in the transaction of the caller. Functions that change a queue need a locked queue (`queue_of`), so
that two raters do not reserve the same rating of an item.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from pydantic import Field
from sqlalchemy import ColumnElement, Subquery, func, insert, select, true, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_console.read_model import queries, review_tables, tables
from headrace_console.read_model.packing import pack_id
from headrace_console.read_model.queries import Row, captured_turns, first_row, read_rows, texts_of
from headrace_console.read_model.session_list import Filter, session_page
from headrace_console.read_model.verdicts import belongs_to_the_random_part, item_id
from headrace_console.settings import Scope, User
from headrace_runtime.storage.tables import insert_new
from headrace_schemas.values.base import Model

QUEUES_MAX = 200
"""Largest number of queues of one tenant, including closed ones."""
ITEMS_MAX = 2_000
RANGE_SESSIONS = 1_000
"""Newest sessions of the range from which items are drawn at random."""
_DRAWN_AT_ONCE = 20
_PAGES_MAX = 3
Question = Literal["score", "label", "pair", "edit"]
SCORES = ("0", "0.25", "0.5", "0.75", "1")
_SCORE_VALUES = tuple(map(float, SCORES))
_SCORE_LIMITS = [(lower + upper) / 2 for lower, upper in pairwise(_SCORE_VALUES)]
"""Values between which a score is the nearest one. A page compares thousands of values."""


def nearest_score(value: float) -> float:
    """Return the score of `SCORES` that is nearest to a value."""
    return _SCORE_VALUES[bisect_left(_SCORE_LIMITS, value)]


class QueueRules(Model):
    """Rules of a review queue: its question, its items and its raters. They are fixed when the queue is created."""

    question: Question
    about: Literal["answer", "session"] = "answer"
    rubric: str = Field(min_length=1, max_length=4000)
    labels: tuple[str, ...] = ()
    ratings: int = Field(default=1, ge=1, le=5)
    """Number of raters of each item."""
    reserved_s: int = Field(default=600, ge=60, le=86_400)
    items_max: int = Field(default=200, ge=1, le=ITEMS_MAX)
    raters: tuple[str, ...] = ()
    """Names of the raters; empty if all raters of the tenant may rate."""
    filter: dict[str, str] = Field(default_factory=dict)
    """Query parameters of the list of sessions."""


@dataclass(frozen=True, slots=True)
class Queue:
    """Queue of sessions or answers that people review in the console, by rating, labelling, comparing or editing."""

    id: int
    tenant: int
    tenant_name: str
    name: str
    rules: QueueRules
    closed: bool

    def is_visible_to(self, user: User) -> bool:
        """Return whether the queue exists for a user. A rater sees only the queues for all raters or with its name."""
        if not user.scope.permits(self.tenant_name):
            return False
        return user.has_role("viewer") or not self.rules.raters or user.name in self.rules.raters


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a review queue: the number of its items, and how many of them each rater has rated."""

    items: int
    by_rater: Mapping[str, int]


def of_queue(queue: Queue) -> ColumnElement[bool]:
    """Return the SQL condition that an item belongs to the queue."""
    table = review_tables.items
    return (table.c.tenant == queue.tenant) & (table.c.queue == queue.name)


async def add_queue(tx: AsyncConnection, tenant: int, name: str, rules: QueueRules, now_ms: int) -> int | None:
    """Store a queue and return its number, or None if the tenant has a queue of this name or its maximum of queues."""
    table = review_tables.queues
    number = (await tx.scalar(select(func.max(table.c.id))) or 0) + 1
    used = await tx.scalar(select(func.count()).where(table.c.tenant == tenant)) or 0
    existing = await tx.scalar(select(table.c.id).where(table.c.tenant == tenant, table.c.name == name))
    if used >= QUEUES_MAX or existing is not None:
        return None
    row = {"id": number, "tenant": tenant, "name": name, "rules": rules.model_dump_json(), "closed": False}
    await tx.execute(insert(table), [{**row, "created_ms": now_ms}])
    return number


async def close_queue(tx: AsyncConnection, queue: Queue) -> None:
    """Stop the queue from offering items."""
    table = review_tables.queues
    await tx.execute(update(table).where(table.c.id == queue.id).values(closed=True))


async def queues_of(tx: AsyncConnection, user: User) -> list[Queue]:
    """Return the queues that a user may see, the newest first."""
    table, tenants = review_tables.queues, await _tenant_names(tx, user.scope)
    query = select(table).where(table.c.tenant.in_(tenants)).order_by(table.c.id.desc()).limit(QUEUES_MAX)
    queues = [_queue(row, tenants) for row in await read_rows(tx, query)]
    return [queue for queue in queues if queue.is_visible_to(user)]


async def queue_of(tx: AsyncConnection, user: User, number: int, *, locked: bool = False) -> Queue | None:
    """Return the queue with this number, or None if there is none that the user may see.

    With `locked`, other transactions cannot change the queue until this one ends.
    """
    query = select(review_tables.queues).where(review_tables.queues.c.id == number)
    row = await first_row(tx, query.with_for_update() if locked else query)
    if row is None:
        return None
    queue = _queue(row, await texts_of(tx, [row["tenant"]]))
    return queue if queue.is_visible_to(user) else None


async def _tenant_names(tx: AsyncConnection, scope: Scope) -> dict[int, str]:
    return {number: name for name, number in (await queries.tenants(tx, scope)).items()}


def _queue(row: Row, tenants: Mapping[int, str]) -> Queue:
    rules = QueueRules.model_validate_json(row["rules"])
    return Queue(row["id"], row["tenant"], tenants[row["tenant"]], row["name"], rules, row["closed"])


async def progress_of(tx: AsyncConnection, queue: Queue) -> Progress:
    """Return the progress of a queue."""
    items, rated = review_tables.items, valid_verdicts()
    number = await tx.scalar(select(func.count()).select_from(items).where(of_queue(queue))) or 0
    query = select(rated.c.rater, func.count()).join(items, items.c.name == rated.c.item).where(of_queue(queue))
    rows = await tx.execute(query.group_by(rated.c.rater).order_by(func.count().desc()).limit(50))
    return Progress(number, {row[0]: row[1] for row in rows})


def valid_verdicts() -> Subquery:
    """Return a subquery for the latest verdict of each rater about each item, without withdrawn verdicts."""
    table, later = review_tables.verdicts, review_tables.verdicts.alias()
    is_revised = (
        select(later.c.number)
        .where(later.c.item == table.c.item, later.c.rater == table.c.rater, later.c.number > table.c.number)
        .exists()
    )
    return select(table).where(table.c.answer.is_not(None), ~is_revised).subquery()


async def draw_items(tx: AsyncConnection, queue: Queue, selection: Filter) -> int:
    """Add the next items to a queue, and return their number.

    With a filter, at least a fifth of the items is drawn at random from all sessions of the filter's time range. With
    an empty filter, all items are drawn at random.

    Args:
        tx: the transaction.
        queue: the queue, which must be locked.
        selection: the queue's filter.
    """
    items = review_tables.items
    drawn = await tx.execute(select(func.count(), func.max(items.c.position)).where(of_queue(queue)))
    number, last = drawn.one()
    count = min(_DRAWN_AT_ONCE, queue.rules.items_max - number)
    if count <= 0:
        return 0
    is_filtered = selection != Filter(since_ms=selection.since_ms)
    chosen: dict[str, tuple[int, int]] = {}
    if is_filtered:
        chosen = await _draw_matching(tx, queue, selection, max(1, count * 4 // 5))
        count = (len(chosen) + 3) // 4
    at_random = await _draw_at_random(tx, queue, selection.since_ms or 0, count, from_all=not is_filtered)
    rows = [
        {
            "name": pack_id(item),
            "tenant": queue.tenant,
            "queue": queue.name,
            "position": (last or 0) + at,
            "session": session,
            "turn": turn,
            "drawn_at_random": item in at_random,
        }
        for at, (item, (session, turn)) in enumerate(sorted({**chosen, **at_random}.items()), 1)
    ]
    if rows:
        await tx.execute(insert_new(tx, items, ("name",)), rows)
    return len(rows)


async def _draw_matching(
    tx: AsyncConnection, queue: Queue, selection: Filter, number: int
) -> dict[str, tuple[int, int]]:
    """Search for at most `number` new sessions that match the filter of a review queue.

    The search reads a few pages of sessions from the newest on. If these are not enough, it reads a few more, older
    than the oldest session that the filter has added to the queue before.

    Returns:
        Item id to the ids of its session and of the turn to review.
    """
    chosen: dict[str, tuple[int, int]] = {}
    for after in (None, await _oldest_drawn(tx, queue)):
        position = after
        for _ in range(_PAGES_MAX):
            page = await session_page(tx, queue.tenant, replace(selection, after=position))
            keys = {item_id(queue.tenant_name, queue.name, row["session_key"]): row["id"] for row in page.rows}
            candidates = {item: session for item, session in keys.items() if not belongs_to_the_random_part(item)}
            chosen |= await _new_items_with_turns(tx, queue, candidates, number - len(chosen))
            position = page.after
            if len(chosen) >= number or position is None:
                break
        if len(chosen) >= number:
            break
    return chosen


async def _oldest_drawn(tx: AsyncConnection, queue: Queue) -> tuple[int, int] | None:
    """Return the list position of the oldest session that was drawn because of the filter."""
    items, sessions = review_tables.items, tables.sessions
    query = select(sessions.c.began_ms, sessions.c.id).join(items, items.c.session == sessions.c.id)
    query = query.where(of_queue(queue), ~items.c.drawn_at_random).order_by(sessions.c.began_ms, sessions.c.id)
    row = (await tx.execute(query.limit(1))).first()
    return None if row is None else (row.began_ms, row.id)


async def _draw_at_random(
    tx: AsyncConnection, queue: Queue, since_ms: int, number: int, *, from_all: bool
) -> dict[str, tuple[int, int]]:
    """Draw at most `number` new items in the pseudo-random order of their ids, which are hashes of the sessions.

    Args:
        since_ms: time after which a session must have begun. Only the newest `RANGE_SESSIONS` of these sessions are
            drawn.
        from_all: draw from all of these sessions; otherwise only from the fifth that `belongs_to_the_random_part`.

    Returns:
        Item id to the ids of its session and of the turn to review.
    """
    table = tables.sessions
    query = select(table.c.id, table.c.session_key).where(
        table.c.tenant == queue.tenant, table.c.began_ms > max(0, since_ms - 1)
    )
    rows = await tx.execute(query.order_by(table.c.began_ms.desc(), table.c.id.desc()).limit(RANGE_SESSIONS))
    keys = {item_id(queue.tenant_name, queue.name, row.session_key): row.id for row in rows}
    candidates = {item: keys[item] for item in sorted(keys) if from_all or belongs_to_the_random_part(item)}
    return await _new_items_with_turns(tx, queue, candidates, number)


async def _new_items_with_turns(
    tx: AsyncConnection, queue: Queue, candidates: Mapping[str, int], number: int
) -> dict[str, tuple[int, int]]:
    """Choose up to `number` sessions to add to a review queue.

    Args:
        candidates: item id to session id, in the order of preference.

    Returns:
        For each chosen item its session id and the id of a turn to review. Items that are in the queue already are left
        out, and so are sessions without a turn that fits the queue's question (`pair` needs a turn with two answers).
    """
    present = await _names_in_queue(tx, [pack_id(item) for item in candidates])
    chosen: dict[str, tuple[int, int]] = {}
    has_answers = tables.turns.c.choices > 1 if queue.rules.question == "pair" else true()
    for item, session in candidates.items():
        if len(chosen) >= number:
            break
        if pack_id(item) in present:
            continue
        turn = await first_row(tx, captured_turns(session).where(has_answers))
        if turn is not None:
            chosen[item] = session, turn["id"]
    return chosen


async def _names_in_queue(tx: AsyncConnection, names: Collection[bytes]) -> set[bytes]:
    table = review_tables.items
    rows = await tx.execute(select(table.c.name).where(table.c.name.in_(names)))
    return {bytes(name) for name in rows.scalars()}
