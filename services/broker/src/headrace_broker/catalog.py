"""What the event loop knows of topics and their logs: the committed state, and who waits for more records."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from headrace_broker.log import Moved
from headrace_broker.topic_config import TopicConfig
from headrace_broker.topics import Altered, Created, Deleted, Event, Grown

Change = Moved | Event


@dataclass(eq=False, slots=True)
class PartitionView:
    """A partition as committed. `readers` are woken when it moves."""

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
    """A topic that exists. Its partitions by number."""

    name: str
    config: TopicConfig
    partitions: tuple[PartitionView, ...]


class TopicCatalog:
    """Changed by `apply` alone, which the writer calls on the event loop after each commit."""

    def __init__(self) -> None:
        self.topics: dict[str, TopicState] = {}
        self._views: dict[int, PartitionView] = {}

    def view(self, topic: str, number: int) -> PartitionView | None:
        found = self.topics.get(topic)
        return found.partitions[number] if found and 0 <= number < len(found.partitions) else None

    def views(self) -> Iterable[PartitionView]:
        return self._views.values()

    def apply(self, changes: Iterable[Change]) -> None:
        for change in changes:
            match change:
                case Created():
                    self._add(change)
                case Altered():
                    self.topics[change.name] = replace(self.topics[change.name], config=change.config)
                case Grown():
                    self._grow(change)
                case Deleted():
                    self._remove(change)
                case Moved():
                    self._move(change)

    def _add(self, created: Created) -> None:
        views = tuple(PartitionView(key, created.name, number) for number, key in enumerate(created.partition_ids))
        self._views.update({view.id: view for view in views})
        self.topics[created.name] = TopicState(created.name, created.config, views)

    def _grow(self, grown: Grown) -> None:
        topic = self.topics[grown.name]
        first = len(topic.partitions)
        views = tuple(PartitionView(key, topic.name, first + number) for number, key in enumerate(grown.partition_ids))
        self._views.update({view.id: view for view in views})
        self.topics[topic.name] = replace(topic, partitions=topic.partitions + views)

    def _remove(self, deleted: Deleted) -> None:
        for view in self.topics.pop(deleted.name).partitions:
            del self._views[view.id]
            view.deleted = True
            _wake(view)

    def _move(self, moved: Moved) -> None:
        view = self._views.get(moved.id)
        if view is not None:
            view.start, view.end, view.stable, view.bytes = moved.start, moved.end, moved.stable, moved.bytes
            _wake(view)


def _wake(view: PartitionView) -> None:
    for reader in view.readers:
        reader.set()
