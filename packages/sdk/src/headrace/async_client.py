"""The same client for programs that run on asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from headrace.errors import HeadraceError
from headrace.retries import Retries, checked
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


class AsyncClient:
    """`headrace.Client` for asyncio; close it or use `async with`.

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
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        import httpx2

        self.root = root_of(base_url)
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
        """A new session, or one that exists. `task_id` names its group; `purpose="eval"` keeps it out of training."""
        return AsyncSession(self, Identity(session_id or new_id(), task_id, run_id, purpose))

    async def feedback(self, **options: Unpack[FeedbackOptions]) -> FeedbackId:
        """Send feedback about a session, a task or responses, at any time, also again. Returns its id."""
        body = feedback_body(options)
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
            answer, cause = None, None
            try:
                answer = await self._http.post(path, json=body)
            except TransportError as error:
                cause = error
            pause_s = self._retries.pause_s(attempt, answer)
            if pause_s is None:
                return checked(answer, cause, f"{self.root}{path}")
            await asyncio.sleep(pause_s)


class AsyncSession:
    """`headrace.Session` for asyncio. Leaving an `async with` block ends it, whether or not the block raised."""

    def __init__(self, client: AsyncClient, identity: Identity) -> None:
        self._client = client
        self._identity = identity
        self._ended = False
        self.session_id = identity.session_id
        self.headers: Mapping[str, str] = identity.headers
        """For `AsyncOpenAI(default_headers=...)`: session, task and run."""
        self.base_url = identity.base_url(client.root)
        """For `AsyncOpenAI(base_url=...)`: names the session, but neither task nor run."""

    async def feedback(self, value: float | bool | None = None, **options: Unpack[FeedbackDetails]) -> FeedbackId:
        """Send feedback about the session, or about one of its responses or its task. Returns its id."""
        me = self._identity
        if options.get("level") == "task":
            return await self._client.feedback(task_id=me.task_id, value=value, **options)
        found = await self._client.feedback(
            session_id=me.session_id, task_id=me.task_id, run_id=me.run_id, value=value, **options
        )
        self._ended = self._ended or options.get("ends_session", False)
        return found

    async def end(self) -> None:
        """End the run. Further calls do nothing. A session that is not ended ends after some idle time."""
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
