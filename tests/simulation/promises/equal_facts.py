"""Equal facts have equal ids, and events with one id are equal: consumers that dedupe by id lose no event."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas import EVENTS, DeadLetter, Event, Replica

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.promises.check import Check


def check(cluster: Cluster, that: Check) -> None:
    """Compare events of every topic. A dead letter's time is left out: a record refused twice has two times."""
    for kind in EVENTS.values():
        if kind is Replica:
            continue
        contents: dict[str, bytes] = {}
        for event in (event for partition in cluster.log.partitions(kind) for event in partition):
            content = _content(event)
            first = contents.setdefault(event.event_id, content)
            that(first == content, f"{kind.topic}: {event.event_id} came with two contents")


def _content(event: Event) -> bytes:
    if isinstance(event, DeadLetter):
        return event.model_copy(update={"time": event.time.min.replace(tzinfo=event.time.tzinfo)}).to_json()
    return event.to_json()
