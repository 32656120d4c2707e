"""Which turns are left out of training, by one rule for the collector, the gateway and the account."""

from __future__ import annotations

from headrace_schemas.events.trajectory import LeftOut, LeftOutReason
from headrace_schemas.events.turn import Turn


def left_out_reason(turn: Turn) -> LeftOutReason | None:
    """Return why no branch can hold the turn; None if one can. Only a later turn shows that it was retried."""
    if not turn.delivered:
        return "undelivered"
    if not any(choice.token_ids for choice in turn.choices):
        return "empty"
    return None if turn.sampling.untruncated else "truncated_sampling"


def left_out(turn: Turn, reason: LeftOutReason) -> LeftOut:
    """Return the entry of a trajectory for a turn that is left out.

    More than one thing truncates: a grammar is named in `detail`, as the client may not have asked for less.
    """
    held = reason == "truncated_sampling" and turn.sampling.grammar is not None
    return LeftOut(turn_id=turn.turn_id, reason=reason, version=turn.version, detail="grammar" if held else None)


def untaught_reason(turn: Turn) -> str | None:
    """Return why feedback about the turn trains nothing, in the words of the account; None if it may train."""
    if turn.purpose == "eval":
        return "eval"
    if turn.untrained is not None:
        return turn.untrained
    reason = left_out_reason(turn)
    return None if reason is None else left_out(turn, reason).why
