"""The facts about a turn that determine its run: small, so that a whole session can be read at once."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from headrace_collector import digests
from headrace_runtime.clock import epoch_ms
from headrace_schemas import Turn


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """Facts about one turn. `prefixes` and `replies` are digests (`headrace_collector.digests`); times are ms since
    1970."""

    turn_id: str
    model: str
    explicit: bool
    """Whether the client named the session. Otherwise several runs with the same opening may share its key."""
    task_id: str | None
    run_id: str | None
    request_digest: str
    retry: int
    delivered: bool
    log_offset: int
    """Its offset on `turns`, which orders turns independently of all clocks."""
    time_ms: int
    seen_ms: int
    """When this service first processed it."""
    completions: int
    tokens: int
    """Length of its longest branch: the prompt and the longest completion."""
    prefixes: tuple[bytes, ...]
    replies: tuple[bytes, ...]
    side_call: str | None = None
    """The kind of a call beside the client's task, as in the turn."""
    agent: str | None = None
    """The sub-agent that made the call."""
    repeats: str | None = None
    """The earlier turn whose request the call repeats."""
    trajectory_id: str | None = None
    """The trajectory that contains it; None while its run is open."""

    @property
    def order(self) -> tuple[int, int, int, str]:
        """Sort key that puts a turn after every turn that it continues or repeats."""
        return (len(self.prefixes), self.retry, self.log_offset, self.turn_id)


def turn_facts(turn: Turn, seen: datetime, log_offset: int) -> TurnFacts:
    """Return the facts about a turn with this offset on `turns`."""
    prefixes = digests.prefix_digests(turn.messages)
    return TurnFacts(
        turn_id=turn.turn_id,
        model=turn.model,
        explicit=turn.session_source != "implicit",
        task_id=turn.task_id,
        run_id=turn.run_id,
        request_digest=turn.request_digest,
        retry=turn.retry,
        delivered=turn.delivered,
        log_offset=log_offset,
        time_ms=epoch_ms(turn.time),
        seen_ms=epoch_ms(seen),
        completions=len(turn.choices),
        tokens=len(turn.prompt_token_ids) + max(len(choice.token_ids) for choice in turn.choices),
        prefixes=prefixes,
        replies=digests.reply_digests(turn, digests.request_digest(turn.messages, prefixes)),
        side_call=turn.side_call,
        agent=turn.sub_agent.agent if turn.sub_agent else None,
        repeats=turn.repeats,
    )
