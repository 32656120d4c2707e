"""Requests that come again although their answer was on its way: retries of clients that do not count them."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_gateway.chat_call import ChatCall
from headrace_runtime.clock import Clock
from headrace_runtime.storage.tenant_memory import TenantMemory

_WITHIN_S = 10.0
"""Time after an answer within which the same request may be its retry: a proxy may have cut the connection unseen."""
_REQUESTS_MAX = 16_384
"""Requests that are remembered, about 8 MB. Beyond it the tenant with the most requests forgets its oldest."""
_Key = tuple[str, str]


@dataclass(slots=True)
class _Request:
    turn_id: str
    ended_s: float | None = None
    """When the answer ended, by this process's monotonic clock."""
    is_lost: bool = False
    """Whether the client went away before the end of the answer."""


class RepeatedRequests:
    """The newest request of each session and digest that this process has answered."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._requests: TenantMemory[_Key, _Request] = TenantMemory(_REQUESTS_MAX)

    def begin(self, call: ChatCall) -> str | None:
        """Record a request. Return the turn that it repeats, if the client may not have got that turn's answer."""
        key = self._key(call)
        earlier = self._requests.pop(call.identity.tenant, key)
        self._requests.set(call.identity.tenant, key, _Request(call.response_id))
        if earlier is None:
            return None
        is_recent = earlier.ended_s is not None and self._clock.monotonic_s() - earlier.ended_s <= _WITHIN_S
        return earlier.turn_id if earlier.is_lost or is_recent else None

    def disconnected(self, call: ChatCall) -> None:
        """Record that the client went away before the end of the answer."""
        request = self._find(call)
        if request is not None:
            request.is_lost = True

    def end(self, call: ChatCall) -> None:
        """Record the end of the answer."""
        request = self._find(call)
        if request is not None:
            request.ended_s = self._clock.monotonic_s()

    def _find(self, call: ChatCall) -> _Request | None:
        request = self._requests.get(call.identity.tenant, self._key(call))
        return request if request is not None and request.turn_id == call.response_id else None

    @staticmethod
    def _key(call: ChatCall) -> _Key:
        return call.identity.session_key, call.digest
