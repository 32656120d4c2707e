"""Feedback of users of the console, through the gateway's public interface."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from headrace_console.sources.calls import bearer, call
from headrace_console.users import User
from headrace_runtime.errors import Refused

SOURCE = "console"
"""Source of feedback from the console. `scorer.weights` may give it a weight of its own."""
_DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class FeedbackReply:
    """Answer of the gateway. `reason` states why the feedback has no effect, or is None if it may be trained."""

    feedback_id: str
    reason: str | None


class FeedbackClient:
    """Client of `POST /v1/feedback` with one API key for each tenant."""

    def __init__(self, url: str, keys: Mapping[str, str], internal_key: str) -> None:
        """Create a client.

        Args:
            url: address of the gateway.
            keys: API keys by tenant, with the scope `feedback`.
            internal_key: key of the tenant `default`, unless `keys` has one.
        """
        self._url = url
        self._keys = {_DEFAULT_TENANT: internal_key, **keys}

    async def send(self, user: User, tenant: str, body: Mapping[str, JsonValue], source: str = SOURCE) -> FeedbackReply:
        """Send feedback of a user about a session or a response of a tenant.

        Raises:
            Refused: the user may not see the tenant, no key of it is set, the gateway refuses the feedback, or it does
                not answer.
        """
        if not user.scope.permits(tenant):
            raise Refused(403, "tenant", "This tenant is not yours.")
        if tenant not in self._keys:
            problem = f"console.gateway_keys has no key of tenant {tenant}; add one with the scope feedback"
            raise Refused(403, "no_gateway_key", problem)
        headers = {"content-type": "application/json"} | bearer(self._keys[tenant])
        content = json.dumps({**body, "source": source, "rater": user.name}).encode()
        reply = json.loads(await call("gateway", "POST", f"{self._url}/v1/feedback", headers, content))
        reason = None if reply.get("teaches", True) else str(reply.get("reason", "no answer can be trained"))
        return FeedbackReply(str(reply.get("feedback_id", "")), reason)
