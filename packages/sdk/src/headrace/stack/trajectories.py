"""The trajectory of a session, read from the bus. Needs the extra `headrace[topics]`."""

from __future__ import annotations

import asyncio
import time

from headrace.errors import UsageError
from headrace.practice.blocking import blocking
from headrace.stack.following import Follower
from headrace.topics import connected
from headrace_schemas import Trajectory, ids

_POLL_S = 0.1


def newest(bus: str, session_id: str, *, tenant: str = "default", timeout_s: float = 30.0) -> Trajectory:
    """The newest trajectory of a session; one that has just ended is waited for. Raises `UsageError` when there is
    none within `timeout_s`."""
    return blocking(find(bus, session_id, tenant, timeout_s))


async def find(bus: str, session_id: str, tenant: str, timeout_s: float) -> Trajectory:
    """What `newest` does, on an event loop."""
    key, follower, found = ids.session_key(tenant, session_id), Follower(Trajectory.topic), None
    deadline = time.monotonic() + timeout_s
    async with connected(bus) as topics:
        while True:
            async for event in follower.events(topics, Trajectory, keys=[key]):
                found = event
            if found is not None:
                return found
            if time.monotonic() > deadline:
                raise UsageError(
                    f"session {session_id!r} has no trajectory after {timeout_s:g} s: it has not ended, made no call, "
                    "or is another tenant's"
                )
            await asyncio.sleep(_POLL_S)
