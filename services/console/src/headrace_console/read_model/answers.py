"""The answers to the items of a queue, by raters and by judges."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_console.read_model import review_tables, tables
from headrace_console.read_model.packing import unpack_id
from headrace_console.read_model.queries import Row, read_rows, rewards_query, texts_of
from headrace_console.read_model.queues import Queue, nearest_score, of_queue, valid_verdicts
from headrace_console.read_model.verdicts import SAME, pair_of

ITEMS_MAX = 500
"""Largest number of compared items: those of the random part that were drawn last."""
_JUDGE_PREFIX = "judge:"
_ROWS_MAX = 20_000


@dataclass(slots=True)
class AnsweredItem:
    """An item that was drawn at random, with its answers."""

    id: str
    session: int
    session_key: str
    turn: int
    choices: int
    """Number of answers of the turn."""
    by_rater: dict[str, Hashable] = field(default_factory=dict)
    """Valid answer by rater: a number for a score, otherwise a text."""
    by_judge: dict[str, Hashable] = field(default_factory=dict)
    """Answer by judge, as its reward implies it."""
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
    """Add the answers that the rewards of judges imply. No reward implies a label or an edit."""
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
    """Return the answer that a judge's rewards imply: the nearest score, or the choice with the higher reward."""
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
