"""The settings of a topic that this broker honours. Any other name is refused, never ignored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from headrace_broker.errors import Code, Rejected

POLICIES = frozenset({"delete", "compact"})
_INT64_MAX = (1 << 63) - 1


class TopicConfig(NamedTuple):
    """Values as Kafka has them: -1 is "no limit"."""

    cleanup_policy: str = "delete"
    retention_ms: int = 7 * 24 * 3600 * 1000
    retention_bytes: int = -1
    max_message_bytes: int = 1_048_588
    delete_retention_ms: int = 24 * 3600 * 1000

    @property
    def deletes(self) -> bool:
        return "delete" in self.cleanup_policy

    @property
    def compacts(self) -> bool:
        return "compact" in self.cleanup_policy

    def entries(self) -> dict[str, str]:
        """All settings by their Kafka names."""
        return {wire_name(field): str(value) for field, value in zip(self._fields, self, strict=True)}


_LOWEST = {"retention_ms": -1, "retention_bytes": -1, "max_message_bytes": 0, "delete_retention_ms": 0}


def wire_name(field: str) -> str:
    return field.replace("_", ".")


def parse(entries: Iterable[tuple[str, str | None]]) -> TopicConfig:
    """Raises `Rejected` (40) that names the setting, its value and what is possible."""
    values: dict[str, str | int] = {}
    for name, text in entries:
        field = name.replace(".", "_")
        if wire_name(field) != name or field not in TopicConfig._fields:
            known = ", ".join(TopicConfig().entries())
            raise Rejected(Code.INVALID_CONFIG, f"topic setting {name} is not supported here; known: {known}")
        if text is not None:
            values[field] = _policy(text) if field == "cleanup_policy" else _number(name, field, text)
    return TopicConfig(**values)  # type: ignore[arg-type]


def _policy(text: str) -> str:
    chosen = {part.strip() for part in text.split(",")}
    if not chosen or not chosen <= POLICIES:
        raise Rejected(Code.INVALID_CONFIG, f"cleanup.policy {text!r}: delete, compact or both, with a comma")
    return ",".join(sorted(chosen))


def _number(name: str, field: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise Rejected(Code.INVALID_CONFIG, f"{name} {text!r} is not a number") from None
    if not _LOWEST[field] <= value <= _INT64_MAX:
        raise Rejected(Code.INVALID_CONFIG, f"{name} {value} is below {_LOWEST[field]} or too large")
    return value
