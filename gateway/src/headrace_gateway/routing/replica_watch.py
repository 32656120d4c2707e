"""Detection of hung replicas: checks of the health of silent replicas, and the move of their calls.

A stopped process, or a machine without network, keeps its connections and sends no bytes. A replica that computes a
long prompt sends no bytes either, but it answers `GET /health`.
"""

from __future__ import annotations

import asyncio

from headrace_gateway.routing.engine import Engines
from headrace_gateway.routing.replica_set import ReplicaSet, ReplicaStatus
from headrace_gateway.settings import UpstreamSettings
from headrace_runtime.clock import Clock
from headrace_runtime.process.logs import get_logger

PROBE_AFTER_S = 2.0
"""Silence of a replica after which its health is checked (`GET /health`)."""

log = get_logger(__name__)
_TICK_S = 0.25
_ATTEMPTS = 2
"""One health check that failed may have been our own fault."""


class ReplicaWatch:
    """Watch that checks silent replicas and cancels the calls of hung ones."""

    def __init__(self, replica_set: ReplicaSet, engines: Engines, settings: UpstreamSettings, clock: Clock) -> None:
        self._replica_set = replica_set
        self._engines = engines
        self._settings = settings
        self._clock = clock

    async def run(self) -> None:
        """Check idle replicas and cancel hanging calls, until the owner cancels this."""
        async with asyncio.TaskGroup() as asking:
            while True:
                for member in self._replica_set.members_to_probe(PROBE_AFTER_S):
                    asking.create_task(self._ask(member))
                for member in self._replica_set.hanging():
                    self._cut(member)
                await self._clock.sleep(_TICK_S)

    async def _ask(self, member: ReplicaStatus) -> None:
        with self._replica_set.asking(member):
            before_s = member.answered_s
            for _ in range(_ATTEMPTS):
                if await self._engines.answers(member.replica) or member.answered_s > before_s:
                    if member.hung:
                        log.info("replica_answers_again", replica=member.replica.replica_id)
                    self._replica_set.responded(member)
                    return
            if not member.hung:
                silent_s = round(self._clock.monotonic_s() - member.answered_s, 1)
                log.warning(
                    "replica_hangs", replica=member.replica.replica_id, silent_s=silent_s, calls=member.in_flight
                )
            self._replica_set.hangs(member)

    def _cut(self, member: ReplicaStatus) -> None:
        """Cancel the calls that another replica can accept. Other calls continue for `hold_s`, and may still be
        answered."""
        hopeless = self._clock.monotonic_s() - member.silent_since_s > self._settings.hold_s
        for call in list(member.calls):
            if hopeless or call.elsewhere():
                call.cancel()
