"""Event loop that never waits and never uses a thread, a trace, and access to the current simulation: a seed determines
the run.

When no callback is ready, the clock moves to the next timer. Work for a thread runs in the loop after a random delay;
meanwhile that process's thread is busy, as in a real process. The trace is a digest that two runs of one seed must
share, and a readable text of a failed run.
"""

from __future__ import annotations

import asyncio
import hashlib
import selectors
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol

from tests.simulation.process import CURRENT

if TYPE_CHECKING:
    from tests.simulation.bus import Bus
    from tests.simulation.database import Server
    from tests.simulation.process import Mishaps

START = datetime(2026, 1, 1, tzinfo=UTC)
_worlds: list[World] = []
_PASSES_MAX = 400_000
"""Maximum number of passes, about twenty times those of a run: beyond it, a task polls without letting time pass."""


class World(Protocol):
    """Interface of the current simulation: see `tests.simulation.cluster.Cluster`."""

    bus: Bus
    mishaps: Mishaps
    databases: dict[str, Server]
    request_timeout_s: float
    skews_s: dict[str, float]
    """Error of each process's clock in seconds."""

    def count(self, fault: str) -> None:
        """Count a fault that has happened."""


def world() -> World:
    """Return the current simulation."""
    return _worlds[-1]


def enter(world: World) -> None:
    _worlds.append(world)


def leave() -> None:
    _worlds.pop()


class Stuck(Exception):
    """Error of a simulation in which no timer is left or time no longer passes."""


class _Jump(selectors.SelectSelector):
    """Selector that waits for no file descriptor: a wait moves the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.elapsed_s = 0.0
        self.passes = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.passes += 1
        if timeout is None:
            raise Stuck("every task waits for another")
        if self.passes > _PASSES_MAX:
            raise Stuck(f"{_PASSES_MAX} passes of the event loop")
        self.elapsed_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop on a virtual clock. `thread_delay_s` returns the delay of work that was given to a thread."""

    def __init__(self, thread_delay_s: Callable[[], float], alive: Callable[[], bool]) -> None:
        """Create the loop. `alive` returns whether the process of the present context runs; a dead process's work never
        ends.
        """
        self._clock = _Jump()
        self._thread_delay_s = thread_delay_s
        self._alive = alive
        super().__init__(self._clock)

    def more(self) -> None:
        """Reset the count of passes against the limit."""
        self._clock.passes = 0

    def time(self) -> float:
        return self._clock.elapsed_s

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run `func` in the loop later. Its exceptions go to the awaiting task."""
        future: asyncio.Future[Any] = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            if not self._alive():
                future.cancel()
                return
            try:
                result = func(*args)
            except BaseException as error:  # noqa: BLE001 (also a death in the middle of it)
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_later(self._thread_delay_s(), run)
        return future


class VirtualClock:
    """`headrace_runtime.clock.Clock` on the loop's time. Wall-clock time has a different error in each process."""

    def now(self) -> datetime:
        process = CURRENT.get()
        skew_s = world().skews_s.get(process.name, 0.0) if process is not None else 0.0
        return START + timedelta(seconds=self.monotonic_s() + skew_s)

    def monotonic_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Trace:
    """Trace of a run. Every line enters the digest; the text is stored if `verbose` is set."""

    def __init__(self, *, verbose: bool = False) -> None:
        self._digest = hashlib.sha256()
        self._verbose = verbose
        self.lines: list[str] = []
        self.counts: Counter[str] = Counter()
        """Number of lines by their first word."""

    def __call__(self, label: str, *facts: object, content: bytes = b"") -> None:
        """Add a line. `content` enters the digest but not the text."""
        self.counts[label] += 1
        line = f"{asyncio.get_running_loop().time():.6f} {label} {' '.join(map(str, facts))}"
        self._digest.update(line.encode() + b"\0" + content + b"\n")
        if self._verbose:
            self.lines.append(line)

    def digest(self) -> str:
        return self._digest.hexdigest()
