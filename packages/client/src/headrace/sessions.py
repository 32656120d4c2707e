"""Session ids and request bodies, without I/O. The synchronous and the asynchronous client share them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict, cast
from urllib.parse import quote

from headrace_schemas.values.ids import uuid7
from headrace_schemas.values.text import plain_json

if TYPE_CHECKING:
    import httpx2
    from pydantic import JsonValue

Purpose = Literal["train", "eval"]
DEFAULT_URL = "http://127.0.0.1:8000"
"""Address of the gateway that `headrace up` starts."""
_LABEL = re.compile(r"[\x20-\x7e]{1,512}")


def gateway_root(base_url: str) -> str:
    """Return the root URL of the gateway. A suffix `/v1` of `base_url` is removed.

    Raises:
        ValueError: `base_url` has no scheme.
    """
    if not base_url.startswith(("http://", "https://")):
        example = f"http://{base_url or '127.0.0.1:8000'}"
        raise ValueError(f"base_url = {base_url!r}: must begin with http:// or https://; write {example}")
    return base_url.rstrip("/").removesuffix("/v1")


def new_id() -> str:
    return uuid7().hex


@dataclass(frozen=True, slots=True)
class Identity:
    """Ids of one session, and its purpose.

    Ids are sent as HTTP headers, so they must be 1 to 512 printable ASCII characters.
    """

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
        values = {
            "X-Session-Id": self.session_id,
            "X-Task-Id": self.task_id,
            "X-Run-Id": self.run_id,
            "X-Headrace-Purpose": self.purpose if self.purpose != "train" else None,
        }
        return {name: value for name, value in values.items() if value is not None}

    def base_url(self, root: str) -> str:
        """Return a base URL that contains the session id, for programs that can configure only a base URL and no
        headers."""
        return f"{root}/sessions/{quote(self.session_id, safe='')}/v1"

    def end_path(self) -> str:
        return f"/v1/sessions/{quote(self.session_id, safe='')}/end"


class FeedbackDetails(TypedDict, total=False):
    """Optional fields of feedback.

    Feedback has a value, or one of `rating`, `label`, `parts`, `edit` and `preference`. For each rater of a `source`,
    the newest feedback about a session, task or response counts.
    """

    response_id: str
    """Id of the response, if the feedback is about one response."""
    choice: int
    """Index of the choice (answer) of that response, from 0."""
    level: Literal["response", "turn", "session", "task"]
    """Whether the feedback is about one answer, its turn, the whole session or all runs of the task."""
    rating: float
    """Value on `scale`, for example 4 on a scale from 1 to 5."""
    scale: Sequence[float]
    label: str
    """Word that the scorer's settings map to a value, for example `good`."""
    parts: Mapping[str, float]
    """Several values, by metric."""
    edit: str | Mapping[str, JsonValue]
    """The answer that the model should have given: a text, or an assistant message with tool calls."""
    preference: Mapping[str, JsonValue]
    """`chosen` and `rejected`: two choices of the response, or two response ids, which may belong to two sessions."""
    metric: str
    """Name of the aspect that was judged. The scorer treats `source:metric` as a source of its own."""
    rater: str
    """Person or program within the source. The value of a source is the mean of its raters."""
    source: str
    """Origin of the feedback. The settings of the scorer assign a weight to each source."""
    comment: str
    context: Mapping[str, JsonValue]
    """Facts for reward functions, for example the expected answer."""
    ends_session: bool
    withdrawn: bool
    """Whether to withdraw the earlier feedback of this source about the same target."""
    kind: Literal["value", "edit", "preference"]
    """Form of the withdrawn feedback, if it is not a value."""
    feedback_id: str
    """Idempotency key: feedback with an equal id counts once. A new id by default."""


class FeedbackOptions(FeedbackDetails, total=False):
    """Fields of feedback including its target: a session, or the responses `msg_ids`."""

    session_id: str
    msg_ids: Sequence[str]
    task_id: str | None
    run_id: str | None


class FeedbackId(str):
    """Id of accepted feedback, with the gateway's report of whether the feedback can affect training.

    Attributes:
        teaches: whether training can use the feedback. None if the gateway cannot determine it: for sessions and tasks,
            and for responses of another gateway or from before its last start.
        reason: why `teaches` is False, for example `truncated_sampling` or `no_signal`.
    """

    teaches: bool | None = None
    reason: str | None = None

    @classmethod
    def of(cls, body: Mapping[str, JsonValue], response: httpx2.Response) -> FeedbackId:
        """Return the id in the request `body`, with the attributes that the gateway's response reports."""
        feedback_id = cls(body["feedback_id"])
        try:
            fields = response.json()
        except (ValueError, RecursionError):  # a proxy may answer 2xx without a JSON body
            return feedback_id
        if isinstance(fields, dict):
            feedback_id.teaches, feedback_id.reason = fields.get("teaches"), fields.get("reason")
        return feedback_id


def feedback_body(value: float | bool | None, options: FeedbackOptions) -> dict[str, JsonValue]:
    """Build the body of `POST /v1/feedback`.

    The body always has a `feedback_id`, so that a repeated request counts once.

    Raises:
        TypeError: `value` or `msg_ids` is a text.
    """
    if isinstance(value, str):
        raise TypeError(f"value = {value!r}: must be a number, True or False; send a word as label= or comment=")
    msg_ids = options.get("msg_ids", ())
    if isinstance(msg_ids, str):
        raise TypeError(f"msg_ids = {msg_ids!r}: must be a list of response ids; put the id into a list")
    body = {name: cast("JsonValue", plain_json(item)) for name, item in {"value": value, **options}.items()}
    body["feedback_id"] = options.get("feedback_id") or new_id()
    return {name: item for name, item in body.items() if item not in (None, [], {})}
