"""Wall clocks that are wrong and that jump, in all processes of one machine. Monotonic clocks go on."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from tests.chaos.balancer import Balancer
from tests.chaos.nemeses.base import Nemesis
from tests.chaos.victims import MACHINES

SKEW_S = 5.0
SOURCE = Path(__file__).parents[1] / "wrong_clock.c"


class Clock(Nemesis):
    """A step to anywhere within `SKEW_S`, forwards or back."""

    name: ClassVar[str] = "clock"

    @classmethod
    def missing(cls, bus: str) -> str | None:
        return None if shutil.which("cc") else "there is no C compiler"

    @classmethod
    def victims(cls, bus: str) -> Sequence[str]:
        return MACHINES

    def prepare(self, machine: str) -> Mapping[str, str]:
        return wrong_clock(self.stack.folder, self._file(machine))

    async def strike(self, victim: str, balancer: Balancer, choose: random.Random) -> str:
        by_s = choose.uniform(-SKEW_S, SKEW_S)
        step(self._file(victim), by_s)
        return f"has a clock that is {by_s:+.1f} s off"

    def _file(self, machine: str) -> Path:
        return self.stack.folder / f"clock-{machine}"


def wrong_clock(folder: Path, file: Path) -> dict[str, str]:
    """The environment in which processes have the clock that `step(file, ...)` sets. `folder` keeps the library."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "wrong_clock.so"
    if not library.exists():
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    file.write_bytes(struct.pack("q", 0))
    return {"LD_PRELOAD": str(library), "WRONG_CLOCK": str(file)}


def step(file: Path, by_s: float) -> None:
    """From now on the clock is `by_s` off. The file stays the same one: processes have it mapped."""
    with file.open("r+b") as opened:
        opened.write(struct.pack("q", round(by_s * 1e9)))
