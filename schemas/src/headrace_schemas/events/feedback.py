"""Events about how a run went: of `feedback` and `session-ends`, from users and programs, and of `rewards`, from single
sources about trajectories, which may be revised.

`RewardResult` is the value that a reward function may return in place of a number.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from headrace_schemas.events.opinion import Level, Opinion, rule_error
from headrace_schemas.values.base import Event, LongText, Model, SessionKey, Text, Timestamp
from headrace_schemas.values.bounds import CONTEXT_KEYS_MAX, INT32, JsonObject, Score
from headrace_schemas.values.ids import derived_id, key_of_response, session_key
from headrace_schemas.values.text import plain_number

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
        return bool(self.msg_ids) and self.level is None and self.feedback_kind == "value"

    @property
    def run_sessions(self) -> int:
        """Number of sessions of the run, also for events of old releases, which list the turns of all sessions."""
        return max(self.sessions, len({key_of_response(turn) for turn in self.msg_ids} - {None}))

    @property
    def value_count(self) -> int:
        """The largest number of reward values that this feedback may give: one for each target and metric."""
        return value_count(self.level, len(self.msg_ids), len(self.parts))

    @property
    def answer(self) -> tuple[str, int]:
        """The turn id and the choice index of the answer that an edit replaces."""
        return self.msg_ids[0], self.choice or 0

    @property
    def key(self) -> str:
        return self.session_key

    @model_validator(mode="after")
    def _target_fits(self) -> Self:
        has_one_turn = len(self.msg_ids) == 1
        check_values(self.level, len(self.msg_ids), len(self.parts))
        if self.feedback_kind == "edit" and not (has_one_turn and self.level in (None, "response")):
            raise rule_error("edit", "must name exactly one response, and no level except response")
        if self.choice is not None and not has_one_turn:
            raise rule_error("choice", "must name exactly one response")
        if self.choice is not None and self.feedback_kind == "value" and self.level != "response":
            raise rule_error("choice", "is only allowed for the level response")
        if self.level == "response" and self.feedback_kind == "value" and not has_one_turn:
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
        if forbidden_field is not None or self.ends_session or self.feedback_kind != "value":
            raise rule_error(
                forbidden_field or "level",
                "task is about all runs of a task; name only the task, with a value or facts",
            )
        return self


def value_count(level: Level | None, responses: int, metrics: int) -> int:
    """Return the largest number of reward values that one feedback event can give: its targets times its metrics.

    Args:
        level: what the feedback is about. With `turn`, each listed response is a target. With None the same is assumed:
            it holds unless the list contains all responses of a run. Other levels have one target.
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


Outcome = Literal["scored", "abstained", "failed", "parse_error", "timed_out", "withdrawn"]


class Reward(Event):
    """The reward of one source. `value` is set only if `outcome` is `scored`; no other outcome counts as 0.0.

    For each (`trajectory_id`, `turn_id`, `choice`, `source`) the highest `revision` is valid; earlier ones are history.
    """

    topic: ClassVar[str] = "rewards"
    type: ClassVar[str] = "headrace.reward.v1"
    values_max: ClassVar[int] = 1024

    trajectory_id: Text
    session_key: SessionKey
    tenant: Text = "default"
    turn_id: Text | None = None
    """The turn, if the reward is about a single turn."""
    choice: Annotated[int, Field(ge=0), INT32] | None = None
    """The index of the answer, if the reward is about a single answer of the turn."""
    source: Text
    """The source: `feedback`, `function:answer`, `judge:helpfulness`, or a name that you choose."""
    revision: Annotated[int, Field(ge=0), INT32] = 0
    outcome: Outcome = "scored"
    value: Score | None = None
    criteria: dict[Text, Score] = Field(default_factory=dict, max_length=64)
    reason: LongText | None = None
    judged_by: Text | None = None
    """Model and prompt digest of a judge, or digest of the source code of a reward function."""

    @model_validator(mode="after")
    def _value_iff_scored(self) -> Self:
        if (self.value is None) == (self.outcome == "scored"):
            raise ValueError(
                f"outcome {self.outcome!r} with value {self.value!r}: a value is required for 'scored' and not allowed "
                "for other outcomes"
            )
        if self.choice is not None and self.turn_id is None:
            raise ValueError("choice: is only allowed with turn_id; set turn_id")
        return self

    @property
    def event_id(self) -> str:
        choice = () if self.choice is None else (self.choice,)
        return derived_id("reward", self.trajectory_id, self.turn_id, self.source, self.revision, *choice)

    @property
    def key(self) -> str:
        return self.session_key

    @property
    def subject(self) -> str:
        return self.trajectory_id


def _to_float(value: object) -> object:
    """Return a number of any library as a float. Strings are left to pydantic, whose message names the field."""
    try:
        return plain_number(value)
    except TypeError as error:
        if isinstance(value, str):
            return value
        raise ValueError(str(error)) from None


PlainScore = Annotated[Score, BeforeValidator(_to_float)]


class RewardResult(Model):
    """Result of a reward function: a value with criteria and a reason.

    With `value` None the function abstains, which does not count as 0.0. If `value` is omitted and `criteria` are
    set, the value is their mean.
    """

    value: PlainScore | None = None
    criteria: dict[Text, PlainScore] = Field(default_factory=dict, max_length=64)
    turns: dict[Text, PlainScore] = Field(default_factory=dict, max_length=4096)
    """Process rewards by turn id. Turns that are in no branch are ignored."""
    reason: LongText | None = None
