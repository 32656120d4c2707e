"""Interface to topics that the lineage queries need."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from headrace.topics import Entry, Range


class Reader(Protocol):
    """Reader of the entries of a topic range: `headrace.topics.Topics`, or entries that were read before."""

    def read(self, entries: Range, /) -> AsyncIterator[Entry]: ...
