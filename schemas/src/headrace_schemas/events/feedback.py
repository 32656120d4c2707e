"""`feedback` and `session-ends`: what users and programs say about a session."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue

from headrace_schemas.base import Event, Finite, LongText, SessionKey, Text, Timestamp
from headrace_schemas.ids import derived_id, key_of_response


class Feedback(Event):
    """What a source says about a session or about some of its turns. It is accepted at once and matched later.

    The last feedback on the log per (`source`, target) is valid; `time` does not matter. `msg_ids` list the turns of
    the session that are meant, which makes them one run. Without them the feedback is about the trajectory of the
    session that had begun last when it was given. With `value` None and `withdrawn` false it only attaches `context`,
    `task_id` or `run_id`.
    """

    topic: ClassVar[str] = "feedback"
    type: ClassVar[str] = "headrace.feedback.v1"

    feedback_id: Text
    """Set by a client that retries, so that equal feedback counts once; else a new UUIDv7."""
    session_key: SessionKey
    session_id: Text | None = None
    tenant: Text = "default"
    msg_ids: tuple[Text, ...] = Field(default=(), max_length=4096)
    sessions: Annotated[int, Field(ge=1)] = 1
    """How many sessions its turns are in. Each session has an event of its own, with its own turns in `msg_ids`."""
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
        """Leaves out defaults, because one request may become many events."""
        return self.model_dump_json(exclude_none=True, exclude_defaults=True).encode()

    @property
    def parts(self) -> int:
        """`sessions`, also of an event that lists the turns of all of them, as the first releases sent it."""
        return max(self.sessions, len({key_of_response(turn) for turn in self.msg_ids} - {None}))

    @property
    def key(self) -> str:
        return self.session_key


class SessionEnd(Event):
    """A session is over (`scope="session"`), or a tenant closes all sessions with feedback (`scope="tenant"`).

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
