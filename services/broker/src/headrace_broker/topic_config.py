"""Settings of topics: those that this broker implements, and those that it accepts because they have no effect here.

All other names and values are refused.
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
"""Settings with a single supported value."""


class TopicConfig(NamedTuple):
    """Settings of a topic, with Kafka's values. -1 means no limit. `inert` contains the settings without effect that
    were set (names in `INERT` and `ONLY`)."""

    cleanup_policy: str = "delete"
    retention_ms: int = 7 * 24 * 3600 * 1000
    retention_bytes: int = -1
    max_message_bytes: int = 1_048_588
    delete_retention_ms: int = 24 * 3600 * 1000
    min_compaction_lag_ms: int = 0
    inert: tuple[tuple[str, str], ...] = ()

    @property
    def deletes(self) -> bool:
        """Whether old records of the topic are deleted by age or size (`cleanup.policy` contains `delete`)."""
        return "delete" in self.cleanup_policy

    @property
    def compacts(self) -> bool:
        """Whether the topic is compacted (`cleanup.policy` contains `compact`)."""
        return "compact" in self.cleanup_policy

    def entries(self) -> dict[str, str]:
        """Return all settings by their Kafka names."""
        return {wire_name(field): str(getattr(self, field)) for field in _HONOURED} | dict(self.inert)

    def non_default(self) -> dict[str, str]:
        """Return the settings that differ from their defaults."""
        default = TopicConfig().entries()
        return {name: value for name, value in self.entries().items() if default.get(name) != value}

    def packed(self) -> str:
        """Encode the settings as JSON, for the column of the file."""
        return json.dumps(self)

    @classmethod
    def unpacked(cls, text: str) -> TopicConfig:
        """Decode settings from the JSON that `packed` has written."""
        values = json.loads(text)  # an older broker has stored fewer values
        config = cls(*values)
        return config._replace(inert=tuple((name, value) for name, value in config.inert))


_HONOURED = tuple(field for field in TopicConfig._fields if field != "inert")
_LOWEST = {
    "retention_ms": -1,
    "retention_bytes": -1,
    "max_message_bytes": 0,
    "delete_retention_ms": 0,
    "min_compaction_lag_ms": 0,
}


def wire_name(field: str) -> str:
    """Return Kafka's name of a field of `TopicConfig`."""
    return field.replace("_", ".")


def parse(entries: Iterable[tuple[str, str | None]]) -> TopicConfig:
    """Parse settings from Kafka's names and values. Raises `Rejected` with error code 40 for unsupported names and
    values."""
    values: dict[str, str | int] = {}
    inert: dict[str, str] = {}
    for name, text in entries:
        field = name.replace(".", "_")
        if name in INERT or name in ONLY:
            _check_only(name, text)
            if text is not None:
                inert[name] = text
        elif wire_name(field) != name or field not in _HONOURED:
            names = ", ".join([*TopicConfig().entries(), *sorted(INERT), *sorted(ONLY)])
            raise Rejected(Code.INVALID_CONFIG, f"topic setting {name} is not supported; supported: {names}")
        elif text is not None:
            values[field] = _policy(text) if field == "cleanup_policy" else _number(name, field, text)
    return TopicConfig(**values, inert=tuple(sorted(inert.items())))  # type: ignore[arg-type]


def _check_only(name: str, text: str | None) -> None:
    supported = ONLY.get(name)
    if supported is not None and text is not None and text != supported:
        raise Rejected(Code.INVALID_CONFIG, f"{name} = {text!r}: must be {supported}")


def _policy(text: str) -> str:
    chosen = {part.strip() for part in text.split(",")}
    if not chosen or not chosen <= POLICIES:
        raise Rejected(Code.INVALID_CONFIG, f"cleanup.policy = {text!r}: must be delete, compact or delete,compact")
    return ",".join(sorted(chosen))


def _number(name: str, field: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise Rejected(Code.INVALID_CONFIG, f"{name} = {text!r}: must be a number") from None
    if not _LOWEST[field] <= value <= _INT64_MAX:
        raise Rejected(Code.INVALID_CONFIG, f"{name} = {value}: must be between {_LOWEST[field]} and {_INT64_MAX}")
    return value
