"""`feedback` and `session-ends`: what the world outside says about a session."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue

from headrace_schemas.base import Event, Finite, LongText, SessionKey, Text, Timestamp
from headrace_schemas.ids import derived_id, key_of_response


class Feedback(Event):
    """A verdict from outside on a session or on some of its turns. Accepted first, joined later, revisable any time.

    The last one on the log per (`source`, target) wins; `time` decides nothing. `msg_ids` say exactly which turns of
    the session are meant and make them one run; without them the feedback is about the session, and there about what
    had begun last when it was given. A `value` of None with `withdrawn` false only attaches `context`, `task_id` or
    `run_id`.
    """

    topic: ClassVar[str] = "feedback"
    type: ClassVar[str] = "headrace.feedback.v1"

    feedback_id: Text
    """Given by the client to make its own retries harmless, else a fresh UUIDv7."""
    session_key: SessionKey
    session_id: Text | None = None
    tenant: Text = "default"
    msg_ids: tuple[Text, ...] = Field(default=(), max_length=4096)
    sessions: Annotated[int, Field(ge=1)] = 1
    """Over how many sessions its turns went. Each of them has an event of its own, with its own turns in `msg_ids`."""
    task_id: Text | None = None
    run_id: Text | None = None
    source: Text = "feedback"
    value: Finite | None = None
    withdrawn: bool = False
    ends_session: bool = False
    comment: LongText | None = None
    context: dict[str, JsonValue] = Field(default_factory=dict, max_length=64)
    """Facts that reward functions may read, e.g. the expected answer."""

    @property
    def event_id(self) -> str:
        return derived_id("feedback", self.feedback_id, self.session_key)

    def to_json(self) -> bytes:
        """Without what is as it is by default: one request may become many of these."""
        return self.model_dump_json(exclude_none=True, exclude_defaults=True).encode()

    @property
    def parts(self) -> int:
        """`sessions`, also of an event that lists the turns of all of them, as the first releases sent it."""
        return max(self.sessions, len({key_of_response(turn) for turn in self.msg_ids} - {None}))

    @property
    def key(self) -> str:
        return self.session_key


class SessionEnd(Event):
    """A session is over (`scope="session"`), or a tenant asks to close all that has feedback (`scope="tenant"`).

    A tenant's commit is sent once to every partition; `partition` then tells the copies apart.
    """

    topic: ClassVar[str] = "session-ends"
    type: ClassVar[str] = "headrace.session-end.v1"

    end_id: Text
    scope: Literal["session", "tenant"] = "session"
    session_key: SessionKey | None = None
    session_id: Text | None = None
    tenant: Text = "default"
    reason: Literal["end_call", "commit"] = "end_call"
    before: Timestamp | None = None
    """With `scope="tenant"`: only sessions whose last turn is not newer than this."""
    partition: Annotated[int, Field(ge=0)] | None = None

    @property
    def event_id(self) -> str:
        return derived_id("session-end", self.end_id, self.session_key, self.partition)

    @property
    def key(self) -> str:
        return self.session_key or self.tenant
