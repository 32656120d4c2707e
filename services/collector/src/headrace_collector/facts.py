"""The facts about a turn that decide its run. They are small, so a whole session can be read at once."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from headrace_collector import digests
from headrace_runtime.clock import epoch_ms
from headrace_schemas import Turn


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """`prefixes` and `replies` are digests of `headrace_collector.digests`; times are milliseconds since 1970."""

    turn_id: str
    model: str
    explicit: bool
    """Whether the client named the session; otherwise several runs that open alike may share its key."""
    task_id: str | None
    run_id: str | None
    request_digest: str
    retry: int
    delivered: bool
    place: int
    """Its offset on `turns`: the order in which turns were captured, whatever any clock says."""
    time_ms: int
    seen_ms: int
    """When this service first saw it."""
    completions: int
    tokens: int
    """Length of its longest branch: the prompt and the longest completion."""
    prefixes: tuple[bytes, ...]
    replies: tuple[bytes, ...]
    trajectory_id: str | None = None
    """Of the trajectory that it went into; None while its run is open."""

    @property
    def order(self) -> tuple[int, int, int, str]:
        """Sorts a turn behind every turn that it continues or repeats."""
        return (len(self.prefixes), self.retry, self.place, self.turn_id)


def facts_of(turn: Turn, seen: datetime, place: int) -> TurnFacts:
    prefixes = digests.prefixes(turn.messages)
    return TurnFacts(
        turn_id=turn.turn_id,
        model=turn.model,
        explicit=turn.session_source != "implicit",
        task_id=turn.task_id,
        run_id=turn.run_id,
        request_digest=turn.request_digest,
        retry=turn.retry,
        delivered=turn.delivered,
        place=place,
        time_ms=epoch_ms(turn.time),
        seen_ms=epoch_ms(seen),
        completions=len(turn.choices),
        tokens=len(turn.prompt_token_ids) + max(len(choice.token_ids) for choice in turn.choices),
        prefixes=prefixes,
        replies=digests.replies(turn, prefixes[-1]),
    )
