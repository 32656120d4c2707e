"""The bytes of the spool that each tenant uses, so that no tenant fills it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from pydantic_core import from_json

from headrace_gateway.spool_file import Spooled
from headrace_schemas import EVENTS


class Shares:
    """Bytes by tenant."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()

    def load(self, sizes: Mapping[str, int]) -> None:
        """Set the bytes that the spool held at the start."""
        self._bytes.update(sizes)

    def add(self, events: Iterable[Spooled]) -> None:
        for event in events:
            self._bytes[tenant_of(event)] += len(event.value)

    def remove(self, events: Iterable[Spooled]) -> None:
        for event in events:
            tenant = tenant_of(event)
            self._bytes[tenant] -= len(event.value)
            if self._bytes[tenant] <= 0:
                del self._bytes[tenant]

    def of(self, tenant: str) -> int:
        return self._bytes[tenant]


def tenant_of(item: Spooled) -> str:
    """The tenant of an event; empty for events without one, such as dead letters."""
    try:
        event = from_json(item.value)
    except ValueError:
        return ""
    if not isinstance(event, dict):
        return ""
    model = EVENTS.get(item.topic)
    field = model.model_fields.get("tenant") if model is not None else None
    return str(event.get("tenant", field.default if field is not None else ""))  # feedback leaves its defaults out
