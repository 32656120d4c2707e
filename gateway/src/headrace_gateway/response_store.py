"""Responses that clients may refer to later, by `previous_response_id`, by `item_reference` or by `GET`.

The store is bounded and belongs to one gateway process. A response that was dropped, or that another gateway answered,
is unknown, and so is a conversation that continues it: the client gets a refusal and sends its conversation whole.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import chain
from typing import Any

from headrace_gateway.access import Caller
from headrace_runtime.storage.tenant_memory import TenantMemory
from headrace_schemas.values import ids

_RESPONSE_PREFIX = "chatcmpl-"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response with what its request added to the conversation."""

    response_id: str
    body: bytes
    """The response as the client got it, as JSON."""
    previous_id: str | None
    """The response that its request continued. Its conversation is read from there."""
    input: tuple[Any, ...]
    """The items of its request."""
    output: tuple[Any, ...]
    """The items of the response."""
    output_ids: tuple[str | None, ...]
    """The ids of the items of the response."""
    item_bytes: int
    """Bytes of `input` and `output` as JSON."""

    @property
    def size_bytes(self) -> int:
        """Bytes that the response takes in the store."""
        return len(self.body) + self.item_bytes


@dataclass(frozen=True, slots=True)
class Conversation:
    """The items of a response and of all responses that it continues, from the first one."""

    items: tuple[Any, ...]
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
            self._responses.set(tenant, response.response_id, response, response.size_bytes)

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a response of `tenant`, or None."""
        with self._lock:
            return self._responses.get(tenant, response_id)

    def conversation(self, tenant: str, response_id: str) -> Conversation | None:
        """Return the conversation up to a response of `tenant`, or None if a part of it is not stored any more."""
        responses: list[StoredResponse] = []
        previous_id: str | None = response_id
        with self._lock:
            while previous_id is not None:
                response = self._responses.get(tenant, previous_id)
                if response is None:
                    return None
                responses.append(response)
                previous_id = response.previous_id
        items = chain.from_iterable((*response.input, *response.output) for response in reversed(responses))
        return Conversation(tuple(items), sum(response.item_bytes for response in responses))

    def bytes_of(self, tenant: str) -> int:
        """Return how many bytes the responses of `tenant` take."""
        with self._lock:
            return self._responses.size_of(tenant)

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

    @property
    def stored_bytes(self) -> int:
        """Bytes of the responses of the caller's tenant."""
        return self._store.bytes_of(self._tenant)

    def add(self, response: StoredResponse) -> None:
        """Store a response of the caller."""
        self._store.add(self._tenant, response)

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a response, or None if it is not stored or the caller may not read it."""
        return self._store.get(self._tenant, response_id) if self._may_read(response_id) else None

    def conversation(self, response_id: str) -> Conversation | None:
        """Return the conversation up to a response, or None if a part of it is not stored or the caller may not read
        the response."""
        return self._store.conversation(self._tenant, response_id) if self._may_read(response_id) else None

    def item(self, item_id: str) -> Any | None:
        """Return an item of a response by the id that `item_id_of` gave it, or None."""
        response = self.get(_RESPONSE_PREFIX + item_id.partition("_")[2].rpartition("-")[0])
        if response is None or item_id not in response.output_ids:
            return None
        return response.output[response.output_ids.index(item_id)]

    def delete(self, response_id: str) -> bool:
        """Drop a response. Return whether it was stored and the caller may read it."""
        return self._may_read(response_id) and self._store.delete(self._tenant, response_id)

    def _may_read(self, response_id: str) -> bool:
        return self._session_key is None or ids.key_of_response(response_id) == self._session_key


def item_id_of(kind: str, response_id: str, position: int) -> str:
    """Return the id of the item at `position` of a response's output, by which `CallerResponses.item` finds it."""
    return f"{kind}_{response_id.removeprefix(_RESPONSE_PREFIX)}-{position}"
