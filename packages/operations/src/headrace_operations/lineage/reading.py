"""What is asked of a connection: the entries of a range of a topic."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from headrace.topics import Entry, Range


class Reader(Protocol):
    """`headrace.topics.Topics`, or entries that were read before."""

    def read(self, wanted: Range, /) -> AsyncIterator[Entry]: ...
