"""Tells replicas that hang from those that are slow: a silent one is asked whether it lives, and its calls move on.

A process that is stopped, or a machine that is cut off, keeps its connections and says nothing. A replica at work on a
long prompt says nothing either, but it answers `GET /health`.
"""

from __future__ import annotations

import asyncio

from headrace_gateway.engine import Engines
from headrace_gateway.fleet import Fleet, Member
from headrace_gateway.settings import UpstreamSettings
from headrace_runtime.clock import Clock
from headrace_runtime.logs import get_logger

log = get_logger(__name__)
_TICK_S = 0.25
_ATTEMPTS = 2
"""One unanswered question may have been our own hiccup."""


class Watch:
    """Asks replicas and cuts the lines of those that hang."""

    def __init__(self, fleet: Fleet, engines: Engines, settings: UpstreamSettings, clock: Clock) -> None:
        self._fleet = fleet
        self._engines = engines
        self._settings = settings
        self._clock = clock

    async def run(self) -> None:
        """Until cancelled by the owner."""
        async with asyncio.TaskGroup() as asking:
            while True:
                for member in self._fleet.due(self._settings.probe_after_s):
                    asking.create_task(self._ask(member))
                for member in self._fleet.hanging():
                    self._cut(member)
                await self._clock.sleep(_TICK_S)

    async def _ask(self, member: Member) -> None:
        with self._fleet.asking(member):
            before_s = member.answered_s
            for _ in range(_ATTEMPTS):
                if await self._engines.answers(member.replica) or member.answered_s > before_s:
                    if member.hung:
                        log.info("replica_answers_again", replica=member.replica.replica_id)
                    self._fleet.heard(member)
                    return
            if not member.hung:
                silent_s = round(self._clock.monotonic_s() - member.answered_s, 1)
                log.warning(
                    "replica_hangs", replica=member.replica.replica_id, silent_s=silent_s, calls=member.in_flight
                )
            self._fleet.hangs(member)

    def _cut(self, member: Member) -> None:
        """Whoever can go elsewhere goes; who cannot holds on, and may still be answered, for `hold_s`."""
        hopeless = self._clock.monotonic_s() - member.silent_since_s > self._settings.hold_s
        for line in list(member.lines):
            if hopeless or line.elsewhere():
                line.cut()
