"""Sessions and the requests about them, without I/O: shared by the blocking and the asyncio client."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict, cast
from urllib.parse import quote

from headrace_schemas.ids import uuid7
from headrace_schemas.plain_values import plain_json

if TYPE_CHECKING:
    import httpx2
    from pydantic import JsonValue

Purpose = Literal["train", "eval"]
DEFAULT_URL = "http://127.0.0.1:8000"
"""Where `headrace up` puts the gateway."""
_LABEL = re.compile(r"[\x20-\x7e]{1,512}")


def root_of(base_url: str) -> str:
    """The gateway's root, whether or not the URL that was given ends in `/v1`."""
    return base_url.rstrip("/").removesuffix("/v1")


def new_id() -> str:
    return uuid7().hex


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a session is. Ids are printable ASCII, at most 512 characters, since they travel in headers."""

    session_id: str
    task_id: str | None
    run_id: str | None
    purpose: Purpose

    def __post_init__(self) -> None:
        for name in ("session_id", "task_id", "run_id"):
            value = getattr(self, name)
            if value is not None and not _LABEL.fullmatch(value):
                raise ValueError(f"{name} = {value!r}: must be 1 to 512 printable ASCII characters")

    @property
    def headers(self) -> dict[str, str]:
        found = {
            "X-Session-Id": self.session_id,
            "X-Task-Id": self.task_id,
            "X-Run-Id": self.run_id,
            "X-Headrace-Purpose": self.purpose if self.purpose != "train" else None,
        }
        return {name: value for name, value in found.items() if value is not None}

    def base_url(self, root: str) -> str:
        """The session in the path, for programs that can set nothing but a base URL."""
        return f"{root}/sessions/{quote(self.session_id, safe='')}/v1"

    def end_path(self) -> str:
        return f"/v1/sessions/{quote(self.session_id, safe='')}/end"


class FeedbackDetails(TypedDict, total=False):
    """The fields of feedback: one of `rating`, `label`, `parts`, `edit` and `preference`, or a value, and what goes
    with it. The last word of each rater of a `source` about a session, task or response counts."""

    response_id: str
    """The response that is meant, where it is one."""
    choice: int
    """Which of its answers, counted from 0."""
    level: Literal["response", "turn", "session", "task"]
    """Whether the answer, its turn, the whole session or all runs of the task are meant."""
    rating: float
    """A point on `scale`, which has a lower and an upper end."""
    scale: Sequence[float]
    label: str
    """A word that the scorer's settings give a value."""
    parts: Mapping[str, float]
    """Values of several metrics."""
    edit: str | Mapping[str, JsonValue]
    """What the response should have been: a text, or an assistant's message with tool calls."""
    preference: Mapping[str, JsonValue]
    """`chosen` and `rejected`: two choices of the response, or two response ids, also of two sessions."""
    metric: str
    """What is judged; it counts as a source of its own, `source:metric`."""
    rater: str
    """Who of the source it is. A source says the mean of its raters."""
    source: str
    """Who gives the feedback. The scorer's settings give each source a weight."""
    comment: str
    context: Mapping[str, JsonValue]
    """Facts for reward functions, e.g. the expected answer."""
    ends_session: bool
    withdrawn: bool
    """Withdraws earlier feedback of this source about the same."""
    kind: Literal["value", "edit", "preference"]
    """What is withdrawn, where it is no value."""
    feedback_id: str
    """Feedback with an equal id counts once. A new id is made when there is none."""


class FeedbackOptions(FeedbackDetails, total=False):
    """The fields of feedback with its target: a session, or the responses `msg_ids`."""

    value: float | bool | None
    session_id: str
    msg_ids: Sequence[str]
    task_id: str | None
    run_id: str | None


class FeedbackId(str):
    """The id of accepted feedback, and whether it can train anything as far as the gateway knows.

    `teaches` is None when the gateway does not know: for sessions and tasks, and for responses of another gateway or
    from before its last start. `reason` names why it is False, e.g. `truncated_sampling`.
    """

    teaches: bool | None = None
    reason: str | None = None

    @classmethod
    def of(cls, body: Mapping[str, JsonValue], answer: httpx2.Response) -> FeedbackId:
        """Return the id in the request's `body` with what the answer says."""
        made = cls(body["feedback_id"])
        try:
            fields = answer.json()
        except (ValueError, RecursionError):  # what lies between may answer 2xx without a body
            return made
        if isinstance(fields, dict):
            made.teaches, made.reason = fields.get("teaches"), fields.get("reason")
        return made


def feedback_body(options: FeedbackOptions) -> dict[str, JsonValue]:
    """The body of `POST /v1/feedback`. It always has a `feedback_id`, so that sending it twice is sending it once."""
    msg_ids = options.get("msg_ids", ())
    if isinstance(msg_ids, str):
        raise TypeError(f"msg_ids = {msg_ids!r}: a list of response ids, not one string")
    body = {name: cast("JsonValue", plain_json(item)) for name, item in options.items()}
    body["feedback_id"] = options.get("feedback_id") or new_id()
    return {name: item for name, item in body.items() if item not in (None, [], {})}
