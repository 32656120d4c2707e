"""Stream handlers of the collector. Their effects depend only on the event and the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_collector import ends, prompts, store
from headrace_collector.closing import RunWithFeedback, close_runs
from headrace_collector.ends import End
from headrace_collector.facts import turn_facts
from headrace_collector.runs import SessionRun
from headrace_collector.schema import feedback as feedback_table
from headrace_collector.settings import CollectorSettings
from headrace_runtime.clock import epoch_ms
from headrace_runtime.errors import InvalidEvent
from headrace_runtime.storage.tables import upsert
from headrace_runtime.stream.processor import Handling
from headrace_schemas import Event, Feedback, SessionEnd, Turn
from headrace_schemas.values.base import MAX_LENGTH
from headrace_schemas.values.bounds import PROMPT_MESSAGES_MAX
from headrace_schemas.values.ids import key_of_response, session_key
from headrace_schemas.values.text import printable

SEQUENCES_MAX = 800
"""Number of open completions at which a session is closed (`limit`), so that all fit into one trajectory. A completion
whose turn extends another one's answer (`Turn.extends`) does not count."""
_BRANCH_TOKENS_MAX = 4_000_000
"""Tokens of the longest branch (a prompt and its completion) at which a session is closed (`limit`)."""
_COMPLETIONS_MAX = 4000
"""Number of open completions at which a session is closed: a branch holds 4,096 spans."""
_ADDED_TOKENS_MAX = 64_000_000
"""Number of tokens that the open turns of a session add, at which the session is closed. It limits memory use."""
ENDS_OF = {"session-ends": ("turns", "feedback"), "feedback": ("turns",)}
"""Topics whose earlier records an end must not overtake. Feedback may list the turns of a run, so an end waits for it,
too."""


@dataclass(frozen=True, slots=True)
class Collector:
    """Stream handlers of the collector.

    `started` is the time at which this process started: time before it does not count when runs become idle or ends
    overdue.
    """

    settings: CollectorSettings
    started: datetime

    async def on_turn(self, turn: Turn, handling: Handling) -> Sequence[Event]:
        """Store a turn. If its session has become too large, close the runs that were idle for longest.

        Raises:
            InvalidEvent: the turn is too long, does not belong to the session that it names, or extends an unknown
                turn.
        """
        _check_session(turn)
        _check_size(turn)
        turn, shared = await prompts.resolve(handling.tx, turn)
        check_ms = epoch_ms(handling.now + timedelta(seconds=self.settings.idle_s))
        facts = turn_facts(turn, handling.now, handling.received.log_offset, shared)
        size = await store.add_turn(handling.tx, turn, facts, handling.received.record.partition, check_ms)
        if size is None or not self._is_too_large(size):
            return []
        key, tenant = turn.session_key, turn.tenant
        return await close_runs(handling.tx, handling.now, self.settings, key, tenant, "limit", self._surplus_runs)

    async def on_feedback(self, feedback: Feedback, handling: Handling) -> Sequence[Event]:
        """Store feedback until its run is closed. If the feedback ends its session, store this request too.

        Feedback about a task is ignored.
        """
        if feedback.level == "task":
            return []
        record = handling.received.record
        until = handling.ends["turns"].get(record.partition, 0)
        after = handling.received.envelope.after or {}
        row = {
            "session_key": feedback.session_key,
            "partition": record.partition,
            "source_offset": handling.received.log_offset,
            "turns_until": after.get("turns", until),
            "at_ms": epoch_ms(handling.now),
            "resolved": False,
            "payload": feedback.to_json(),
        }
        await upsert(handling.tx, feedback_table, {"event_id": handling.received.identity}, row, update=False)
        if feedback.ends_session:
            end = End(
                tenant=feedback.tenant,
                session_key=feedback.session_key,
                partition=record.partition,
                reason="feedback",
                turns_until=until,
                msg_ids=feedback.msg_ids,
            )
            await ends.store_ends(handling.tx, handling.now, end)
        return []

    async def on_session_end(self, end: SessionEnd, handling: Handling) -> Sequence[Event]:
        """Store a request to end a session or all sessions of a tenant; the request takes effect once the turns before
        it were processed.

        Raises:
            InvalidEvent: the event names a session without its key.
        """
        if end.scope == "session" and end.session_key is None:
            raise InvalidEvent("invalid_event", "session_key: is missing; the end of a session needs it")
        partition = handling.received.record.partition
        remembered = End(
            tenant=end.tenant,
            session_key=end.session_key if end.scope == "session" else None,
            partition=partition,
            reason=end.reason if end.scope == "session" else "commit",
            turns_until=handling.ends["turns"].get(partition, 0),
            feedback_until=handling.ends["feedback"].get(partition, 0),
            before_ms=epoch_ms(end.before) if end.before and end.scope == "tenant" else None,
        )
        await ends.store_ends(handling.tx, handling.now, remembered)
        return []

    async def apply_due_ends(self, tx: AsyncConnection, now: datetime) -> Sequence[Event]:
        """Close the sessions whose ends are due, now that more records were processed."""
        return await ends.apply_ends(tx, now, self.settings, self.started)

    def _is_too_large(self, size: store.SessionSize) -> bool:
        return (
            size.sequences >= SEQUENCES_MAX
            or size.completions >= _COMPLETIONS_MAX
            or size.longest_tokens >= _BRANCH_TOKENS_MAX
            or size.added_tokens >= _ADDED_TOKENS_MAX
        )

    def _surplus_runs(self, candidates: Sequence[RunWithFeedback]) -> Sequence[RunWithFeedback]:
        """Return the runs to close in a session that is too large.

        These are runs that are too large themselves, and older runs that do not fit, with the newest run, into half of
        the bounds on completions and on new tokens. Half of the bounds remain free, so that not every further turn
        closes a run.
        """
        surplus: list[RunWithFeedback] = []
        remaining: list[SessionRun] = []
        for candidate in sorted(candidates, key=lambda candidate: candidate.run.seen_ms, reverse=True):
            together = store.SessionSize.of([*remaining, candidate.run])
            crowded = bool(remaining) and (
                together.sequences >= SEQUENCES_MAX / 2
                or together.completions >= _COMPLETIONS_MAX / 2
                or together.added_tokens >= _ADDED_TOKENS_MAX / 2
            )
            if crowded or self._is_too_large(store.SessionSize.of([candidate.run])):
                surplus.append(candidate)
            else:
                remaining.append(candidate.run)
        return surplus


def _check_session(turn: Turn) -> None:
    """Check that session key and turn id belong to the turn's tenant and session.

    Raises:
        InvalidEvent: one of them belongs to another session.
    """
    if turn.session_key != session_key(turn.tenant, turn.session_id):
        raise InvalidEvent("foreign_session_key", "session_key: does not match tenant and session_id")
    if key_of_response(turn.turn_id) not in (None, turn.session_key):
        raise InvalidEvent("foreign_turn_id", f"turn_id: {printable(turn.turn_id)!r} is of another session")


def _check_size(turn: Turn) -> None:
    longest = turn.usage.prompt_tokens + max(len(choice.token_ids) for choice in turn.choices)
    if longest > MAX_LENGTH:
        raise InvalidEvent("too_long", f"prompt and answer have {longest} tokens, a branch holds {MAX_LENGTH}")
    if turn.message_count > PROMPT_MESSAGES_MAX:
        raise InvalidEvent(
            "too_long", f"{turn.message_count} messages, a dialogue holds {PROMPT_MESSAGES_MAX} and the answer"
        )
