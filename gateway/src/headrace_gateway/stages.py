"""The events of a spool that may go to the bus together.

An event is sent once all earlier events of its session on other topics are acknowledged: an end must not overtake the
turns that it ends, nor feedback the turns that it is about. Sessions are independent. A batch takes as many round trips
as the session with the most changes of topic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from headrace_schemas import Event, SessionEnd

T = TypeVar("T")


def in_stages(items: Sequence[T], event_of: Callable[[T], Event]) -> list[list[T]]:
    """`items` in the order in which they may be sent, each stage after all of the one before is acknowledged.

    Within a stage they stand as they came. The end of everything that a tenant has waits for all before it, and all
    after it wait for it.
    """
    stages: list[list[T]] = []
    last: dict[str, tuple[int, str]] = {}
    """By key: the stage and the topic of its newest event."""
    barrier = 0
    for item in items:
        event = event_of(item)
        if isinstance(event, SessionEnd) and event.scope == "tenant":
            stage, barrier = len(stages), len(stages) + 1
        else:
            before, topic = last.get(event.key, (barrier, event.topic))
            stage = max(barrier, before + (topic != event.topic))
            last[event.key] = stage, event.topic
        if stage == len(stages):
            stages.append([])
        stages[stage].append(item)
    return stages
