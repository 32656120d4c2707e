"""The client for programs without asyncio."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from headrace.errors import HeadraceError
from headrace.retries import Retries, answered
from headrace.sessions import (
    DEFAULT_URL,
    FeedbackDetails,
    FeedbackId,
    FeedbackOptions,
    Identity,
    Purpose,
    feedback_body,
    new_id,
    root_of,
)

if TYPE_CHECKING:
    import httpx2
    from pydantic import JsonValue

    from headrace_schemas import Trajectory


class Client:
    """Sessions and feedback at a Headrace gateway. Safe to share between threads; close it or use `with`.

    Model calls go through any OpenAI client, with a session's `base_url` or `headers`. Methods raise `ApiError` when
    the gateway refuses and `Unreachable` when it does not answer within `retries`.
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
        import httpx2  # half of what importing this package would take

        self.root = root_of(base_url)
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
        """A new session, or one that exists. `task_id` names its group; `purpose="eval"` keeps it out of training."""
        return Session(self, Identity(session_id or new_id(), task_id, run_id, purpose))

    def feedback(self, **options: Unpack[FeedbackOptions]) -> FeedbackId:
        """Send feedback about a session, a task or responses, at any time, also again. Returns its id.

        See `FeedbackId` for what the gateway knows about its effect.
        """
        body = feedback_body(options)
        return FeedbackId.of(body, self._post("/v1/feedback", body))

    def trajectory(self, session_id: str, *, bus: str = "127.0.0.1:9092", timeout_s: float = 30.0) -> Trajectory:
        """The newest trajectory of a session that has ended, from the bus. Needs the extra `headrace[topics]`."""
        from headrace.stack.trajectories import newest

        return newest(bus, session_id, timeout_s=timeout_s)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _post(self, path: str, body: Mapping[str, JsonValue] | None = None) -> httpx2.Response:
        return answered(lambda: self._http.post(path, json=body), self._retries, f"{self.root}{path}")


class Session:
    """One run of an agent. Leaving a `with` block ends it, whether or not the block raised."""

    def __init__(self, client: Client, identity: Identity) -> None:
        self._client = client
        self._identity = identity
        self._ended = False
        self.session_id = identity.session_id
        self.headers: Mapping[str, str] = identity.headers
        """For `OpenAI(default_headers=...)`: session, task and run."""
        self.base_url = identity.base_url(client.root)
        """For `OpenAI(base_url=...)`: names the session, but neither task nor run."""

    def feedback(self, value: float | bool | None = None, **options: Unpack[FeedbackDetails]) -> FeedbackId:
        """Send feedback about the session, or about one of its responses or its task. Returns its id."""
        me = self._identity
        if options.get("level") == "task":
            return self._client.feedback(task_id=me.task_id, value=value, **options)
        found = self._client.feedback(
            session_id=me.session_id, task_id=me.task_id, run_id=me.run_id, value=value, **options
        )
        self._ended = self._ended or options.get("ends_session", False)
        return found

    def end(self) -> None:
        """End the run. Further calls do nothing. A session that is not ended ends after some idle time."""
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
