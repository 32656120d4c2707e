"""Responses that clients may refer to later, by `previous_response_id`, by `item_reference` or by `GET`.

The store is bounded and belongs to one gateway process. A response that was dropped, or that another gateway answered,
is unknown: the client gets a refusal and sends its conversation whole.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from headrace_gateway.access import Caller
from headrace_runtime.storage.tenant_memory import TenantMemory
from headrace_schemas.values import ids

_RESPONSE_PREFIX = "chatcmpl-"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response with the conversation that it continues."""

    body: dict[str, Any]
    """The response as the client got it."""
    input: tuple[Any, ...]
    """The items of the conversation before the response. Responses of one conversation share them."""
    output: tuple[Any, ...]
    """The items of the response."""
    size_bytes: int


class ResponseStore:
    """The newest responses of all tenants. Usable from several threads.

    Args:
        bytes_max: Most bytes of requests and responses that are stored. Beyond it the tenant with the most bytes loses
            the response that it has not used for longest.
    """

    def __init__(self, bytes_max: int) -> None:
        self._responses: TenantMemory[str, StoredResponse] = TenantMemory(bytes_max)
        self._lock = threading.Lock()

    def view(self, caller: Caller) -> CallerResponses:
        """Return the responses that `caller` may read."""
        return CallerResponses(self, caller)

    def add(self, tenant: str, response: StoredResponse) -> None:
        """Store a response, and drop others that there is no room for."""
        with self._lock:
            self._responses.set(tenant, response.body["id"], response, response.size_bytes)

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a response of `tenant`, or None."""
        with self._lock:
            return self._responses.get(tenant, response_id)

    def delete(self, tenant: str, response_id: str) -> bool:
        """Drop a response. Return whether it was stored."""
        with self._lock:
            return self._responses.pop(tenant, response_id) is not None


class CallerResponses:
    """The stored responses that one caller may read: those of its tenant, or of the session that its key is bound
    to."""

    def __init__(self, store: ResponseStore, caller: Caller) -> None:
        self._store = store
        self._tenant = caller.tenant
        session = caller.session_id
        self._session_key = None if session is None else ids.session_key(caller.tenant, session)

    def add(self, response: StoredResponse) -> None:
        """Store a response of the caller."""
        self._store.add(self._tenant, response)

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a response, or None if it is not stored or the caller may not read it."""
        return self._store.get(self._tenant, response_id) if self._may_read(response_id) else None

    def item(self, item_id: str) -> Any | None:
        """Return an item of a response by the id that `item_id_of` gave it, or None."""
        name, _, position = item_id.partition("_")[2].rpartition("-")
        response = self.get(_RESPONSE_PREFIX + name)
        if response is None or not position.isdecimal() or int(position) >= len(response.output):
            return None
        is_same = response.body["output"][int(position)].get("id") == item_id
        return response.output[int(position)] if is_same else None

    def delete(self, response_id: str) -> bool:
        """Drop a response. Return whether it was stored and the caller may read it."""
        return self._may_read(response_id) and self._store.delete(self._tenant, response_id)

    def _may_read(self, response_id: str) -> bool:
        return self._session_key is None or ids.key_of_response(response_id) == self._session_key


def item_id_of(kind: str, response_id: str, position: int) -> str:
    """Return the id of the item at `position` of a response's output, by which `CallerResponses.item` finds it."""
    return f"{kind}_{response_id.removeprefix(_RESPONSE_PREFIX)}-{position}"
