"""Wall clocks that are wrong and that jump, in all processes of one machine. Monotonic clocks go on."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from tests.chaos.balancer import Balancer
from tests.chaos.nemeses.base import Nemesis
from tests.chaos.victims import MACHINES
from tests.support import wrong_clock

SKEW_S = 5.0


class Clock(Nemesis):
    """A step to anywhere within `SKEW_S`, forwards or back."""

    name: ClassVar[str] = "clock"

    @classmethod
    def missing(cls, bus: str) -> str | None:
        return wrong_clock.missing()

    @classmethod
    def victims(cls, bus: str) -> Sequence[str]:
        return MACHINES

    def prepare(self, machine: str) -> Mapping[str, str]:
        return wrong_clock.environ(self.stack.folder, self._file(machine))

    async def strike(self, victim: str, balancer: Balancer, choose: random.Random) -> str:
        by_s = choose.uniform(-SKEW_S, SKEW_S)
        wrong_clock.step(self._file(victim), by_s)
        return f"has a clock that is {by_s:+.1f} s off"

    def _file(self, machine: str) -> Path:
        return self.stack.folder / f"clock-{machine}"
