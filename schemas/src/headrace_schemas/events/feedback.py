"""Events of `feedback` and `session-ends`: feedback from users and programs, and the ends of sessions."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from headrace_schemas.events.opinion import Level, Opinion, rule_error
from headrace_schemas.values.base import Event, SessionKey, Text, Timestamp
from headrace_schemas.values.bounds import CONTEXT_KEYS_MAX, INT32, JsonObject
from headrace_schemas.values.ids import derived_id, key_of_response, session_key

VALUES_MAX = 4096
"""Maximum number of values in one feedback: one for each listed response and metric. Each becomes a reward."""
SESSIONS_MAX = 4096
"""Maximum number of sessions of one run. Its feedback lists at least one turn of each."""


def _check_sessions(value: int) -> int:
    if value > SESSIONS_MAX:
        raise PydanticCustomError(
            "bound", f"must be at most {SESSIONS_MAX}, the maximum number of turns in one feedback"
        )
    return value


class Feedback(Opinion, Event):
    """Feedback of a source about a session or some of its turns. It is accepted immediately and matched later.

    For each (`source`, `metric`, `rater`, target) the last feedback on the log is valid, whatever its `time`. `msg_ids`
    list the target's turns, which form one run, unless `level`, an edit or a preference defines another target. Without
    `msg_ids` the target is the session's trajectory that had begun last when the feedback was given. Feedback without
    an opinion or a withdrawal only attaches `comment`, `context`, `task_id` or `run_id`.
    """

    topic: ClassVar[str] = "feedback"
    type: ClassVar[str] = "headrace.feedback.v1"
    values_max: ClassVar[int] = 16_384

    feedback_id: Text
    """A client that retries sets it, so that the feedback counts once; otherwise it is a new UUIDv7."""
    session_key: SessionKey
    """The key of the session, or for the `level` `task` the result of `task_key`."""
    session_id: Text | None = None
    tenant: Text = "default"
    msg_ids: tuple[Text, ...] = Field(default=(), max_length=4096)
    sessions: Annotated[int, Field(ge=1), INT32, AfterValidator(_check_sessions)] = 1
    """Number of sessions that contain turns of the run. Each session gets its own event, with its own turns in
    `msg_ids`."""
    partition: Annotated[int, Field(ge=0), INT32] | None = None
    """Distinguishes the copies of feedback about a task, of which every partition gets one."""
    task_id: Text | None = None
    run_id: Text | None = None
    ends_session: bool = False
    context: JsonObject = Field(default_factory=dict, max_length=CONTEXT_KEYS_MAX)
    """Facts for reward functions, for example the expected answer."""

    @property
    def event_id(self) -> str:
        copy = () if self.partition is None else (self.partition,)
        return derived_id("feedback", self.feedback_id, self.session_key, *copy)

    def to_json(self) -> bytes:
        """Return the event as JSON without defaults, because one request may produce many events."""
        return self.model_dump_json(exclude_none=True, exclude_defaults=True).encode()

    @property
    def lists_a_run(self) -> bool:
        """Whether the turns in `msg_ids` form one run. Otherwise each turn is a target of its own."""
        return bool(self.msg_ids) and self.level is None and self.about == "value"

    @property
    def run_sessions(self) -> int:
        """Number of sessions of the run, also for events of old releases, which list the turns of all sessions."""
        return max(self.sessions, len({key_of_response(turn) for turn in self.msg_ids} - {None}))

    @property
    def value_count(self) -> int:
        """The largest number of values that it may give: one for each target and metric."""
        return value_count(self.level, len(self.msg_ids), len(self.parts))

    @property
    def answer(self) -> tuple[str, int]:
        """The turn and the choice that an edit replaces."""
        return self.msg_ids[0], self.choice or 0

    @property
    def key(self) -> str:
        return self.session_key

    @model_validator(mode="after")
    def _target_fits(self) -> Self:
        has_one_turn = len(self.msg_ids) == 1
        check_values(self.level, len(self.msg_ids), len(self.parts))
        if self.about == "edit" and not (has_one_turn and self.level in (None, "response")):
            raise rule_error("edit", "must name exactly one response, and no level except response")
        if self.choice is not None and not has_one_turn:
            raise rule_error("choice", "must name exactly one response")
        if self.choice is not None and self.about == "value" and self.level != "response":
            raise rule_error("choice", "is only allowed for the level response")
        if self.level == "response" and self.about == "value" and not has_one_turn:
            raise rule_error("level", "response must name exactly one response")
        if self.level == "turn" and not self.msg_ids:
            raise rule_error("level", "turn must name at least one response")
        if self.preference is not None:
            pair = {answer.turn_id for answer in self.preference.pair}
            if not self.msg_ids or not pair.issuperset(self.msg_ids):
                raise rule_error("msg_ids", "of a preference must be the compared turns of the session")
        return self

    @model_validator(mode="after")
    def _task_is_named(self) -> Self:
        if self.level != "task":
            return self
        if self.task_id is None:
            raise rule_error("task_id", "is required for the level task")
        fields = {"msg_ids": self.msg_ids, "session_id": self.session_id, "run_id": self.run_id}
        forbidden_field = next((name for name, value in fields.items() if value), None)
        if forbidden_field is not None or self.ends_session or self.about != "value":
            raise rule_error(
                forbidden_field or "level",
                "task is about all runs of a task; name only the task, with a value or facts",
            )
        return self


def value_count(level: Level | None, responses: int, metrics: int) -> int:
    """Return the largest number of values that one feedback event can give.

    Args:
        level: what the values are about. With `turn`, each listed response gets its own values. With None the same may
            be true, because it depends on whether all responses of a run are listed. Otherwise there is one target.
        responses: number of listed responses.
        metrics: number of named values in `parts`; 0 if there is only `value`.
    """
    targets = responses if level in (None, "turn") else 1
    return max(1, targets) * max(1, metrics)


def check_values(level: Level | None, responses: int, metrics: int) -> None:
    """Raise the validation error of feedback with more than `VALUES_MAX` values."""
    count = value_count(level, responses, metrics)
    if count > VALUES_MAX:
        raise rule_error(
            "parts",
            f"of {metrics} metrics for each of {responses} responses are {count} values, more than {VALUES_MAX}; list "
            "fewer responses, or set level to session for values of the whole run",
        )


def task_key(tenant: str, task_id: str) -> str:
    """Return the `session_key` of feedback about a task, which has no session."""
    return session_key(tenant, f"task:{task_id}")


class SessionEnd(Event):
    """The end of a session (`scope="session"`), or of all sessions of a tenant with feedback (`scope="tenant"`).

    A tenant's commit is sent once to every partition, and `partition` distinguishes the copies.
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
    """For `scope="tenant"`: the time of the last turn of a session that ends must not be later."""
    partition: Annotated[int, Field(ge=0), INT32] | None = None

    @property
    def event_id(self) -> str:
        return derived_id("session-end", self.end_id, self.session_key, self.partition)

    @property
    def key(self) -> str:
        return self.session_key or self.tenant
