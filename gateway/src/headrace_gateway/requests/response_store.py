"""Responses and conversations that clients may refer to later: by `previous_response_id`, `conversation`,
`item_reference` or `GET`.

The store is bounded in bytes and age and belongs to one gateway process. After a restart it is filled again from the
captured turns (`headrace_gateway.apis.responses_api.recalled`). A response that was evicted, or that another gateway
answered meanwhile, is unknown, and so is each response that continues it: the client gets a refusal and sends its
complete conversation.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

from headrace_gateway.access.keys import Caller
from headrace_gateway.access.refusals import ApiError, overloaded_error
from headrace_runtime.clock import Clock, SystemClock, epoch_ms
from headrace_runtime.storage.disk import NameFile
from headrace_runtime.storage.tenant_memory import TenantMemory
from headrace_schemas.values import ids

CONVERSATION_PREFIX = "conv_"
_CONVERSATION_ID = re.compile(rf"{CONVERSATION_PREFIX}[0-9a-f]{{32}}")
_AGE_MAX_MS = timedelta(days=30) // timedelta(milliseconds=1)
"""Age in milliseconds from which on a response can no longer be referred to, as in OpenAI's API."""
_REFERRING = (b"previous_response_id", b"conversation", b'"id"', b"\\u")
"""A body without any of these refers to no stored entry. An escape (`\\u`) may hide each of the others."""
_ENTRY_BYTES = 1024
"""Estimated bytes of an entry without its texts, so that the limit on bytes also limits the number of entries."""


@dataclass(frozen=True, slots=True)
class EarlierItems:
    """Items of a conversation before those of a request, and their size in bytes."""

    items: tuple[Any, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """Stored response, with the items that its request and its answer added to the conversation."""

    response_id: str
    body: bytes
    """Response as the client got it, as JSON."""
    previous_id: str | None
    """Id of the response that the request continued, from which earlier items are read; None for the first response."""
    input: tuple[Any, ...]
    """Items of the request."""
    output: tuple[Any, ...]
    """Items of the answer."""
    output_ids: tuple[str | None, ...]
    """Ids of the items of the answer."""
    item_bytes: int
    """Bytes of `input` and `output` as JSON."""
    conversation_id: str | None = None
    """Id of the conversation that the items were added to, or None. Earlier items are then read from the
    conversation."""

    @property
    def name(self) -> str:
        """Key of the entry in the store: the response id."""
        return self.response_id

    @property
    def size_bytes(self) -> int:
        """Bytes that the entry counts in the store."""
        return _ENTRY_BYTES + len(self.body) + self.item_bytes

    @property
    def newest_id(self) -> str:
        """Response id, whose UUIDv7 contains the time from which the age of the entry is computed."""
        return self.response_id


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """Stored conversation with its items, to which responses append theirs."""

    conversation_id: str = field(default_factory=lambda: f"{CONVERSATION_PREFIX}{ids.uuid7().hex}")
    metadata: dict[str, Any] = field(default_factory=dict)
    items: tuple[tuple[str, Any], ...] = ()
    """Pairs of item id and item."""
    item_bytes: int = 0
    """Bytes of the items as JSON."""
    session_key: str | None = None
    """Session that the creator's key is bound to, or that the last turn belongs to."""
    last_response: str | None = None
    """Id of the response whose turn contains exactly these items, or None if items were changed since."""
    is_recalled: bool = False
    """Whether the conversation was recovered from turns and not changed since."""

    @property
    def name(self) -> str:
        """Key of the entry in the store: the conversation id."""
        return self.conversation_id

    @property
    def size_bytes(self) -> int:
        """Bytes that the entry counts in the store."""
        return _ENTRY_BYTES + self.item_bytes + sum(len(f"{name}{text}") for name, text in self.metadata.items())

    @property
    def newest_id(self) -> str:
        """Id of the last response, or of the conversation before there is a response. Its UUIDv7 contains the time from
        which the age of the entry is computed."""
        return self.last_response or self.conversation_id

    @property
    def created_s(self) -> int:
        """Time of creation in seconds since 1970."""
        return ids.created_ms(self.conversation_id) // 1000

    def extended(
        self, items: Sequence[tuple[str, Any]], size_bytes: int, response_id: str | None = None
    ) -> StoredConversation:
        """Return the conversation with `items` appended. `response_id` is the response that they belong to, or None."""
        return replace(
            self,
            items=(*self.items, *items),
            item_bytes=self.item_bytes + size_bytes,
            last_response=response_id,
            is_recalled=False,
        )


Entry = StoredResponse | StoredConversation


def is_conversation_id(text: str) -> bool:
    """Return whether `text` has the form of a conversation id that a gateway created."""
    return _CONVERSATION_ID.fullmatch(text) is not None


class ResponseStore:
    """Responses and conversations of all tenants, the least recently used evicted first. Thread-safe.

    Args:
        bytes_max: Maximum bytes of stored requests and responses. Beyond it the tenant with the most bytes loses
            the response or conversation that it has not used for longest.
        clock: The clock by which the age of entries is computed.
        recalls: Whether turns of earlier processes are being read from the bus, until `end_recall` is called.
        forgotten: File with the keys of deleted entries, which must not be recovered from the bus.
    """

    def __init__(
        self, bytes_max: int, clock: Clock | None = None, *, recalls: bool = False, forgotten: Path | None = None
    ) -> None:
        self.remembers = bytes_max > 0
        """Whether anything is stored."""
        self._clock = clock or SystemClock()
        self._is_recalling = recalls and self.remembers
        self._forgotten = NameFile(forgotten) if forgotten is not None else None
        self._entries: TenantMemory[str, Entry] = TenantMemory(bytes_max)
        self._lock = threading.Lock()

    def view(self, caller: Caller) -> CallerResponses:
        """Return a view of the entries that `caller` may read."""
        return CallerResponses(self, caller)

    def add(self, tenant: str, entry: Entry) -> None:
        """Store a response or a conversation, and evict others if the store is full."""
        with self._lock:
            self._set(tenant, entry)

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a response of `tenant`, or None. Raises `ApiError` 503 for an unknown id while turns of earlier
        processes are being read."""
        with self._lock:
            response = self._get(tenant, response_id)
        return response if isinstance(response, StoredResponse) else None

    def items_up_to(self, tenant: str, response_id: str) -> EarlierItems | None:
        """Return the items of a response of `tenant` and of all responses that it continues, or None if one of them is
        not stored any more. Raises `ApiError` 503 while turns of earlier processes are being read."""
        responses: list[StoredResponse] = []
        previous_id: str | None = response_id
        with self._lock:
            while previous_id is not None:
                response = self._get(tenant, previous_id)
                if not isinstance(response, StoredResponse):
                    return None
                responses.append(response)
                previous_id = response.previous_id
        items = chain.from_iterable((*response.input, *response.output) for response in reversed(responses))
        return EarlierItems(tuple(items), sum(response.item_bytes for response in responses))

    def bytes_of(self, tenant: str) -> int:
        """Return the bytes that the entries of `tenant` count."""
        with self._lock:
            return self._entries.size_of(tenant)

    def delete(self, tenant: str, name: str) -> bool:
        """Delete a response or a conversation, also for later restarts. Return whether it was stored."""
        with self._lock:
            if self._entries.pop(tenant, name) is None:
                return False
            self._forget(name)
            return True

    def conversation(self, tenant: str, conversation_id: str) -> StoredConversation | None:
        """Return a conversation of `tenant`, or None. Raises `ApiError` 503 while turns of earlier processes are being
        read."""
        with self._lock:
            conversation = self._get(tenant, conversation_id)
        return conversation if isinstance(conversation, StoredConversation) else None

    def change(
        self, tenant: str, conversation_id: str, change: Callable[[StoredConversation], StoredConversation]
    ) -> StoredConversation | None:
        """Replace a conversation by the result of `change`. Return the result, or None if the conversation is not
        stored.

        The turns on the bus contain the state after the last response. If the items have changed since, `recall` will
        not restore that state.
        """
        with self._lock:
            current = self._get(tenant, conversation_id)
            if not isinstance(current, StoredConversation):
                return None
            changed = change(current)
            if current.last_response is not None and changed.last_response is None:
                self._forget(_state_name(current))
            self._set(tenant, changed)
            return changed

    def recall(
        self, tenant: str, response: StoredResponse | None, conversation: StoredConversation | None = None
    ) -> None:
        """Store entries that were recovered from a turn of an earlier process. Entries and deletions of this process
        are newer and have precedence."""
        with self._lock:
            if response is not None and not self._is_forgotten(response.response_id):
                self._set(tenant, response)
            if conversation is None:
                return
            name = conversation.conversation_id
            current = self._entries.get(tenant, name)
            if isinstance(current, StoredConversation) and not current.is_recalled:
                return
            if self._is_forgotten(name, _state_name(conversation)):
                self._entries.pop(tenant, name)
            else:
                self._set(tenant, conversation)

    def has(self, tenant: str, response_id: str) -> bool:
        """Return whether a response is stored. Never raises while turns of earlier processes are being read."""
        with self._lock:
            return self._entries.get(tenant, response_id) is not None

    def end_recall(self) -> None:
        """Stop accepting turns of earlier processes, because all of them have been read."""
        self._is_recalling = False

    def _set(self, tenant: str, entry: Entry) -> None:
        self._entries.set(tenant, entry.name, entry, entry.size_bytes)

    def _get(self, tenant: str, name: str) -> Entry | None:
        entry = self._entries.get(tenant, name)
        may_be_newer = entry is None or (isinstance(entry, StoredConversation) and entry.is_recalled)
        if self._is_recalling and may_be_newer and name.startswith((ids.RESPONSE_PREFIX, CONVERSATION_PREFIX)):
            raise overloaded_error("responses of the time before the restart are still being read; try again", 1.0)
        if entry is None:
            return None
        if epoch_ms(self._clock.now()) - ids.created_ms(entry.newest_id) > _AGE_MAX_MS:
            self._entries.pop(tenant, name)
            return None
        return entry

    def _forget(self, name: str) -> None:
        if self._forgotten is not None and name not in self._forgotten:
            self._forgotten.add(name)

    def _is_forgotten(self, *names: str) -> bool:
        return self._forgotten is not None and any(name in self._forgotten for name in names)


class CallerResponses:
    """View of the stored responses and conversations that one caller may read.

    These are the entries of the caller's tenant. If the key is bound to a session, only entries of this session.
    """

    def __init__(self, store: ResponseStore, caller: Caller) -> None:
        self._store = store
        self._tenant = caller.tenant
        session = caller.session_id
        self.session_key = None if session is None else ids.session_key(caller.tenant, session)
        """Session that the caller's key is bound to, or None."""

    def bytes_referred_by(self, body: bytes, bytes_max: int) -> int:
        """Return an upper bound of the bytes of stored entries that a request with this body may refer to, at most
        `bytes_max`."""
        if not any(word in body for word in _REFERRING):
            return 0
        return min(self._store.bytes_of(self._tenant), bytes_max)

    def add(self, entry: Entry) -> None:
        """Store a response or a conversation of the caller."""
        self._store.add(self._tenant, entry)

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a response, or None if it is not stored or the caller may not read it."""
        return self._store.get(self._tenant, response_id) if self._may_read(response_id) else None

    def items_up_to(self, response_id: str) -> EarlierItems | None:
        """Return the items of a response and of all responses that it continues, or None if one of them is not stored
        or the caller may not read the response."""
        return self._store.items_up_to(self._tenant, response_id) if self._may_read(response_id) else None

    def item(self, item_id: str) -> Any | None:
        """Return an item of a stored answer by its id (see `item_id_of`), or None."""
        response = self.get(ids.RESPONSE_PREFIX + item_id.partition("_")[2].rpartition("-")[0])
        if response is None or item_id not in response.output_ids:
            return None
        return response.output[response.output_ids.index(item_id)]

    def delete(self, response_id: str) -> bool:
        """Delete a response. Return whether it was stored and the caller may read it."""
        return self.get(response_id) is not None and self._store.delete(self._tenant, response_id)

    def conversation(self, conversation_id: str) -> StoredConversation:
        """Return a conversation. Raises `ApiError` 404 if it is not stored, or if the caller may not read it."""
        conversation = self._store.conversation(self._tenant, conversation_id)
        if conversation is None or self.session_key not in (None, conversation.session_key):
            raise _unknown_conversation()
        return conversation

    def change(
        self, conversation_id: str, change: Callable[[StoredConversation], StoredConversation]
    ) -> StoredConversation:
        """Replace a conversation by the result of `change`, and return the result. Raises `ApiError` 404."""
        self.conversation(conversation_id)
        changed = self._store.change(self._tenant, conversation_id, change)
        if changed is None:
            raise _unknown_conversation()
        return changed

    def delete_conversation(self, conversation_id: str) -> None:
        """Delete a conversation. Raises `ApiError` 404 if it is not stored, or if the caller may not read it."""
        self.conversation(conversation_id)
        self._store.delete(self._tenant, conversation_id)

    def _may_read(self, response_id: str) -> bool:
        return self.session_key is None or ids.key_of_response(response_id) == self.session_key


def item_id_of(kind: str, response_id: str, position: int) -> str:
    """Return the id of the item at `position` of a response's output. `CallerResponses.item` finds the item by it.

    The id begins with `kind`, for example `msg`.
    """
    return f"{kind}_{response_id.removeprefix(ids.RESPONSE_PREFIX)}-{position}"


_KINDS = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


def named_items(items: Sequence[Any]) -> list[tuple[str, Any]]:
    """Assign a new id to each item, and return pairs of id and item."""
    return [(f"{_KINDS.get(item.type, 'item')}_{ids.uuid7().hex}", item) for item in items]


def _state_name(conversation: StoredConversation) -> str:
    """Return the key under which the conversation's state after its last response is recorded as deleted."""
    return f"{conversation.conversation_id}:{conversation.last_response}"


def _unknown_conversation() -> ApiError:
    message = (
        "conversation: no such conversation is stored here; create one with POST /v1/conversations, or send the "
        "earlier items in input"
    )
    return ApiError(404, "conversation_not_found", message, "conversation")
