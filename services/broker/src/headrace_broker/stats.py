"""Counters of the broker's own work, as plain numbers: `metrics` shows them once Prometheus' client is imported."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field


@dataclass(slots=True)
class Stats:
    """Counted since the start. Written on the event loop and, for commits, by the writer's thread."""

    requests: Counter[str] = field(default_factory=Counter)
    """By API."""
    request_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By API, from the decoded request to the encoded response; a Fetch includes its wait for records."""
    errors: Counter[int] = field(default_factory=Counter)
    """Partitions and requests refused, by Kafka error code."""
    malformed: int = 0
    """Connections closed because of what they sent."""
    handler_failures: int = 0
    """Connections closed because of a bug of ours."""
    connections: int = 0
    connections_refused: int = 0
    produced_bytes: int = 0
    fetched_bytes: int = 0
    commits: int = 0
    commit_operations: int = 0
    """Operations in those commits: the ratio is how many shared one fsync."""
    commit_seconds: float = 0.0
    commit_failures: int = 0
    rebalances: int = 0
    mended: int = 0
    """Pages and log frames that the start repaired."""
    lost_batches: int = 0
    """Batches, or runs of them, that the start found damaged beyond repair."""
    expired_bytes: int = 0
    """Deleted by retention."""
    compacted_bytes: int = 0
    """Saved by compaction."""
