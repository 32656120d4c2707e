"""Load balancer of a production setup: health checks, and another gateway after a lost connection."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
import zlib
from collections.abc import Sequence

import aiohttp

_INTERVAL_S = 0.25
_TIMEOUT_S = 2.0


class Balancer:
    """`run` keeps the health up to date. The chaos reports every kill to it, so that only ordered kills excuse a
    failure."""

    def __init__(self, http: aiohttp.ClientSession, gateways: Sequence[str]) -> None:
        self._http = http
        self._gateways = tuple(gateways)
        self._healthy: set[str] = set()
        self._turn = itertools.count()
        self._killed: dict[str, float] = {}
        """Gateways that were killed and have not been healthy since, and when."""
        self._returned: dict[str, float] = {}
        """When each was healthy again after its last kill."""
        self._refusing: dict[str, float] = {}
        """Gateways with a full disk, and the end of the time in which such a gateway may have answered with 503."""

    async def run(self) -> None:
        """Until cancelled."""
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
        """A healthy gateway, another than `avoid` if there is one: for every other session the one that it keeps to as
        long as it is healthy, for the rest the next one in turn.
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
        """Called right before the kill."""
        self._killed[gateway] = time.monotonic()
        self._healthy.discard(gateway)

    def refusing(self, gateway: str) -> None:
        """Record that the disk is about to be full: the gateway may answer 503, and has then recorded no turn."""
        self._refusing[gateway] = math.inf

    def refusing_no_more(self, gateway: str) -> None:
        self._refusing[gateway] = time.monotonic()

    def may_refuse(self, gateway: str, since_s: float) -> bool:
        """Whether its disk was full at any time since `since_s` (monotonic)."""
        return self._refusing.get(gateway, -math.inf) >= since_s

    def was_down(self, gateway: str, since_s: float) -> bool:
        """Whether it was dead, or on its way back, at any time since `since_s` (monotonic)."""
        return gateway in self._killed or self._returned.get(gateway, -math.inf) >= since_s


async def answers(http: aiohttp.ClientSession, url: str, timeout_s: float) -> bool:
    """Whether a GET is answered with 200 in time."""
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with asyncio.timeout(timeout_s), http.get(url) as response:
            await response.read()
            return response.status == 200
    return False
