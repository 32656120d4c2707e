"""Kinds of faults (nemeses), listed in `NEMESES`, and their schedule as a pure function of the seed."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from tests.chaos.balancer import Balancer
from tests.support import servers
from tests.support.machine import clock_environ, missing_compiler, step_clock
from tests.support.processes import alive

if TYPE_CHECKING:
    from tests.chaos.stack import Stack

Pair = tuple[str, str]
"""A nemesis, and its victim."""


@dataclass(frozen=True, slots=True)
class Strike:
    """One strike of a schedule: `nemesis` hits `victim`, `pause_s` after the strike before. `seed` is for the nemesis's
    draws.
    """

    pause_s: float
    nemesis: str
    victim: str
    seed: int


def plan(seed: int, strikes: int, pairs: Sequence[Pair], mean_pause_s: float) -> list[Strike]:
    """Return a schedule of `strikes` strikes. Every pair of nemesis and victim occurs once per round, in random order.

    Pauses are exponentially distributed: often several parts are broken together, and some processes die while they
    start.
    """
    choose = random.Random(seed)
    order = _rounds(choose, pairs)
    return [_strike(choose, next(order), mean_pause_s) for _ in range(strikes)]


def _strike(choose: random.Random, pair: Pair, mean_pause_s: float) -> Strike:
    pause_s = round(min(choose.expovariate(1 / mean_pause_s), 4 * mean_pause_s), 3)
    return Strike(pause_s, *pair, choose.randrange(2**32))


def _rounds(choose: random.Random, pairs: Sequence[Pair]) -> Iterator[Pair]:
    while True:
        yield from choose.sample(pairs, len(pairs))


MACHINES = ("a", "b")
PAIRS = {
    "gateway": "gateway-2",
    "gateway-2": "gateway",
    "inference": "inference-2",
    "inference-2": "inference",
}
"""Twin of each service that has one. While one of the two is down, the other is not hit."""
STREAM = ("collector", "scorer", "judge")
"""Services that run on machine A and, if the database is a server, also on machine B."""
SINGLE = ("trainer", "registry")
BUS = {"embedded": "broker", "kafka": "kafka"}


def services_on(bus: str) -> tuple[str, ...]:
    """Return all services of both machines; names on machine B end with `-2`.

    Two processes cannot share a SQLite file.
    """
    twins = tuple(f"{name}-2" for name in STREAM) if bus == "kafka" else ()
    return (*PAIRS, *STREAM, *twins, *SINGLE)


def victims_on(bus: str) -> tuple[str, ...]:
    return (*services_on(bus), BUS[bus])


class Nemesis(abc.ABC):
    """Interface of a kind of fault: call `prepare` before the stack starts, `strike` on schedule, and `heal` once at
    the end.
    """

    name: ClassVar[str]

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self._lasting: dict[str, asyncio.Task[None]] = {}

    @classmethod
    def missing(cls, bus: str) -> str | None:
        """Return the reason why this fault cannot be injected on this machine and bus, or None."""
        return None

    @classmethod
    @abc.abstractmethod
    def victims(cls, bus: str) -> Sequence[str]:
        """Return the services that this fault can hit."""

    def prepare(self, machine: str) -> Mapping[str, str]:
        """Return environment variables for the processes of a machine."""
        return {}

    @abc.abstractmethod
    async def strike(self, victim: str, balancer: Balancer, choose: random.Random) -> str:
        """Inject the fault. Return a short description at once; lasting effects continue in the background."""

    async def heal(self) -> None:
        """End all effects and return once they are repaired."""
        await asyncio.gather(*self._lasting.values())

    def struck(self, victim: str) -> bool:
        """Return whether an earlier strike still affects the victim."""
        task = self._lasting.get(victim)
        return task is not None and not task.done()

    def lasting(self, victim: str, work: Coroutine[None, None, None]) -> None:
        """Run `work`, which ends the effect of the strike, in the background."""
        self._lasting[victim] = asyncio.create_task(work)


class Kill(Nemesis):
    """Kill of a process with SIGKILL. A gateway or replica is killed only while its twin is healthy."""

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


SHORT_S = (0.5, 6.0)
LONG_S = 75.0
"""Duration of a stop in seconds: longer than a supervisor may take to detect it and start another process."""
LONG_SHARE = 0.25


class Stop(Nemesis):
    """SIGSTOP of a process: other processes receive no error and have to detect that it hangs."""

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
    """Send SIGCONT after `after_s`; return early if the process is killed first."""
    deadline = time.monotonic() + after_s
    while alive(pid) and time.monotonic() < deadline:  # noqa: ASYNC110 (a death of somebody else's child has no event)
        await asyncio.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


FOR_S = (2.0, 12.0)


class Partition(Nemesis):
    """Network partition: each machine reaches the bus through its own proxy, whose address the bus advertises to it."""

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


SIZE_MIB = 1536
DISK_FULL_S = (3.0, 15.0)
_CHUNK = 1 << 20


class DiskFull(Nemesis):
    """Full disk. The machine may refuse users' requests meanwhile; their load balancer chooses the other machine."""

    name: ClassVar[str] = "disk-full"

    @classmethod
    def missing(cls, bus: str) -> str | None:
        if os.geteuid() != 0 or shutil.which("mount") is None:
            return "mounting a small file system needs root"
        return None

    @classmethod
    def victims(cls, bus: str) -> Sequence[str]:
        return ("a",)

    async def strike(self, victim: str, balancer: Balancer, choose: random.Random) -> str:
        for_s = choose.uniform(*DISK_FULL_S)
        await self.stack.spare_other_machine(victim)
        filler = self.stack.folder / victim / "filler"
        balancer.refusing(self.stack.url("gateway"))
        await asyncio.to_thread(fill, filler)

        async def empty() -> None:
            await asyncio.sleep(for_s)
            filler.unlink(missing_ok=True)
            await asyncio.sleep(5.0)  # what it refused meanwhile is on its way to the users
            balancer.refusing_no_more(self.stack.url("gateway"))

        self.lasting(victim, empty())
        return f"has no space left on its disk for {for_s:.1f} s"


@contextlib.contextmanager
def small_disk(folder: Path, size_mib: int = SIZE_MIB) -> Iterator[None]:
    """Mount a small file system at `folder` during the block."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mib}m,mode=0755", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    """Use all free space of the disk, including space that other processes free meanwhile."""
    with path.open("wb", buffering=0) as file:
        for size in (_CHUNK, 4096):
            with contextlib.suppress(OSError):
                while True:
                    _grow(file.fileno(), size)


def _grow(fd: int, size: int) -> None:
    os.lseek(fd, 0, os.SEEK_END)
    if os.write(fd, bytes(size)) < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


SKEW_S = 5.0


class Clock(Nemesis):
    """Step of a machine's clock by up to `SKEW_S`, forwards or backwards."""

    name: ClassVar[str] = "clock"

    @classmethod
    def missing(cls, bus: str) -> str | None:
        return missing_compiler()

    @classmethod
    def victims(cls, bus: str) -> Sequence[str]:
        return MACHINES

    def prepare(self, machine: str) -> Mapping[str, str]:
        return clock_environ(self.stack.folder, self._file(machine))

    async def strike(self, victim: str, balancer: Balancer, choose: random.Random) -> str:
        by_s = choose.uniform(-SKEW_S, SKEW_S)
        step_clock(self._file(victim), by_s)
        return f"has a clock that is {by_s:+.1f} s off"

    def _file(self, machine: str) -> Path:
        return self.stack.folder / f"clock-{machine}"


BLOB_TROUBLE_S = (2.0, 10.0)
BLOB_TROUBLES = {"slow": {"delay_s": 1.0}, "failing": {"fail": 0.5}, "away": {"fail": 1.0}}


class BlobTrouble(Nemesis):
    """Slow or failing blob store: `tests/chaos/blob_faults/sitecustomize.py` runs in every service and reads its rates
    from a file.
    """

    name: ClassVar[str] = "blobs"

    @classmethod
    def victims(cls, bus: str) -> Sequence[str]:
        return tuple(BLOB_TROUBLES)

    def prepare(self, machine: str) -> Mapping[str, str]:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text("{}")
        return {"PYTHONPATH": str(Path(__file__).parent / "blob_faults"), "CHAOS_BLOBS": str(self._file)}

    async def strike(self, victim: str, balancer: Balancer, choose: random.Random) -> str:
        for_s = choose.uniform(*BLOB_TROUBLE_S)
        self._file.write_text(json.dumps(BLOB_TROUBLES[victim]))

        async def mend() -> None:
            await asyncio.sleep(for_s)
            self._file.write_text("{}")

        for task in self._lasting.values():
            task.cancel()
        await asyncio.gather(*self._lasting.values(), return_exceptions=True)
        self._lasting.clear()
        self.lasting(victim, mend())
        return f"is what the blob store is for {for_s:.1f} s"

    @property
    def _file(self) -> Path:
        return self.stack.folder / "blob-faults.json"


class KillPostgres(Nemesis):
    """Kill of the PostgreSQL server that stores the state of the stream services and the registry."""

    name: ClassVar[str] = "postgres"

    @classmethod
    def missing(cls, bus: str) -> str | None:
        return servers.missing_postgres() if bus == "kafka" else "on the embedded bus the databases are SQLite files"

    @classmethod
    def victims(cls, bus: str) -> Sequence[str]:
        return ("postgres",)

    async def strike(self, victim: str, balancer: Balancer, choose: random.Random) -> str:
        await self.stack.kill_postgres()
        return "killed"


NEMESES: Mapping[str, type[Nemesis]] = {
    nemesis.name: nemesis
    for nemesis in (
        Kill, Stop, Partition, Clock, DiskFull, KillPostgres, BlobTrouble,
    )
}  # fmt: skip
