"""What an engine has begun to generate and not finished yet. Lives in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from headrace_inference.engine import Tokens
from headrace_inference.errors import EngineFailed, Overloaded


class OpenStreams:
    """Of one engine. `abort` is called with a stream that ended before all of its choices did."""

    def __init__(self, abort: Callable[[Stream], None]) -> None:
        self._abort = abort
        self._open: set[Stream] = set()
        self._ended = asyncio.Event()

    def open(self, version: str, choices: int, tenant: tuple[bool, str] = (False, "")) -> Stream:
        """A generation of `choices`, to be filled by `Stream.put`."""
        stream = Stream(self, version, choices, tenant)
        self._open.add(stream)
        return stream

    def in_flight(self, version: str | None = None) -> int:
        """See `Engine.in_flight`."""
        return sum(stream.unfinished for stream in self._open if version in (None, stream.version))

    def check_room(self, choices: int, tenant: tuple[bool, str], room: int) -> None:
        """Check that `choices` more may wait. A tenant that has little in flight is let in also when others have taken
        all of the `room`, so that no tenant keeps another one out.

        Raises:
            Overloaded: there is no room.
        """
        total = self.in_flight() + choices
        if total <= room:
            return
        others = {stream.tenant for stream in self._open} - {tenant}
        if total > 2 * room or self.of_tenant(tenant) + choices > room // (len(others) + 1):
            raise Overloaded(f"{total - choices} sequences are running or waiting, {room} are allowed; try again")

    def of_tenant(self, tenant: tuple[bool, str]) -> int:
        """Return the unfinished choices of a tenant."""
        return sum(stream.unfinished for stream in self._open if stream.tenant == tenant)

    async def drained(self, version: str | None = None) -> None:
        """See `Engine.drained`."""
        while self.in_flight(version):
            self._ended.clear()
            await self._ended.wait()

    def fail(self, error: EngineFailed, version: str | None = None) -> None:
        """End every stream, or those of one version, with `error`."""
        for stream in list(self._open):
            if version in (None, stream.version):
                stream.put(error)

    def closed(self, stream: Stream) -> None:
        """A stream has ended or was left."""
        self._open.discard(stream)
        self._ended.set()
        if stream.unfinished:
            self._abort(stream)


class Stream:
    """A `Generation`: what the engine delivers, merged until it is asked for."""

    def __init__(self, streams: OpenStreams, version: str, choices: int, tenant: tuple[bool, str]) -> None:
        self.version = version
        self.tenant = tenant
        self.unfinished = choices
        self._streams = streams
        self._pending: dict[int, Tokens] = {}
        self._error: EngineFailed | None = None
        self._arrived = asyncio.Event()

    def put(self, piece: Tokens | EngineFailed) -> None:
        """Called by the engine; what comes after the end is dropped."""
        if not self.unfinished:
            return
        if isinstance(piece, EngineFailed):
            self._error = piece
            self._streams.closed(self)  # with what its other choices still had to do
            self.unfinished = 0
        else:
            held = self._pending.get(piece.choice)
            if held is None:
                self._pending[piece.choice] = piece
            else:
                held.add(piece)
            self.unfinished -= piece.finish is not None
        if not self.unfinished:
            self._streams.closed(self)
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
        self._streams.closed(self)
        self.unfinished = 0
        self._arrived.set()
