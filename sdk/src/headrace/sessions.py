"""Sessions and the requests about them, without I/O: shared by the blocking and the asyncio client."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict
from urllib.parse import quote

from headrace_schemas.ids import uuid7

if TYPE_CHECKING:
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
    """The fields of feedback. The latest feedback of each `source` about a session or response counts."""

    source: str
    """Who gives the feedback. The scorer's settings give each source a weight."""
    comment: str
    context: Mapping[str, JsonValue]
    """Facts for reward functions, e.g. the expected answer."""
    ends_session: bool
    withdrawn: bool
    """Withdraws earlier feedback of this source."""
    feedback_id: str
    """Feedback with an equal id counts once. A new id is made when there is none."""


class FeedbackOptions(FeedbackDetails, total=False):
    """The fields of feedback with its target: a session, or the responses `msg_ids`."""

    value: float | None
    session_id: str
    msg_ids: Sequence[str]
    task_id: str | None
    run_id: str | None


def feedback_body(options: FeedbackOptions) -> dict[str, JsonValue]:
    """The body of `POST /v1/feedback`. It always has a `feedback_id`, so that sending it twice is sending it once."""
    msg_ids = options.get("msg_ids", ())
    if isinstance(msg_ids, str):
        raise TypeError(f"msg_ids = {msg_ids!r}: a list of response ids, not one string")
    body: dict[str, JsonValue] = {
        "feedback_id": options.get("feedback_id") or new_id(),
        "session_id": options.get("session_id"),
        "msg_ids": list(msg_ids),
        "value": options.get("value"),
        "source": options.get("source"),
        "task_id": options.get("task_id"),
        "run_id": options.get("run_id"),
        "comment": options.get("comment"),
        "context": dict(options.get("context", {})),
        "ends_session": options.get("ends_session"),
        "withdrawn": options.get("withdrawn"),
    }
    return {name: item for name, item in body.items() if item not in (None, [], {})}
