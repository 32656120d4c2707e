"""The conversation of an item, without anything but its texts."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_console.pages.feedback import editable_answer
from headrace_console.pages.session import message_text
from headrace_console.read_model import tables
from headrace_console.read_model.queries import Row, position_of
from headrace_schemas import Turn
from headrace_schemas.rules.turn_history import TurnHistory
from headrace_schemas.values.errors import InvalidEvent

TURNS_MAX = 20
_MESSAGES_MAX = 40


@dataclass(frozen=True, slots=True)
class Transcript:
    """Messages before the answers of a turn, and these answers. Texts and roles are all that a rater may see."""

    messages: Sequence[tuple[str, str]]
    """Role and text of each message."""
    answers: Sequence[str]
    editable: tuple[str, str] | None
    """Text and tool calls of the first answer, as the form of an edit has them; None if it is too long for a form."""
    is_cut: bool
    """Whether earlier messages are left out."""


async def turns_until(tx: AsyncConnection, turn: Row) -> Sequence[Row]:
    """Return the rows of the last `TURNS_MAX` turns of a session up to a turn, the oldest first."""
    table = tables.turns
    is_earlier = tuple_(table.c.at_ms, table.c.id) <= tuple_(turn["at_ms"], turn["id"])
    query = select(table).where(table.c.session == turn["session"], table.c.log_offset >= 0, is_earlier)
    rows = await tx.execute(query.order_by(table.c.at_ms.desc(), table.c.id.desc()).limit(TURNS_MAX))
    return [dict(row) for row in rows.mappings()][::-1]


def transcript_of(rows: Sequence[Row], events: Mapping[tuple[int, int], object]) -> Transcript | None:
    """Return the conversation of turns, or None if the text of the last one has expired."""
    events = {position_of(row): events.get(position_of(row)) for row in rows}
    turns = [event for event in events.values() if isinstance(event, Turn)]
    if not turns or events[position_of(rows[-1])] is not turns[-1]:
        return None
    history, last = TurnHistory(), turns[-1]
    for turn in turns:
        with contextlib.suppress(InvalidEvent):  # its beginning is not among the rows
            last = history.whole_turn(turn)
    if last.turn_id != turns[-1].turn_id:
        last = turns[-1]
    messages = [(message.role, message_text(message)) for message in last.messages]
    answers = [message_text(choice.message) for choice in last.choices]
    is_cut = len(messages) > _MESSAGES_MAX or last.extends is not None
    return Transcript(messages[-_MESSAGES_MAX:], answers, editable_answer(last.choices[0].message), is_cut)
