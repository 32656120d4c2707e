"""Feedback and calls of users of the console, through the gateway's public interface."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from headrace_console.sources.calls import bearer, call
from headrace_console.users import User
from headrace_runtime.errors import Refused
from headrace_schemas import Turn
from headrace_schemas.http.answer_form import repeated_request
from headrace_schemas.values.ids import uuid7

SOURCE = "console"
"""Source of feedback from the console. `scorer.weights` may give it a weight of its own."""
ANSWER_TOKENS_MAX = 1_024
"""Tokens of an answer that a user requests from another version."""
_ANSWER_TIMEOUT_S = 120.0
_DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class FeedbackReply:
    """Answer of the gateway. `reason` states why the feedback has no effect, or is None if it may be trained."""

    feedback_id: str
    reason: str | None


class GatewayClient:
    """Client of the gateway with one API key for each tenant. One requested answer is in progress at a time."""

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

    async def send(self, user: User, tenant: str, body: Mapping[str, JsonValue], source: str = SOURCE) -> FeedbackReply:
        """Send feedback of a user about a session or a response of a tenant.

        Raises:
            Refused: the user may not see the tenant, no key of it is set, the gateway refuses the feedback, or it does
                not answer.
        """
        headers = self._headers(user, tenant, "feedback")
        content = json.dumps({**body, "source": source, "rater": user.name}).encode()
        reply = json.loads(await call("gateway", "POST", f"{self._url}/v1/feedback", headers, content))
        reason = None if reply.get("teaches", True) else str(reply.get("reason", "no answer can be trained"))
        return FeedbackReply(str(reply.get("feedback_id", "")), reason)

    async def answer(self, user: User, turn: Turn, version: str) -> str:
        """Call a version with the prompt of a turn, and return the response id.

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
