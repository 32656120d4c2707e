"""A TCP proxy that can be cut: silently, as when a cable is pulled, or with resets, as when a firewall changes."""

from __future__ import annotations

import asyncio
import contextlib

from tests.support.ports import free_port

_CHUNK = 65_536


class Proxy:
    """Listens on `port` of loopback and passes everything on to `target`."""

    def __init__(self) -> None:
        self.port = free_port()
        self._target = 0
        self._server: asyncio.Server | None = None
        self._passing = asyncio.Event()
        self._passing.set()
        self._refusing = False
        self._streams: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, target: int) -> None:
        self._target = target
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self, *, silent: bool) -> None:
        """Pass no bytes on. `silent`: connections stay open; else they and new ones are reset."""
        self._passing.clear()
        self._refusing = not silent
        if self._refusing:
            for stream in self._streams:
                stream.transport.abort()

    def mend(self) -> None:
        """Pass the waiting bytes of open connections on, as after a retransmission."""
        self._refusing = False
        self._passing.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(asyncio.CancelledError):  # `stop`; the server's own task has nobody to tell
            await self._pass(reader, writer)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        await self._passing.wait()
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, upstream_writer}
        self._streams |= both
        pumps = [
            asyncio.create_task(pump)
            for pump in (self._pump(reader, upstream_writer), self._pump(upstream_reader, writer))
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._streams -= both
            for stream in both:
                stream.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_CHUNK):
                await self._passing.wait()
                writer.write(data)
                await writer.drain()
