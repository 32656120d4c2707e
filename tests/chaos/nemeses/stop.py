"""SIGSTOP: a process that neither works nor dies, mostly for a few seconds, sometimes until a supervisor kills it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Sequence
from typing import ClassVar

from tests.chaos.balancer import Balancer
from tests.chaos.nemeses.base import Nemesis
from tests.chaos.victims import BUS, victims_on
from tests.support.processes import alive

SHORT_S = (0.5, 6.0)
LONG_S = 75.0
"""Longer than a supervisor may take to notice and to start another."""
LONG_SHARE = 0.25


class Stop(Nemesis):
    """Stop the process without any report: processes that wait for it have to notice by themselves."""

    name: ClassVar[str] = "stop"

    @classmethod
    def victims(cls, bus: str) -> Sequence[str]:
        return victims_on(bus)

    async def strike(self, victim: str, balancer: Balancer, choose: random.Random) -> str:
        short = choose.uniform(*SHORT_S)
        unsupervised = victim == BUS["kafka"]
        for_s = LONG_S if choose.random() < LONG_SHARE and not unsupervised else short
        await self.stack.spare_twin(victim)
        pid = self.stack.kafka_pid if unsupervised else await self.stack.pid_of(victim)
        if victim.startswith("gateway"):
            balancer.killing(self.stack.url(victim))
        os.kill(pid, signal.SIGSTOP)
        self.lasting(victim, _resume(pid, for_s))
        return f"stopped for {'as long as it is let' if for_s == LONG_S else f'{for_s:.1f} s'}"


async def _resume(pid: int, after_s: float) -> None:
    """Wait, and return early after a kill of the process."""
    deadline = time.monotonic() + after_s
    while alive(pid) and time.monotonic() < deadline:  # noqa: ASYNC110 (a death of somebody else's child has no event)
        await asyncio.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
