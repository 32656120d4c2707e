"""The network between a machine and the bus: everything that is sent disappears, or connections are reset."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import ClassVar

from tests.chaos.balancer import Balancer
from tests.chaos.nemeses.base import Nemesis
from tests.chaos.victims import MACHINES

FOR_S = (2.0, 12.0)


class Partition(Nemesis):
    """Each machine reaches the bus through a proxy of its own, whose address the bus advertises to it."""

    name: ClassVar[str] = "partition"

    @classmethod
    def missing(cls, bus: str) -> str | None:
        return None if bus == "kafka" else "the embedded broker and its services share a machine"

    @classmethod
    def victims(cls, bus: str) -> Sequence[str]:
        return MACHINES

    async def strike(self, victim: str, balancer: Balancer, choose: random.Random) -> str:
        silent, for_s = choose.random() < 0.5, choose.uniform(*FOR_S)
        await self.stack.spare_other_machine(victim)
        proxy = self.stack.proxies[victim]
        proxy.cut(silent=silent)

        async def mend() -> None:
            await asyncio.sleep(for_s)
            proxy.mend()

        self.lasting(victim, mend())
        return f"{'hears nothing from' if silent else 'loses its connections to'} the bus for {for_s:.1f} s"
