"""Look-up of the session and the turn that a path names, and of the whole prompt of a turn."""

from __future__ import annotations

import re

from headrace_console.pages.page import NotFound, Visit
from headrace_console.read_model import queries
from headrace_console.read_model.queries import Row
from headrace_runtime.errors import Refused
from headrace_schemas import Turn
from headrace_schemas.rules.turn_history import extend
from headrace_schemas.values.errors import InvalidEvent

NUMBER = re.compile(r"[0-9]{1,18}")
_EARLIER_TURNS_MAX = 256
"""Largest number of earlier turns that are read to complete a prompt of which the event has only the end."""


async def find_session(visit: Visit) -> Row:
    """Return the session of the path. Raises `NotFound`, also if the user may not see its tenant."""
    async with visit.transaction() as tx:
        session = await queries.session_of(tx, visit.user.scope, visit.path("key"))
    if session is None:
        raise NotFound
    return session


async def find_turn(visit: Visit, session: Row, number: str) -> Row:
    """Return the captured turn of a session with this number. Raises `NotFound`."""
    turn = None
    if NUMBER.fullmatch(number):
        async with visit.transaction() as tx:
            turn = await queries.turn_in_session(tx, session["id"], int(number))
    if turn is None:
        raise NotFound
    return turn


async def read_turn(visit: Visit, row: Row) -> Turn | None:
    """Return the event of a turn, or None if it has expired or the bus does not answer."""
    event = await visit.parts.records.read_row("turns", row)
    return event if isinstance(event, Turn) else None


async def whole_turn(visit: Visit, turn: Turn) -> Turn:
    """Return a turn with its whole prompt, which may be in earlier turns. Raises `Refused` 409 if one has expired."""
    chain = [turn]
    problem = "The prompt cannot be put together: an earlier turn has expired, or the bus does not answer."
    while (reference := chain[-1].extends) is not None:
        async with visit.transaction() as tx:
            record = await queries.turn_of(tx, visit.user.scope, reference.turn_id)
        earlier = await read_turn(visit, record[1]) if record is not None else None
        if earlier is None or len(chain) > _EARLIER_TURNS_MAX:
            raise Refused(409, "expired", problem)
        chain.append(earlier)
    complete_turn = chain.pop()
    try:
        while chain:
            complete_turn = extend(complete_turn, chain.pop())
    except InvalidEvent:
        raise Refused(409, "expired", problem) from None
    return complete_turn
