"""Load balancer of a production setup, and a TCP proxy that can be cut.

The balancer checks the gateways' health and retries on another gateway after a lost connection. The proxy is cut
silently, as when a cable is pulled, or with resets, as when a firewall changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
import zlib
from collections.abc import Sequence

import aiohttp

from tests.support.processes import free_port

_INTERVAL_S = 0.25
_TIMEOUT_S = 2.0


class Balancer:
    """Load balancer over several gateways.

    `run` updates their health. The test reports every kill to the balancer, so that only a kill excuses a lost
    connection.
    """

    def __init__(self, http: aiohttp.ClientSession, gateways: Sequence[str]) -> None:
        self._http = http
        self._gateways = tuple(gateways)
        self._healthy: set[str] = set()
        self._turn = itertools.count()
        self._killed: dict[str, float] = {}
        """Gateways that were killed and have not been healthy since, with the monotonic time of the kill."""
        self._returned: dict[str, float] = {}
        """Monotonic time at which each gateway was healthy again after its last kill."""
        self._refusing: dict[str, float] = {}
        """Gateways with a full disk, and the end of the time in which such a gateway may have answered with 503."""

    async def run(self) -> None:
        """Check the health of the gateways until cancelled."""
        while True:
            await asyncio.gather(*(self._check(gateway) for gateway in self._gateways))
            await asyncio.sleep(_INTERVAL_S)

    async def _check(self, gateway: str) -> None:
        began = time.monotonic()
        healthy = await answers(self._http, f"{gateway}/health", _TIMEOUT_S)
        if healthy and began > self._killed.get(gateway, -math.inf):
            self._healthy.add(gateway)
            if self._killed.pop(gateway, None) is not None:
                self._returned[gateway] = time.monotonic()
        else:
            self._healthy.discard(gateway)

    def pick(self, session_id: str, avoid: str | None = None) -> str:
        """Return a healthy gateway for a session, if possible another one than `avoid`.

        Every second session keeps the same gateway as long as it is healthy; for the others the gateways take turns.
        """
        able = [gateway for gateway in self._gateways if gateway in self._healthy] or list(self._gateways)
        able = [gateway for gateway in able if gateway != avoid] or able
        number = zlib.crc32(session_id.encode())
        usual = self._gateways[number // 2 % len(self._gateways)]
        if number % 2 and usual in able:
            return usual
        return able[next(self._turn) % len(able)]

    def lost(self, gateway: str) -> None:
        """Record a broken connection: choose the gateway only after its next health check."""
        self._healthy.discard(gateway)

    def killing(self, gateway: str) -> None:
        """Record that the gateway is killed now. Call it right before the kill."""
        self._killed[gateway] = time.monotonic()
        self._healthy.discard(gateway)

    def refusing(self, gateway: str) -> None:
        """Record that the gateway's disk is about to be full: from now on it may answer 503 and record no turn."""
        self._refusing[gateway] = math.inf

    def refusing_no_more(self, gateway: str) -> None:
        self._refusing[gateway] = time.monotonic()

    def may_refuse(self, gateway: str, since_s: float) -> bool:
        """Return whether the gateway's disk was full at any time since `since_s` (monotonic)."""
        return self._refusing.get(gateway, -math.inf) >= since_s

    def was_down(self, gateway: str, since_s: float) -> bool:
        """Return whether the gateway was dead, or not healthy again, at any time since `since_s` (monotonic)."""
        return gateway in self._killed or self._returned.get(gateway, -math.inf) >= since_s


async def answers(http: aiohttp.ClientSession, url: str, timeout_s: float) -> bool:
    """Return whether a GET of `url` is answered with 200 within `timeout_s`."""
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with asyncio.timeout(timeout_s), http.get(url) as response:
            await response.read()
            return response.status == 200
    return False


_CHUNK = 65_536


class Proxy:
    """TCP proxy that listens on `port` of loopback and forwards all bytes to `target`."""

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
        """Stop forwarding. With `silent`, connections stay open; otherwise old and new connections are reset."""
        self._passing.clear()
        self._refusing = not silent
        if self._refusing:
            for stream in self._streams:
                stream.transport.abort()

    def mend(self) -> None:
        """Forward again, including the bytes that wait in open connections, as after a retransmission."""
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
