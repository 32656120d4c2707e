"""Rule that decides which turns are left out of training, shared by the collector, the gateway and the account."""

from __future__ import annotations

from headrace_schemas.events.trajectory import LeftOut, LeftOutReason
from headrace_schemas.events.turn import Turn

SIDE_CALL = "side_call"
"""`Trajectory.untrained` of calls that a client made beside its task."""
NO_TOOLS = "no_tools"
"""`Turn.side_call` of a call that may be a side call, because an agent's client offers no tools in it."""


def left_out_reason(turn: Turn) -> LeftOutReason | None:
    """Return the reason why the turn cannot be in a branch, or None if it can.

    The reason `retried` is missing here, because only a later turn reveals a retry.
    """
    if not turn.delivered:
        return "undelivered"
    if not any(choice.token_ids for choice in turn.choices):
        return "empty"
    return None if turn.sampling.untruncated else "truncated_sampling"


def left_out(turn: Turn, reason: LeftOutReason) -> LeftOut:
    """Return the `left_out` entry of a trajectory for the turn.

    Sampling can be truncated in several ways. `detail` names a grammar, which the client may not have requested itself.
    """
    has_grammar = reason == "truncated_sampling" and turn.sampling.grammar is not None
    return LeftOut(turn_id=turn.turn_id, reason=reason, version=turn.version, detail="grammar" if has_grammar else None)


def untrained_reason(turn: Turn) -> str | None:
    """Return the reason why feedback about the turn is not trained, as the account names it, or None if it may be."""
    if turn.purpose == "eval":
        return "eval"
    if turn.untrained is not None:
        return turn.untrained
    reason = left_out_reason(turn)
    return None if reason is None else left_out(turn, reason).full_reason
