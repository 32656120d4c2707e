"""SIGKILL: of every service, and of the bus."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from typing import ClassVar

from tests.chaos.balancer import Balancer
from tests.chaos.nemeses.base import Nemesis
from tests.chaos.victims import BUS, victims_on


class Kill(Nemesis):
    """A gateway or replica is killed only while its twin can stand in for it."""

    name: ClassVar[str] = "kill"

    @classmethod
    def victims(cls, bus: str) -> Sequence[str]:
        return victims_on(bus)

    async def strike(self, victim: str, balancer: Balancer, choose: random.Random) -> str:
        await self.stack.spare_twin(victim)
        if victim == BUS["kafka"]:
            await self.stack.kill_kafka()
            return "killed"
        pid = await self.stack.pid_of(victim)
        if victim.startswith("gateway"):
            balancer.killing(self.stack.url(victim))
        os.kill(pid, signal.SIGKILL)
        return "killed"
