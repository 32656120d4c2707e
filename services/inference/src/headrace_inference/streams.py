"""Streams from an engine to its readers, of generations that are not finished. Used in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from headrace_inference.engine import Tokens
from headrace_inference.errors import EngineFailed, Overloaded


class OpenStreams:
    """The streams of all unfinished generations of one engine.

    Args:
        abort: function that is called with a stream that was closed before all of its choices ended.
    """

    def __init__(self, abort: Callable[[Stream], None]) -> None:
        self._abort = abort
        self._open: set[Stream] = set()
        self._ended = asyncio.Event()

    def open(self, version: str, choices: int, tenant: tuple[bool, str] = (False, "")) -> Stream:
        """Open the stream of a generation with `choices` choices. The engine delivers tokens with `Stream.put`."""
        stream = Stream(self, version, choices, tenant)
        self._open.add(stream)
        return stream

    def in_flight(self, version: str | None = None) -> int:
        """Return the number of unfinished choices of the version; None: of all versions (`Engine.in_flight`)."""
        return sum(stream.unfinished for stream in self._open if version in (None, stream.version))

    def check_capacity(self, choices: int, tenant: tuple[bool, str], limit: int) -> None:
        """Check that `choices` more sequences may run or wait.

        A tenant with few sequences is accepted also when other tenants use the whole `limit`, so that no tenant can
        block another one.

        Raises:
            Overloaded: there would be too many sequences.
        """
        total = self.in_flight() + choices
        if total <= limit:
            return
        other_tenants = {stream.tenant for stream in self._open} - {tenant}
        if total > 2 * limit or self.of_tenant(tenant) + choices > limit // (len(other_tenants) + 1):
            raise Overloaded(f"{total - choices} sequences are running or waiting, {limit} are allowed; try again")

    def of_tenant(self, tenant: tuple[bool, str]) -> int:
        """Return the number of unfinished choices of a tenant."""
        return sum(stream.unfinished for stream in self._open if stream.tenant == tenant)

    async def drained(self, version: str | None = None) -> None:
        """Wait until no choice of the version is unfinished; None: of any version (`Engine.drained`)."""
        while self.in_flight(version):
            self._ended.clear()
            await self._ended.wait()

    def fail(self, error: EngineFailed, version: str | None = None) -> None:
        """End every stream, or every stream of one version, with `error`."""
        for stream in list(self._open):
            if version in (None, stream.version):
                stream.put(error)

    def discard(self, stream: Stream) -> None:
        """Remove a stream that has ended or was closed, and abort its unfinished choices."""
        self._open.discard(stream)
        self._ended.set()
        if stream.unfinished:
            self._abort(stream)


class Stream:
    """The `Generation` of one prompt: a queue of sampled tokens with one reader.

    Tokens of a choice are merged until they are read.
    """

    def __init__(self, streams: OpenStreams, version: str, choices: int, tenant: tuple[bool, str]) -> None:
        self.version = version
        self.tenant = tenant
        self.unfinished = choices
        self._streams = streams
        self._pending: dict[int, Tokens] = {}
        self._error: EngineFailed | None = None
        self._arrived = asyncio.Event()

    def put(self, piece: Tokens | EngineFailed) -> None:
        """Add tokens of one choice to the queue, or an error that ends all choices.

        Calls after the end of the choice or of the stream have no effect.
        """
        if not self.unfinished:
            return
        if isinstance(piece, EngineFailed):
            self._error = piece
            self._streams.discard(self)  # this aborts the other choices
            self.unfinished = 0
        else:
            pending = self._pending.get(piece.choice)
            if pending is None:
                self._pending[piece.choice] = piece
            else:
                pending.add(piece)
            self.unfinished -= piece.finish is not None
        if not self.unfinished:
            self._streams.discard(self)
        self._arrived.set()

    def __aiter__(self) -> AsyncIterator[Tokens]:
        return self

    async def __anext__(self) -> Tokens:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self.unfinished:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._pending.pop(next(iter(self._pending)))

    def close(self) -> None:
        """Close the stream, and abort its unfinished choices."""
        self._streams.discard(self)
        self.unfinished = 0
        self._arrived.set()
