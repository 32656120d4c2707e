"""Client of the gateway that yields to all users, and of replicas for the logprobs of users' answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import httpx2
from pydantic import BaseModel, Field, JsonValue, ValidationError

from headrace_registry.rollouts.settings import ShadowSettings
from headrace_registry.shadow.rerun import ModelAnswer, RerunFailed, ScorableAnswer
from headrace_registry.shadow.tool_program import ToolProgram
from headrace_registry.versions import probe
from headrace_runtime.clock import Clock
from headrace_schemas import Message, Replica, Turn
from headrace_schemas.http.answer_form import repeated_request
from headrace_schemas.http.replica_api import ScoredAnswers, ScoreRequest, TokensToScore

_ANSWER_TOKENS_MAX = 1024
"""Tokens of one answer; a user's own limit applies if it is smaller."""
_BUSY_WAIT_S = 300.0
"""Seconds that one call waits while replicas are busy with users."""
_CALL_TIMEOUT_S = 120.0
"""Seconds that one model call may take."""

_BUSY = frozenset({429, 503})
_PAUSE_MIN_S, _PAUSE_MAX_S = 0.5, 15.0


class _Choice(BaseModel):
    message: Message


class _Usage(BaseModel):
    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(default=0, ge=0)


class _Response(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage


class GatewayAnswers:
    """A `runner.ShadowAnswers`. `base_url` ends in `/v1`; `replicas` returns the replicas on the bus."""

    def __init__(
        self,
        base_url: str,
        settings: ShadowSettings,
        internal_key: str,
        replicas: Callable[[], Iterable[Replica]],
        clock: Clock,
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._settings = settings
        self._internal_key = internal_key
        self._replicas = replicas
        self._clock = clock
        self._client: httpx2.AsyncClient | None = None
        self.tools = ToolProgram(settings)

    @contextlib.asynccontextmanager
    async def session(self, tenant: str, session_id: str, of: str) -> AsyncIterator[GatewaySession]:
        key = self._settings.keys.get(tenant)
        if key is None:
            raise RerunFailed(f"tenant {tenant} is not in shadow.tenants any more")
        headers = {"X-Headrace-Purpose": "shadow", "X-Shadow-Of": of, "X-Session-Id": session_id, **_bearer(key)}
        yield GatewaySession(self._http(), self._base_url, headers, self._settings, self._clock)
        with contextlib.suppress(httpx2.HTTPError):  # the collector closes a session that is not ended
            await self._http().post(f"{self._base_url}/sessions/{session_id}/end", headers=_bearer(key), timeout=30.0)

    async def logprobs(self, version: str, answers: Sequence[ScorableAnswer]) -> list[list[float]] | None:
        scoring_replicas = [
            item
            for item in probe.live_replicas(self._replicas(), self._clock.now())
            if item.scores and item.ready(version)
        ]
        if not scoring_replicas:
            return None
        replica = min(scoring_replicas, key=lambda item: item.in_flight / item.capacity)
        items = [
            TokensToScore(
                prompt_token_ids=item.prompt_token_ids, token_ids=item.token_ids, temperature=item.temperature
            )
            for item in answers
        ]
        body = ScoreRequest(model=version, answers=tuple(items)).model_dump_json().encode()
        headers = {"content-type": "application/json", **_bearer(self._internal_key)}
        try:
            url = f"{replica.url}/v1/logprobs"
            response = await self._http().post(url, content=body, headers=headers, timeout=_CALL_TIMEOUT_S)
            if response.status_code != 200:
                raise RerunFailed(f"replica {replica.replica_id} answered {response.status_code} for logprobs")
            scored = ScoredAnswers.model_validate_json(response.content)
        except httpx2.HTTPError as error:
            raise RerunFailed(f"replica {replica.replica_id}: {type(error).__name__}") from None
        except ValidationError:
            raise RerunFailed(f"replica {replica.replica_id} answered 200 without logprobs") from None
        if [len(item) for item in scored.logprobs] != [len(item.token_ids) for item in answers]:
            raise RerunFailed(f"replica {replica.replica_id} returned a different number of logprobs than requested")
        return [list(item) for item in scored.logprobs]

    async def stop(self) -> None:
        await self.tools.stop()
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    def _http(self) -> httpx2.AsyncClient:
        """Return the HTTP client, which is created in the event loop that uses it."""
        if self._client is None:
            self._client = httpx2.AsyncClient(timeout=None, trust_env=False)
        return self._client


class GatewaySession:
    """The model calls of one new answer: a `rerun.ModelSession`."""

    def __init__(
        self,
        client: httpx2.AsyncClient,
        base_url: str,
        headers: dict[str, str],
        settings: ShadowSettings,
        clock: Clock,
    ) -> None:
        self._client = client
        self._url = f"{base_url}/chat/completions"
        self._headers = headers
        self._settings = settings
        self._clock = clock

    async def ask(self, version: str, prompt: Turn, messages: Sequence[Message]) -> ModelAnswer:
        """Return the model's answer. Waits while users need the replicas, `patience_s` at most. Raises
        `RerunFailed`."""
        body = repeated_request(version, prompt, messages, _ANSWER_TOKENS_MAX)
        headers = self._headers | ({"X-Task-Id": prompt.task_id} if prompt.task_id else {})
        waited_s, pause_s = 0.0, _PAUSE_MIN_S
        while True:
            response = await self._post(body, headers)
            if response.status_code not in _BUSY:
                return _read(response)
            if waited_s >= _BUSY_WAIT_S:
                raise RerunFailed(f"the gateway was busy with users for {_BUSY_WAIT_S:g} s")
            await self._clock.sleep(pause_s)
            waited_s += pause_s
            pause_s = min(_PAUSE_MAX_S, 2 * pause_s)

    async def _post(self, body: dict[str, JsonValue], headers: dict[str, str]) -> httpx2.Response:
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                return await self._client.post(self._url, json=body, headers=headers)
        except TimeoutError:
            raise RerunFailed(f"no answer within {_CALL_TIMEOUT_S:g} s") from None
        except httpx2.HTTPError as error:
            raise RerunFailed(f"the gateway cannot be reached: {type(error).__name__}") from None


def _read(response: httpx2.Response) -> ModelAnswer:
    if response.status_code != 200:
        raise RerunFailed(f"the gateway answered {response.status_code}")
    try:
        completion = _Response.model_validate_json(response.content, extra="ignore")
    except ValidationError:
        raise RerunFailed("the gateway answered 200 without a chat completion") from None
    return ModelAnswer(
        completion.choices[0].message, completion.usage.prompt_tokens + completion.usage.completion_tokens
    )


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}
