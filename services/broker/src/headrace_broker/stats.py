"""Counters of the broker as plain numbers. `metrics` exports them after Prometheus' client has been imported."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field


@dataclass(slots=True)
class Stats:
    """Counters since the start of the process. The event loop updates them, and the writer's thread those of
    commits."""

    requests: Counter[str] = field(default_factory=Counter)
    """Number of requests by API."""
    request_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by API from the decoded request to the response. A Fetch includes its wait for records."""
    errors: Counter[int] = field(default_factory=Counter)
    """Number of refused partitions and requests by Kafka error code."""
    malformed: int = 0
    """Number of connections that were closed because of malformed data."""
    handler_failures: int = 0
    """Number of connections that were closed because of a bug."""
    connections: int = 0
    connections_refused: int = 0
    produced_bytes: int = 0
    fetched_bytes: int = 0
    commits: int = 0
    commit_operations: int = 0
    """Number of operations in all commits. Divided by `commits`, it is the mean number of operations per fsync."""
    commit_seconds: float = 0.0
    commit_failures: int = 0
    rebalances: int = 0
    repaired: int = 0
    """Number of pages and log frames that were repaired at the start."""
    lost_batches: int = 0
    """Number of ranges of batches that could not be repaired at the start."""
    expired_bytes: int = 0
    """Bytes that retention deleted."""
    compacted_bytes: int = 0
    """Bytes that compaction removed."""
