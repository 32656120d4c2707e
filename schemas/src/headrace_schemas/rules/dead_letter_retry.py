"""Rules for publishing dead-lettered records again, for the command line and the console."""

from __future__ import annotations

from headrace_schemas.events.dead_letter import RETRY_HEADER, DeadLetter
from headrace_schemas.events.envelope import SEQUENCE_HEADER

TABLES = frozenset({"replicas", "routing"})
"""Compacted topics: an old record would replace the newest one."""
_NOT_RETRIABLE = frozenset({("collector", "invalid_trajectory")})
"""Service and reason of letters about records that took effect before the refusal; a retry would be a duplicate."""
_KEY_LENGTH_MAX = 512


def permanent_problem(letter: DeadLetter) -> str | None:
    """Return why the record of a letter must never be published again, or None if a valid record may be."""
    if letter.source_topic in TABLES:
        return (
            f"{letter.source_topic} is a table: its producer publishes the newest row again, and an old row would win"
        )
    if (letter.service, letter.reason) in _NOT_RETRIABLE:
        return "its session is closed; only a replay can apply the record"
    key = letter.source_key or ""
    if "\ufffd" in key or len(key) >= _KEY_LENGTH_MAX:
        return "its key is not text or is longer than a dead letter stores"
    return None


def retry_headers(letter: DeadLetter, *, keeps_partition: bool) -> tuple[tuple[str, bytes], ...]:
    """Return the headers of the record that is published again.

    Args:
        letter: the dead letter.
        keeps_partition: whether the record returns to its partition. Then it also keeps its place among the records of
            its key, so that records after the original one stay after it.
    """
    headers = [(name, text.encode()) for name, text in letter.headers.items() if name != RETRY_HEADER]
    headers.append((RETRY_HEADER, letter.event_id.encode()))
    if keeps_partition and letter.source_offset is not None and SEQUENCE_HEADER not in letter.headers:
        headers.append((SEQUENCE_HEADER, str(letter.source_offset).encode()))
    return tuple(headers)
