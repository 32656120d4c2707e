"""Queue of the experiences that were admitted and wait for a batch, bounded by number, tokens and bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from headrace_schemas import Experience
from headrace_trainer.experiences.examples import PendingUpdate
from headrace_trainer.experiences.history import History
from headrace_trainer.experiences.waiting import WaitingExperience
from headrace_trainer.experiences.window import Entry
from headrace_trainer.metrics import WAITING, WAITING_TOKENS
from headrace_trainer.settings import MemorySettings

QUEUE_BYTES_MAX = 256 << 20
"""JSON bytes of the waiting experiences. Their tokens are bounded, but edits and other texts may be long."""


class WaitingQueue:
    """Waiting experiences by id, in order of arrival, with running sums of their tokens and bytes."""

    def __init__(self, memory: MemorySettings, waiting: Iterable[WaitingExperience]) -> None:
        self._memory = memory
        self._items: dict[str, WaitingExperience] = {}
        self._sizes: dict[str, int] = {}
        self._tokens = self._bytes = 0
        self._earliest_ms: int | None = None
        for item in waiting:
            self.put(item)
        self._gauge()

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: str) -> bool:
        return name in self._items

    @property
    def items(self) -> tuple[WaitingExperience, ...]:
        """The experiences in order of arrival."""
        return tuple(self._items.values())

    @property
    def room(self) -> int:
        """Number of experiences that the queue may still admit."""
        if self._tokens >= self._memory.queue_tokens or self._bytes >= QUEUE_BYTES_MAX:
            return 0
        return max(0, self._memory.queue_experiences - len(self._items))

    @property
    def earliest_ms(self) -> int | None:
        """Arrival of the experience that has waited longest, in milliseconds since 1970; None if the queue is empty."""
        if self._earliest_ms is None:
            self._earliest_ms = min((item.since_ms for item in self._items.values()), default=None)
        return self._earliest_ms

    def get(self, name: str) -> WaitingExperience | None:
        """Return the experience with this id, or None if it does not wait."""
        return self._items.get(name)

    def put(self, item: WaitingExperience, size_bytes: int | None = None) -> None:
        """Add an experience, or replace it in its position of the queue.

        Args:
            size_bytes: size of the experience as JSON, if it is known. Otherwise the experience is serialized.
        """
        name = item.experience.experience_id
        old = self._items.get(name)
        size_bytes = len(item.experience.to_json()) if size_bytes is None else size_bytes
        self._tokens += item.tokens - (old.tokens if old else 0)
        self._bytes += size_bytes - self._sizes.get(name, 0)
        if old is None and self._items and self._earliest_ms is not None:
            self._earliest_ms = min(self._earliest_ms, item.since_ms)
        else:
            self._earliest_ms = None
        self._items[name], self._sizes[name] = item, size_bytes
        self._gauge()

    def remove(self, name: str) -> None:
        """Remove an experience, if it waits."""
        old = self._items.pop(name, None)
        if old is None:
            return
        self._tokens -= old.tokens
        self._bytes -= self._sizes.pop(name)
        if old.since_ms == self._earliest_ms:
            self._earliest_ms = None
        self._gauge()

    def _gauge(self) -> None:
        WAITING.set(len(self._items))
        WAITING_TOKENS.set(self._tokens)


class CachedUpdates(NamedTuple):
    """Cached pending updates of a waiting experience, with the inputs from which they were computed.

    They are needed for all waiting experiences after each record, and computing them may tokenize edits.
    """

    experience: Experience
    entry: Entry | None
    history: History
    steps: int
    updates: tuple[PendingUpdate, ...]

    def is_valid_for(self, experience: Experience, entry: Entry | None, history: History, steps: int) -> bool:
        """Return whether these inputs are the ones from which the cached updates were computed."""
        is_same = self.experience is experience and self.entry is entry and self.history is history
        return is_same and self.steps == steps
