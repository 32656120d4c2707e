"""Asyncio client for sessions and feedback."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from headrace.errors import HeadraceError, Retries, raise_for_status
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


class AsyncClient:
    """Asyncio client of a Headrace gateway for sessions and feedback.

    The caller must close the client, or use it in an `async with` statement. Model calls go through any OpenAI client
    that uses a session's `base_url` or `headers`. Methods raise `ApiError` if the gateway refuses the request and
    `Unreachable` if it does not answer within `retries`.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        retries: Retries | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        import httpx2

        self.root = gateway_root(base_url)
        self._retries = retries or Retries()
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx2.AsyncClient(
            base_url=self.root, headers=headers, timeout=timeout_s, transport=transport, trust_env=False
        )

    def session(
        self,
        session_id: str | None = None,
        *,
        task_id: str | None = None,
        run_id: str | None = None,
        purpose: Purpose = "train",
    ) -> AsyncSession:
        """Create a session, or continue an existing session.

        Args:
            session_id: id of the session; a new id by default.
            task_id: task that the session attempts. Runs of one task are compared with each other.
            run_id: attempt that the session belongs to, if several sessions form one run.
            purpose: `"eval"` excludes the session from training.
        """
        return AsyncSession(self, Identity(session_id or new_id(), task_id, run_id, purpose))

    async def feedback(self, value: float | bool | None = None, **options: Unpack[FeedbackOptions]) -> FeedbackId:
        """Send feedback about a session, a task or single responses, and return its id.

        Feedback may be sent at any time and may be revised. `FeedbackId` describes the reported effect on training.
        """
        body = feedback_body(value, options)
        return FeedbackId.of(body, await self._post("/v1/feedback", body))

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _post(self, path: str, body: Mapping[str, JsonValue] | None = None) -> httpx2.Response:
        from httpx2 import TransportError

        attempt = 0
        while True:
            attempt += 1
            response, cause = None, None
            try:
                response = await self._http.post(path, json=body)
            except TransportError as error:
                cause = error
            pause_s = self._retries.pause_s(attempt, response)
            if pause_s is None:
                return raise_for_status(response, cause, f"{self.root}{path}")
            await asyncio.sleep(pause_s)


class AsyncSession:
    """Asyncio counterpart of `headrace.Session`. Leaving its `async with` block ends the session, also if the block
    raised."""

    def __init__(self, client: AsyncClient, identity: Identity) -> None:
        self._client = client
        self._identity = identity
        self._ended = False
        self.session_id = identity.session_id
        self.headers: Mapping[str, str] = identity.headers
        """HTTP headers with the ids of session, task and run, for `AsyncOpenAI(default_headers=...)`."""
        self.base_url = identity.base_url(client.root)
        """URL that contains the session id, but neither task nor run, for `AsyncOpenAI(base_url=...)`."""

    async def feedback(self, value: float | bool | None = None, **options: Unpack[FeedbackDetails]) -> FeedbackId:
        """Send feedback about the session, one of its responses or its task, and return the id of the feedback."""
        identity = self._identity
        if options.get("level") == "task":
            return await self._client.feedback(task_id=identity.task_id, value=value, **options)
        feedback_id = await self._client.feedback(
            session_id=identity.session_id, task_id=identity.task_id, run_id=identity.run_id, value=value, **options
        )
        self._ended = self._ended or options.get("ends_session", False)
        return feedback_id

    async def end(self) -> None:
        """End the session. Further calls have no effect. If a session is never ended, the collector ends it after some
        idle time."""
        if not self._ended:
            await self._client._post(self._identity.end_path())
            self._ended = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        try:
            await self.end()
        except HeadraceError as problem:
            if error is None:
                raise
            error.add_note(f"and the session could not be ended: {problem}")
