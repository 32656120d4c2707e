"""HTTP clients of the registry and the gateway, which act under the name of a user.

An error response of a service is raised as `Refused` with the same status.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import ssl
from collections.abc import Mapping
from typing import TypeVar
from urllib.parse import quote

import httpx2
from pydantic import JsonValue, ValidationError

from headrace_console.settings import User
from headrace_runtime.clock import Clock
from headrace_runtime.errors import Refused
from headrace_schemas import Turn
from headrace_schemas.http.answer_form import repeated_request
from headrace_schemas.http.catalog import WHO_HEADER
from headrace_schemas.http.registry_api import (
    ModelList,
    ModelState,
    RolloutList,
    RolloutState,
    VersionList,
    VersionState,
)
from headrace_schemas.values.base import Model
from headrace_schemas.values.ids import uuid7
from headrace_schemas.values.text import printable

_TIMEOUT_S = 10.0


def bearer(key: str) -> dict[str, str]:
    """Return the headers that authenticate a request with `key`, or no headers if the key is empty."""
    return {"authorization": f"Bearer {key}"} if key else {}


@functools.cache
def _tls() -> ssl.SSLContext:
    """Return the TLS context of all clients. It is shared, because loading its certificates takes 25 ms."""
    return httpx2.create_ssl_context(trust_env=False)


def open_client(timeout_s: float, headers: Mapping[str, str] | None = None) -> httpx2.AsyncClient:
    """Open an HTTP client for other services. The caller must close it."""
    return httpx2.AsyncClient(timeout=timeout_s, trust_env=False, headers=dict(headers or {}), verify=_tls())


async def call(
    service: str,
    method: str,
    url: str,
    headers: Mapping[str, str],
    content: bytes = b"",
    *,
    timeout_s: float = _TIMEOUT_S,
) -> bytes:
    """Send a request to a service, and return the body of its answer.

    Raises:
        Refused: the service answers with an error, whose status and message are taken over, or it does not answer
            (503).
    """
    try:
        async with open_client(timeout_s) as client:
            reply = await client.request(method, url, headers=dict(headers), content=content)
    except (httpx2.HTTPError, OSError) as error:
        problem = f"The {service} does not answer at {url.partition('/v1/')[0]} ({type(error).__name__})."
        raise Refused(503, f"{service}_away", problem) from None
    if reply.status_code >= 400:
        raise Refused(reply.status_code, service, f"The {service} refuses this: {_message(reply)}")
    return reply.content


def _message(reply: httpx2.Response) -> str:
    try:
        return printable(str(reply.json()["error"]["message"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"status {reply.status_code}"


_CACHE_S = 1.0
_CACHED_MAX = 64
VERSIONS_MAX = 400
M = TypeVar("M", bound=Model)


class RegistryReader:
    """Client of the registry. It caches each response to a GET for a second."""

    def __init__(self, url: str, internal_key: str, clock: Clock) -> None:
        self._url = url
        self._headers = bearer(internal_key)
        self._clock = clock
        self._cache: dict[str, tuple[float, bytes]] = {}

    async def models(self) -> tuple[ModelState, ...]:
        """Return the states of all models."""
        return (await self._get("/v1/models", ModelList)).data

    async def model(self, name: str) -> ModelState:
        """Return the state of the model `name`. Raises `Refused` 404 if the registry has no such model."""
        return await self._get(f"/v1/models/{_segment(name)}", ModelState)

    async def versions(self, model: str) -> tuple[VersionState, ...]:
        """Return the newest 400 versions of a model, the newest first."""
        path = f"/v1/models/{_segment(model)}/versions?limit={VERSIONS_MAX}"
        return (await self._get(path, VersionList)).data

    async def rollouts(self, limit: int = 100) -> tuple[RolloutState, ...]:
        """Return the newest rollouts of all models, without their chart data."""
        return (await self._get(f"/v1/rollouts?limit={limit}", RolloutList)).data

    async def rollout(self, rollout_id: str) -> RolloutState:
        """Return a rollout with its chart data and its decisions. Raises `Refused` 404 if there is no such rollout."""
        return await self._get(f"/v1/rollouts/{_segment(rollout_id)}", RolloutState)

    async def change(self, path: str, body: Model, user: User) -> None:
        """Send a change to the registry. The registry's audit log records the name of the user.

        Raises:
            Refused: the registry refuses the change, with its reason, or it does not answer (503).
        """
        headers = {**self._headers, WHO_HEADER: user.name, "content-type": "application/json"}
        await call("registry", "POST", f"{self._url}{path}", headers, body.model_dump_json(exclude_none=True).encode())
        self._cache.clear()

    async def _get(self, path: str, model: type[M]) -> M:
        now_s = self._clock.monotonic_s()
        cached = self._cache.get(path)
        if cached is not None and now_s - cached[0] < _CACHE_S:
            content = cached[1]
        else:
            content = await call("registry", "GET", f"{self._url}{path}", self._headers)
            if len(self._cache) >= _CACHED_MAX:
                self._cache.clear()
            self._cache[path] = (now_s, content)
        try:
            return model.model_validate_json(content, extra="ignore")
        except ValidationError:
            raise Refused(
                502, "registry_answer", "The registry's answer cannot be read. Is it another release?"
            ) from None


def _segment(name: str) -> str:
    """Return a name quoted as one segment of a URL path.

    Raises:
        Refused: 404 for a name such as `..`, which would change the path.
    """
    if name in ("", ".", ".."):
        raise Refused(404, "not_found", "There is nothing here for you. Check the address.")
    return quote(name, safe="@")


SOURCE = "console"
"""Source of feedback from the console. `scorer.weights` may give it a weight of its own."""
ANSWER_TOKENS_MAX = 1_024
"""Tokens of an answer that a user requests from another version."""
_ANSWER_TIMEOUT_S = 120.0
_DEFAULT_TENANT = "default"


class GatewayClient:
    """Client of the gateway with one API key for each tenant. `answer` runs one call at a time."""

    def __init__(self, url: str, keys: Mapping[str, str], internal_key: str) -> None:
        """Create a client.

        Args:
            url: address of the gateway.
            keys: API keys by tenant, with the scope `feedback`, and `chat` for answers of other versions.
            internal_key: key of the tenant `default`, unless `keys` has one.
        """
        self._url = url
        self._keys = {_DEFAULT_TENANT: internal_key, **keys}
        self._lock = asyncio.Lock()

    async def send(self, user: User, tenant: str, body: Mapping[str, JsonValue], source: str = SOURCE) -> str | None:
        """Send feedback of a user to the gateway, about a session or a response of a tenant.

        Return the reason why training ignores the feedback, or None if it may count.

        Args:
            user: the user, who is named as the rater.
            tenant: tenant of the session or response.
            body: fields of the feedback.
            source: source of the reward that the feedback gives.

        Raises:
            Refused: the user may not see the tenant, no key of it is set, the gateway refuses the feedback, or it does
                not answer.
        """
        headers = self._headers(user, tenant, "feedback")
        content = json.dumps({**body, "source": source, "rater": user.name}).encode()
        reply = json.loads(await call("gateway", "POST", f"{self._url}/v1/feedback", headers, content))
        return None if reply.get("teaches", True) else str(reply.get("reason", "no answer can be trained"))

    async def answer(self, user: User, turn: Turn, version: str) -> str:
        """Call a version with the prompt of a turn, and return the id of the response.

        The call is marked as evaluation, so it is not trained, and has a session of its own.

        Args:
            user: the user.
            turn: the turn with its whole prompt.
            version: the exact version.

        Raises:
            Refused: as `send`, 409 for a prompt without messages, or 429 while another answer is in progress.
        """
        if not turn.rendered:
            raise Refused(409, "no_messages", "The prompt of this turn is a text and no conversation.")
        headers = self._headers(user, turn.tenant, "chat") | {"x-headrace-purpose": "eval"}
        if self._lock.locked():
            raise Refused(429, "busy", "Another answer is in progress. Try again in a moment.")
        session = f"try-{uuid7().hex}"
        labels: dict[str, JsonValue] = {"session_id": session, "task_id": turn.task_id}
        body = repeated_request(version, turn, turn.messages, ANSWER_TOKENS_MAX) | {
            "metadata": {name: label for name, label in labels.items() if label is not None}
        }
        async with self._lock:
            url, content = f"{self._url}/v1/chat/completions", json.dumps(body).encode()
            reply = await call("gateway", "POST", url, headers, content, timeout_s=_ANSWER_TIMEOUT_S)
        with contextlib.suppress(Refused):  # otherwise the collector ends the session later
            await call("gateway", "POST", f"{self._url}/v1/sessions/{session}/end", headers)
        try:
            return str(json.loads(reply)["id"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Refused(502, "gateway_answer", "The gateway's answer has no response id.") from None

    def _headers(self, user: User, tenant: str, scope: str) -> dict[str, str]:
        if not user.scope.permits(tenant):
            raise Refused(403, "tenant", "This tenant is not yours.")
        if tenant not in self._keys:
            problem = f"console.gateway_keys has no key of tenant {tenant}; add one with the scope {scope}"
            raise Refused(403, "no_gateway_key", problem)
        return {"content-type": "application/json"} | bearer(self._keys[tenant])
