"""Wall clocks that are wrong and that jump, by libfaketime in the processes of one machine. Monotonic clocks go on."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from tests.chaos.balancer import Balancer
from tests.chaos.nemeses.base import Nemesis
from tests.chaos.victims import MACHINES

SKEW_S = 5.0
_LIBRARIES = ("/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/lib64/faketime/libfaketimeMT.so.1")


def _library() -> Path | None:
    return next((path for pattern in _LIBRARIES for path in Path("/").glob(pattern.lstrip("/"))), None)


class Clock(Nemesis):
    """A step to anywhere within `SKEW_S`, forwards or back."""

    name: ClassVar[str] = "clock"

    @classmethod
    def missing(cls, bus: str) -> str | None:
        return None if _library() else "libfaketime is not installed"

    @classmethod
    def victims(cls, bus: str) -> Sequence[str]:
        return MACHINES

    def prepare(self, machine: str) -> Mapping[str, str]:
        self._set(machine, 0.0)
        return {
            "LD_PRELOAD": str(_library()),
            "FAKETIME_TIMESTAMP_FILE": str(self._file(machine)),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    async def strike(self, victim: str, balancer: Balancer, choose: random.Random) -> str:
        by_s = choose.uniform(-SKEW_S, SKEW_S)
        self._set(victim, by_s)
        return f"has a clock that is {by_s:+.1f} s off"

    def _file(self, machine: str) -> Path:
        return self.stack.folder / f"clock-{machine}"

    def _set(self, machine: str, by_s: float) -> None:
        path = self._file(machine)
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        fresh.write_text(f"{by_s:+.3f}s\n")
        fresh.replace(path)
