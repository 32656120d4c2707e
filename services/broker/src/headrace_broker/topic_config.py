"""The topic settings that this broker honours, and those that it accepts because they have no effect here.

Any other name or value is refused, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from headrace_broker.errors import Code, Rejected

POLICIES = frozenset({"delete", "compact"})
_INT64_MAX = (1 << 63) - 1
INERT = frozenset(
    {
        "file.delete.delay.ms",
        "flush.messages",
        "flush.ms",
        "follower.replication.throttled.replicas",
        "index.interval.bytes",
        "leader.replication.throttled.replicas",
        "message.downconversion.enable",
        "min.cleanable.dirty.ratio",
        "preallocate",
        "segment.bytes",
        "segment.index.bytes",
        "segment.jitter.ms",
        "segment.ms",
        "unclean.leader.election.enable",
    }
)
"""Settings of segments, replicas and scheduling, which have no effect here."""
ONLY = {
    "compression.type": "producer",
    "max.compaction.lag.ms": str(_INT64_MAX),
    "message.timestamp.after.max.ms": "3600000",
    "message.timestamp.before.max.ms": str(_INT64_MAX),
    "message.timestamp.type": "CreateTime",
    "min.insync.replicas": "1",
    "remote.storage.enable": "false",
}
"""The only value that this broker supports; another value is refused."""


class TopicConfig(NamedTuple):
    """Values as Kafka has them: -1 is "no limit". `others` are `INERT` and `ONLY` ones, as they were given."""

    cleanup_policy: str = "delete"
    retention_ms: int = 7 * 24 * 3600 * 1000
    retention_bytes: int = -1
    max_message_bytes: int = 1_048_588
    delete_retention_ms: int = 24 * 3600 * 1000
    min_compaction_lag_ms: int = 0
    others: tuple[tuple[str, str], ...] = ()

    @property
    def deletes(self) -> bool:
        return "delete" in self.cleanup_policy

    @property
    def compacts(self) -> bool:
        return "compact" in self.cleanup_policy

    def entries(self) -> dict[str, str]:
        """All settings by their Kafka names."""
        return {wire_name(field): str(getattr(self, field)) for field in _HONOURED} | dict(self.others)

    def given(self) -> dict[str, str]:
        """Those that differ from the default."""
        default = TopicConfig().entries()
        return {name: value for name, value in self.entries().items() if default.get(name) != value}

    def packed(self) -> str:
        return json.dumps(self)

    @classmethod
    def unpacked(cls, text: str) -> TopicConfig:
        values = json.loads(text)  # fewer of them when an older broker wrote it
        found = cls(*values)
        return found._replace(others=tuple((name, value) for name, value in found.others))


_HONOURED = tuple(field for field in TopicConfig._fields if field != "others")
_LOWEST = {
    "retention_ms": -1,
    "retention_bytes": -1,
    "max_message_bytes": 0,
    "delete_retention_ms": 0,
    "min_compaction_lag_ms": 0,
}


def wire_name(field: str) -> str:
    return field.replace("_", ".")


def parse(entries: Iterable[tuple[str, str | None]]) -> TopicConfig:
    """Raises `Rejected` (40) that names the setting, its value and what is possible."""
    values: dict[str, str | int] = {}
    others: dict[str, str] = {}
    for name, text in entries:
        field = name.replace(".", "_")
        if name in INERT or name in ONLY:
            _check_only(name, text)
            if text is not None:
                others[name] = text
        elif wire_name(field) != name or field not in _HONOURED:
            known = ", ".join([*TopicConfig().entries(), *sorted(INERT), *sorted(ONLY)])
            raise Rejected(Code.INVALID_CONFIG, f"topic setting {name} is not supported here; known: {known}")
        elif text is not None:
            values[field] = _policy(text) if field == "cleanup_policy" else _number(name, field, text)
    return TopicConfig(**values, others=tuple(sorted(others.items())))  # type: ignore[arg-type]


def _check_only(name: str, text: str | None) -> None:
    wanted = ONLY.get(name)
    if wanted is not None and text is not None and text != wanted:
        raise Rejected(Code.INVALID_CONFIG, f"{name} {text!r}: here it is {wanted} and nothing else")


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
