"""The facts about a turn that determine its run: small, so that a whole session can be read at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime

from headrace_collector import digests
from headrace_runtime.clock import epoch_ms
from headrace_schemas import Turn


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """Facts about one turn. `prefixes` and `replies` are digests (`headrace_collector.digests`); times are ms since
    1970.

    A turn that extends another one (`base`) has the digests of the messages after the first `shared_messages` alone.
    """

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
    extends: str | None = None
    """The id of the turn that it extends."""
    shared_messages: int = 0
    sequences: int = 1
    """Number of its completions that may begin a sequence of their own, because they continue no other one."""
    added_tokens: int = 0
    """Number of its tokens that the turn that it extends does not have."""
    base: TurnFacts | None = field(default=None, compare=False, repr=False)
    """The turn that it extends, if that one was read, too."""
    opening: bytes = field(init=False, compare=False, repr=False)
    """Digest of the first message."""

    def __post_init__(self) -> None:
        inherited = self.base.opening if self.base is not None and self.shared_messages else self.prefixes[0]
        object.__setattr__(self, "opening", inherited)

    @property
    def messages(self) -> int:
        """Number of messages of the prompt."""
        return self.shared_messages + len(self.prefixes)

    @property
    def order(self) -> tuple[int, int, int, str]:
        """Sort key that puts a turn after every turn that it continues or repeats."""
        return (self.messages, self.retry, self.log_offset, self.turn_id)

    def newest_prefixes(self) -> Iterator[bytes]:
        """Yield the digests of the prefixes of its conversation, the longest first."""
        turn: TurnFacts | None = self
        count = self.messages
        while turn is not None:
            yield from reversed(turn.prefixes[: max(0, count - turn.shared_messages)])
            count = min(count, turn.shared_messages)
            turn = turn.base


@dataclass(frozen=True, slots=True)
class SharedHistory:
    """The part of a turn's prompt that the turn that it extends has stored."""

    messages: int = 0
    digest: bytes = b""
    """Digest of the conversation of these messages."""
    answer: bytes | None = None
    """Digest of the next message if it is the answer of the extended turn, which the event then does not contain."""
    continues: bool = False
    """Whether the turn is the first that continues that answer's tokens."""


NOTHING_SHARED = SharedHistory()


def turn_facts(turn: Turn, seen: datetime, log_offset: int, shared: SharedHistory = NOTHING_SHARED) -> TurnFacts:
    """Return the facts about a turn with this offset on `turns`."""
    answer = () if shared.answer is None else (shared.answer,)
    prefixes = answer + digests.prefix_digests(turn.messages, shared.answer or shared.digest)
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
        tokens=turn.usage.prompt_tokens + max(len(choice.token_ids) for choice in turn.choices),
        prefixes=prefixes,
        replies=digests.reply_digests(turn, digests.conversation_digest(prefixes, shared.digest)),
        side_call=turn.side_call,
        agent=turn.sub_agent.agent if turn.sub_agent else None,
        repeats=turn.repeats,
        extends=turn.extends.turn_id if turn.extends else None,
        shared_messages=shared.messages,
        sequences=len(turn.choices) - shared.continues,
        added_tokens=len(turn.prompt_token_ids) + turn.usage.completion_tokens,
    )
