"""What stands between users and gateways in production: health checks, and another gateway for a lost connection."""

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
    """`run` keeps the picture true. The chaos tells it of every kill, so that nothing else is excused by one."""

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
        """Gateways whose disk is full; and until when one whose disk was full may have answered so."""

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
        able = [one for one in self._gateways if one in self._healthy] or list(self._gateways)
        able = [one for one in able if one != avoid] or able
        number = zlib.crc32(session_id.encode())
        own = self._gateways[number // 2 % len(self._gateways)]
        if number % 2 and own in able:
            return own
        return able[next(self._turn) % len(able)]

    def lost(self, gateway: str) -> None:
        """A connection broke: ask it no more before its next health check."""
        self._healthy.discard(gateway)

    def killing(self, gateway: str) -> None:
        """Called right before the kill."""
        self._killed[gateway] = time.monotonic()
        self._healthy.discard(gateway)

    def refusing(self, gateway: str) -> None:
        """Called right before its disk is full: it may answer 503, and then has recorded nothing."""
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
