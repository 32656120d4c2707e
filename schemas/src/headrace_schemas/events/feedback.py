"""`feedback` and `session-ends`: what users and programs say about a session."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from headrace_schemas.base import Event, SessionKey, Text, Timestamp
from headrace_schemas.bounds import CONTEXT_KEYS_MAX, INT32, JsonObject
from headrace_schemas.events.opinion import Opinion, broken
from headrace_schemas.ids import derived_id, key_of_response, session_key

SESSIONS_MAX = 4096
"""Most sessions that one run can be in: its feedback lists at least one turn of each."""


def _check_sessions(value: int) -> int:
    if value > SESSIONS_MAX:
        raise PydanticCustomError("bound", f"must be at most {SESSIONS_MAX}, the most turns that a feedback lists")
    return value


class Feedback(Opinion, Event):
    """What a source says about a session or about some of its turns. It is accepted at once and matched later.

    The last feedback on the log per (`source`, `metric`, `rater`, target) is valid; `time` does not matter. `msg_ids`
    list the turns of the session that are meant, which makes them one run, unless `level`, an edit or a preference says
    what is meant. Without them the feedback is about the trajectory of the session that had begun last when it was
    given. What says nothing and withdraws nothing only attaches `comment`, `context`, `task_id` or `run_id`.
    """

    topic: ClassVar[str] = "feedback"
    type: ClassVar[str] = "headrace.feedback.v1"
    values_max: ClassVar[int] = 16_384

    feedback_id: Text
    """Set by a client that retries, so that equal feedback counts once; else a new UUIDv7."""
    session_key: SessionKey
    """With `level` `task` that of `task_key`."""
    session_id: Text | None = None
    tenant: Text = "default"
    msg_ids: tuple[Text, ...] = Field(default=(), max_length=4096)
    sessions: Annotated[int, Field(ge=1), INT32, AfterValidator(_check_sessions)] = 1
    """How many sessions the run of its turns is in. Each session has an event of its own, with its own turns in
    `msg_ids`."""
    partition: Annotated[int, Field(ge=0), INT32] | None = None
    """Feedback about a task is sent once to every partition; this tells the copies apart."""
    task_id: Text | None = None
    run_id: Text | None = None
    ends_session: bool = False
    context: JsonObject = Field(default_factory=dict, max_length=CONTEXT_KEYS_MAX)
    """Facts that reward functions may read, e.g. the expected answer."""

    @property
    def event_id(self) -> str:
        copy = () if self.partition is None else (self.partition,)
        return derived_id("feedback", self.feedback_id, self.session_key, *copy)

    def to_json(self) -> bytes:
        """Leaves out defaults, because one request may become many events."""
        return self.model_dump_json(exclude_none=True, exclude_defaults=True).encode()

    @property
    def lists_a_run(self) -> bool:
        """Whether `msg_ids` are one run, rather than turns that are meant by themselves."""
        return bool(self.msg_ids) and self.level is None and self.about == "value"

    @property
    def run_sessions(self) -> int:
        """`sessions`, also of an event that lists the turns of all of them, as the first releases sent it."""
        return max(self.sessions, len({key_of_response(turn) for turn in self.msg_ids} - {None}))

    @property
    def answer(self) -> tuple[str, int]:
        """The turn and the choice that an edit replaces."""
        return self.msg_ids[0], self.choice or 0

    @property
    def key(self) -> str:
        return self.session_key

    @model_validator(mode="after")
    def _target_fits(self) -> Self:
        one = len(self.msg_ids) == 1
        if self.about == "edit" and not (one and self.level in (None, "response")):
            raise broken("edit", "is about one response; name it, and no other level")
        if self.choice is not None and not one:
            raise broken("choice", "is an answer of one response; name one")
        if self.choice is not None and self.about == "value" and self.level != "response":
            raise broken("choice", "is for the level response")
        if self.level == "response" and self.about == "value" and not one:
            raise broken("level", "response is about one response; name one")
        if self.level == "turn" and not self.msg_ids:
            raise broken("level", "turn is about responses; list them")
        if self.preference is not None:
            pair = {answer.turn_id for answer in self.preference.pair}
            if not self.msg_ids or not pair.issuperset(self.msg_ids):
                raise broken("msg_ids", "of a preference are the compared turns of the session, and nothing else")
        return self

    @model_validator(mode="after")
    def _task_is_named(self) -> Self:
        if self.level != "task":
            return self
        if self.task_id is None:
            raise broken("task_id", "is missing; it says which task is meant")
        others = {"msg_ids": self.msg_ids, "session_id": self.session_id, "run_id": self.run_id}
        named = next((name for name, given in others.items() if given), None)
        if named is not None or self.ends_session or self.about != "value":
            raise broken(
                named or "level", "task is about all runs of a task; name the task alone, with a value or facts"
            )
        return self


def task_key(tenant: str, task_id: str) -> str:
    """The key of feedback about a task, which has no session."""
    return session_key(tenant, f"task:{task_id}")


class SessionEnd(Event):
    """A session is over (`scope="session"`), or a tenant closes all sessions with feedback (`scope="tenant"`).

    A tenant's commit is sent once to every partition; `partition` then tells the copies apart.
    """

    topic: ClassVar[str] = "session-ends"
    type: ClassVar[str] = "headrace.session-end.v1"
    values_max: ClassVar[int] = 1024

    end_id: Text
    scope: Literal["session", "tenant"] = "session"
    session_key: SessionKey | None = None
    session_id: Text | None = None
    tenant: Text = "default"
    reason: Literal["end_call", "commit"] = "end_call"
    before: Timestamp | None = None
    """With `scope="tenant"`: only sessions whose last turn is not newer than this."""
    partition: Annotated[int, Field(ge=0), INT32] | None = None

    @property
    def event_id(self) -> str:
        return derived_id("session-end", self.end_id, self.session_key, self.partition)

    @property
    def key(self) -> str:
        return self.session_key or self.tenant
