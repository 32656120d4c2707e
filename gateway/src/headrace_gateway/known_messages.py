"""Memory of the messages of recent requests, so that a long conversation is read once and not at each of its calls.

A client sends its whole conversation with each call. Only messages of a plain form are remembered, whose reading
depends on nothing but themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from headrace_runtime.storage.tenant_memory import TenantMemory

if TYPE_CHECKING:
    from headrace_gateway.chat_messages import ChatMessage

_BYTES_MAX = 33_554_432
_MESSAGE_LENGTH_MAX = 65_536
_OBJECT_BYTES = 1536
"""Estimated bytes of a message in addition to its text, which is kept as read, as an event and as JSON."""
_FIELDS = frozenset(("role", "content", "tool_calls", "tool_call_id", "name"))


class MessageMemory:
    """The messages of all tenants. Thread-safe."""

    def __init__(self) -> None:
        self._messages: TenantMemory[bytes, ChatMessage] = TenantMemory(_BYTES_MAX)
        self._lock = threading.Lock()

    def view(self, tenant: str) -> KnownMessages:
        """Return the messages of one tenant."""
        return KnownMessages(self, tenant)

    def get(self, tenant: str, key: bytes) -> ChatMessage | None:
        """Return a message, or None."""
        with self._lock:
            return self._messages.get(tenant, key)

    def set(self, tenant: str, key: bytes, message: ChatMessage, size_bytes: int) -> None:
        """Remember a message, and forget others that there is no room for."""
        with self._lock:
            self._messages.set(tenant, key, message, size_bytes)


class KnownMessages:
    """The messages that one tenant sent."""

    def __init__(self, memory: MessageMemory, tenant: str) -> None:
        self._memory = memory
        self._tenant = tenant

    def read(self, value: Any, validate: Callable[[Any], ChatMessage]) -> ChatMessage:
        """Return the message that `validate` makes of `value`, from the memory if it is there."""
        key = _key_of(value)
        message = None if key is None else self._memory.get(self._tenant, key)
        if message is None:
            message = validate(value)
            if key is not None and len(key) <= _MESSAGE_LENGTH_MAX:
                self._memory.set(self._tenant, key, message, _OBJECT_BYTES + 4 * len(key))
        return message


def _key_of(value: Any) -> bytes | None:
    """Return a key by which equal messages are known, or None for a message that is read anew each time."""
    if not isinstance(value, dict) or not value.keys() <= _FIELDS or value.get("role") == "function":
        return None
    return to_json(value) if isinstance(value.get("content"), str | None) else None
