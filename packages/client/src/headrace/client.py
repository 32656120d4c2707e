"""Synchronous client for sessions and feedback."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from headrace.errors import HeadraceError, Retries, send_with_retries
from headrace.sessions import (
    DEFAULT_URL,
    FeedbackDetails,
    FeedbackId,
    FeedbackOptions,
    Identity,
    Purpose,
    feedback_body,
    gateway_root,
    new_id,
)

if TYPE_CHECKING:
    import httpx2
    from pydantic import JsonValue

    from headrace_schemas import Trajectory


class Client:
    """Synchronous client of a Headrace gateway for sessions and feedback.

    The client may be shared between threads. The caller must close it, or use it in a `with` statement. Model calls go
    through any OpenAI client that uses a session's `base_url` or `headers`. Methods raise `ApiError` if the gateway
    refuses the request and `Unreachable` if it does not answer within `retries`.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        retries: Retries | None = None,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        import httpx2  # imported late, because it accounts for half of the import time of this package

        self.root = gateway_root(base_url)
        self._retries = retries or Retries()
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx2.Client(
            base_url=self.root, headers=headers, timeout=timeout_s, transport=transport, trust_env=False
        )

    def session(
        self,
        session_id: str | None = None,
        *,
        task_id: str | None = None,
        run_id: str | None = None,
        purpose: Purpose = "train",
    ) -> Session:
        """Create a session, or continue an existing session.

        Args:
            session_id: id of the session; a new id by default.
            task_id: task that the session attempts. Runs of one task are compared with each other.
            run_id: attempt that the session belongs to, if several sessions form one run.
            purpose: `"eval"` excludes the session from training.
        """
        return Session(self, Identity(session_id or new_id(), task_id, run_id, purpose))

    def feedback(self, value: float | bool | None = None, **options: Unpack[FeedbackOptions]) -> FeedbackId:
        """Send feedback about a session, a task or single responses, and return its id.

        Feedback may be sent at any time and may be revised. `FeedbackId` describes the reported effect on training.
        """
        body = feedback_body(value, options)
        return FeedbackId.of(body, self._post("/v1/feedback", body))

    def trajectory(self, session_id: str, *, bus: str = "127.0.0.1:9092", timeout_s: float = 30.0) -> Trajectory:
        """Return the newest trajectory of an ended session, read from the bus. Needs the extra
        `headrace-client[topics]`."""
        from headrace.following import newest_trajectory

        return newest_trajectory(bus, session_id, timeout_s=timeout_s)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _post(self, path: str, body: Mapping[str, JsonValue] | None = None) -> httpx2.Response:
        return send_with_retries(lambda: self._http.post(path, json=body), self._retries, f"{self.root}{path}")


class Session:
    """Session of an agent with the gateway. Leaving its `with` block ends the session, also if the block raised."""

    def __init__(self, client: Client, identity: Identity) -> None:
        self._client = client
        self._identity = identity
        self._ended = False
        self.session_id = identity.session_id
        self.headers: Mapping[str, str] = identity.headers
        """HTTP headers with the ids of session, task and run, for `OpenAI(default_headers=...)`."""
        self.base_url = identity.base_url(client.root)
        """URL that contains the session id, but neither task nor run, for `OpenAI(base_url=...)`."""

    def feedback(self, value: float | bool | None = None, **options: Unpack[FeedbackDetails]) -> FeedbackId:
        """Send feedback about the session, one of its responses or its task, and return the id of the feedback."""
        identity = self._identity
        if options.get("level") == "task":
            return self._client.feedback(task_id=identity.task_id, value=value, **options)
        feedback_id = self._client.feedback(
            session_id=identity.session_id, task_id=identity.task_id, run_id=identity.run_id, value=value, **options
        )
        self._ended = self._ended or options.get("ends_session", False)
        return feedback_id

    def end(self) -> None:
        """End the session. Further calls have no effect. If a session is never ended, the collector ends it after some
        idle time."""
        if not self._ended:
            self._client._post(self._identity.end_path())
            self._ended = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        try:
            self.end()
        except HeadraceError as problem:
            if error is None:
                raise
            error.add_note(f"and the session could not be ended: {problem}")
