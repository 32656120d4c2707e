"""Committed state of topics and their logs for the event loop, with the readers that wait for more records."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from headrace_broker.log import PartitionMoved
from headrace_broker.topic_config import TopicConfig
from headrace_broker.topics import Event, TopicAltered, TopicCreated, TopicDeleted, TopicGrown

Change = PartitionMoved | Event


@dataclass(eq=False, slots=True)
class PartitionView:
    """Committed state of a partition's log. `stable` is the last stable offset.

    Each change sets the events in `readers`, on which requests wait for more records.
    """

    id: int
    topic: str
    number: int
    start: int = 0
    end: int = 0
    stable: int = 0
    bytes: int = 0
    deleted: bool = False
    readers: set[asyncio.Event] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class TopicState:
    """An existing topic, with its partitions by number."""

    name: str
    config: TopicConfig
    partitions: tuple[PartitionView, ...]


class TopicCatalog:
    """Committed state of all topics.

    Only `apply` changes it, which the writer calls in the event loop after each commit.
    """

    def __init__(self) -> None:
        self.topics: dict[str, TopicState] = {}
        self._views: dict[int, PartitionView] = {}

    def view(self, topic: str, number: int) -> PartitionView | None:
        """Return a partition, or None if it does not exist."""
        state = self.topics.get(topic)
        return state.partitions[number] if state and 0 <= number < len(state.partitions) else None

    def views(self) -> Iterable[PartitionView]:
        """Return all partitions."""
        return self._views.values()

    def apply(self, changes: Iterable[Change]) -> None:
        """Apply the changes of a commit, in order."""
        for change in changes:
            match change:
                case TopicCreated():
                    self._add(change)
                case TopicAltered():
                    self.topics[change.name] = replace(self.topics[change.name], config=change.config)
                case TopicGrown():
                    self._grow(change)
                case TopicDeleted():
                    self._remove(change)
                case PartitionMoved():
                    self._move(change)

    def _add(self, created: TopicCreated) -> None:
        views = tuple(PartitionView(key, created.name, number) for number, key in enumerate(created.partition_ids))
        self._views.update({view.id: view for view in views})
        self.topics[created.name] = TopicState(created.name, created.config, views)

    def _grow(self, grown: TopicGrown) -> None:
        topic = self.topics[grown.name]
        first = len(topic.partitions)
        views = tuple(PartitionView(key, topic.name, first + number) for number, key in enumerate(grown.partition_ids))
        self._views.update({view.id: view for view in views})
        self.topics[topic.name] = replace(topic, partitions=topic.partitions + views)

    def _remove(self, deleted: TopicDeleted) -> None:
        for view in self.topics.pop(deleted.name).partitions:
            del self._views[view.id]
            view.deleted = True
            _wake(view)

    def _move(self, moved: PartitionMoved) -> None:
        view = self._views.get(moved.id)
        if view is not None:
            view.start, view.end, view.stable, view.bytes = moved.start, moved.end, moved.stable, moved.bytes
            _wake(view)


def _wake(view: PartitionView) -> None:
    for reader in view.readers:
        reader.set()
