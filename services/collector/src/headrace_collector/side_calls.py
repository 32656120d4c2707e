"""Finds side calls: calls that a client made in the session of a task and that are no part of the task."""

from __future__ import annotations

from collections.abc import Sequence

from headrace_collector.facts import TurnFacts
from headrace_schemas.events.trajectory import NO_TOOLS


def side_call_ids(turns: Sequence[TurnFacts]) -> frozenset[str]:
    """Return the ids of the side calls of a session.

    The gateway's guess holds if the session has calls with tools, and if none of these begins with the message that the
    call begins with, which is the system prompt in most cases.
    """
    first_messages = {turn.opening for turn in turns if turn.side_call is None}
    return frozenset(
        turn.turn_id
        for turn in turns
        if turn.side_call is not None
        and (turn.side_call != NO_TOOLS or (first_messages and turn.opening not in first_messages))
    )
