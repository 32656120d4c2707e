"""Read the trajectory of a session from the bus. Needs the extra `headrace[topics]`."""

from __future__ import annotations

import asyncio
import time

from headrace.errors import UsageError
from headrace.practice.blocking import blocking
from headrace.stack.following import Follower
from headrace.topics import connected
from headrace_schemas import Trajectory
from headrace_schemas.values import ids

_POLL_S = 0.1


def newest_trajectory(bus: str, session_id: str, *, tenant: str = "default", timeout_s: float = 30.0) -> Trajectory:
    """Return the newest trajectory of a session, waiting for a session that has just ended.

    Raises:
        UsageError: there is no trajectory within `timeout_s`.
    """
    return blocking(find_trajectory(bus, session_id, tenant, timeout_s))


async def find_trajectory(bus: str, session_id: str, tenant: str, timeout_s: float) -> Trajectory:
    """Return the newest trajectory of a session as `newest_trajectory` does, on an event loop."""
    key, follower, trajectory = ids.session_key(tenant, session_id), Follower(Trajectory.topic), None
    deadline = time.monotonic() + timeout_s
    async with connected(bus) as topics:
        while True:
            async for event in follower.events(topics, Trajectory, keys=[key]):
                trajectory = event
            if trajectory is not None:
                return trajectory
            if time.monotonic() > deadline:
                raise UsageError(
                    f"session {session_id!r} has no trajectory after {timeout_s:g} s: it has not ended, made no call, "
                    "or belongs to another tenant"
                )
            await asyncio.sleep(_POLL_S)
