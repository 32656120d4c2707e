"""Simulated processes on an event loop that never waits: each has its own tasks, dies at once and completely, and is
restarted.

A context variable, inherited by every task, holds the process of the running code. The tasks of a dead process are
cancelled, and their further calls of the bus, database, blobs and threads raise `Killed`: other processes see a kill
-9.

`Mishaps` are faults within a call; the plan of faults arms them, and the next call of their kind fails.

When no callback is ready, the clock moves to the next timer. Work for a thread runs in the loop after a random delay;
meanwhile that process's thread is busy, as in a real process. The trace is a digest that two runs of one seed must
share, and a readable text of a failed run.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import selectors
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from headrace_runtime.errors import Unavailable

if TYPE_CHECKING:
    from tests.simulation.bus import Bus, Server

T = TypeVar("T")
START = datetime(2026, 1, 1, tzinfo=UTC)


CURRENT: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)
_CANCEL_PASSES_MAX = 400
_CANCEL_EVERY = 8
"""Passes of the loop between two cancellations, in which connections and generators of the dead process are closed."""


class Killed(BaseException):
    """Raised in code of a dead process. No handler of the services catches it."""


def current() -> Process:
    """Return the process of the running code."""
    process = CURRENT.get()
    assert process is not None, "only code of a simulated process comes here"
    return process


def alive() -> bool:
    """Return whether the running code may have effects. The cluster's own code always may."""
    process = CURRENT.get()
    return process is None or not process.dead


def living() -> Process:
    """Return the process of the running code. Raises `Killed` if it is dead."""
    process = current()
    if process.dead:
        raise Killed(process.name)
    return process


class InOrder(dict[asyncio.Task[Any], None]):
    """Set of tasks in insertion order; the order of a normal set depends on memory addresses."""

    def add(self, task: asyncio.Task[Any]) -> None:
        self[task] = None

    def discard(self, task: asyncio.Task[Any]) -> None:
        self.pop(task, None)


async def end(tasks: Callable[[], Collection[asyncio.Task[Any]]], else_say: str) -> None:
    """Cancel the tasks that `tasks` returns until there are none. Raises `AssertionError` if some do not end."""
    for count in range(_CANCEL_PASSES_MAX):
        left = tasks()
        if not left:
            return
        for task in left if count % _CANCEL_EVERY == 0 else ():
            task.cancel()
        await asyncio.sleep(0)
    raise AssertionError(f"{else_say}: {tasks()}")


async def end_others() -> None:
    """Cancel all tasks except the calling one."""
    me = asyncio.current_task()
    await end(lambda: [task for task in asyncio.all_tasks() if task is not me], "these do not end")


class TaskGroup(asyncio.TaskGroup):
    """Task group that cancels its tasks in the order of their creation."""

    def __init__(self) -> None:
        super().__init__()
        vars(self)["_tasks"] = InOrder()  # to add, to discard and to walk is all that it is asked for


class Process:
    """One life of a process. `name` is the name of its slot, such as `collector-1`; `service` is the program."""

    def __init__(self, name: str, service: str, life: int) -> None:
        self.name = name
        self.service = service
        self.life = life
        self.dead = False
        self.ended = asyncio.Event()
        self.at_death: list[Callable[[], None]] = []
        """Actions of the operating system after a death, such as releasing locks and closing connections."""
        self.thread_delay_s = 0.0
        self._tasks = InOrder()
        self._main: asyncio.Task[None] | None = None
        self._context = contextvars.copy_context()
        self._context.run(CURRENT.set, self)

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """Register a task that was created in this process."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine as part of this process, as a request from outside does."""
        return asyncio.get_running_loop().create_task(work, context=self._context)

    def die(self) -> None:
        """Kill the process. If its own code calls this, the call raises `Killed`."""
        if not self.dead:
            self.dead = True
            for clean in self.at_death:
                clean()
            self.ended.set()

    def stop(self) -> None:
        """Stop the process as by SIGTERM: cancel the main task, which may clean up."""
        if self._main is not None:
            self._main.cancel()

    async def run(self, main: Callable[[], Awaitable[None]]) -> BaseException | None:
        """Run the process to its end. Return the exception that ended it, or None after a stop or a kill."""

        async def body() -> None:
            await main()

        self._main = self.spawn(body())
        self._main.add_done_callback(lambda _: self.ended.set())
        await self.ended.wait()
        killed = self.dead
        if not killed:
            await asyncio.wait([self._main])
            self.die()
        await end(lambda: list(self._tasks), f"{self.name} does not die")
        if killed or self._main.cancelled():
            return None
        return self._main.exception()


def task_factory(
    loop: asyncio.AbstractEventLoop, work: Any, *, context: contextvars.Context | None = None
) -> asyncio.Task[Any]:
    """Hook that registers each task with its process."""
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context)
    process = context.get(CURRENT) if context is not None else CURRENT.get()
    if process is not None:
        process.adopt(task)
    return task


class ProcessSlot:
    """Slot whose process is restarted after each end, as by `headrace up`."""

    def __init__(
        self,
        name: str,
        service: str,
        main: Callable[[], Awaitable[None]],
        restart_s: Callable[[], float],
        born: Callable[[Process], None],
        ended: Callable[[Process, BaseException | None], None],
    ) -> None:
        self.name = name
        self.service = service
        self.process: Process | None = None
        """Running process, or None between two lives."""
        self.started = asyncio.Event()
        self._main = main
        self._restart_s = restart_s
        self._born = born
        self._ended = ended

    async def run(self) -> None:
        """Run the process and restart it after each end, until cancelled, which kills it."""
        life = 0
        while True:
            self.process = process = Process(self.name, self.service, life)
            self._born(process)
            try:
                error = await process.run(self._main)
            finally:
                process.die()
                self.process = None
            self._ended(process, error)
            life += 1
            await asyncio.sleep(self._restart_s())


AtCommit = Literal["refused", "unanswered", "die_before", "die_after"]
"""Fault of a commit: refused, executed with a lost answer, or death of the process before or after it."""


USUAL_COMMIT_S = 2e-3


class Mishaps:
    """Armed faults; each happens once, in the next call of its kind."""

    def __init__(self, count: Callable[[str], None]) -> None:
        self._count = count
        self._commits: dict[str, list[AtCommit]] = {}
        self._blob_deaths: Counter[str] = Counter()
        self.blobs_away = False
        self.commit_s = USUAL_COMMIT_S
        """Maximum duration of a commit in seconds."""

    def arm_commit(self, service: str, mishap: AtCommit, times: int = 1) -> None:
        self._commits.setdefault(service, []).extend([mishap] * times)

    def at_commit(self, process: Process) -> AtCommit | None:
        armed = self._commits.get(process.service)
        if not armed:
            return None
        mishap = armed.pop(0)
        self._count(f"commit_{mishap}")
        return mishap

    def arm_blob_death(self, service: str, after: int) -> None:
        """Let the service's process die before its `after`-th change of the blob store from now."""
        self._blob_deaths[service] = after

    def at_blob_change(self) -> None:
        """Apply the armed faults before a blob or pointer changes.

        Raises `Unavailable` during an outage of the store.
        """
        process = CURRENT.get()
        if process is None:
            return
        if process.dead:
            raise Killed(process.name)
        if self.blobs_away:
            raise Unavailable("the blob store is away")
        left = self._blob_deaths.get(process.service, 0)
        if left == 1:
            self._count("death_while_saving")
            process.die()
            del self._blob_deaths[process.service]
            raise Killed(process.name)
        if left:
            self._blob_deaths[process.service] = left - 1

    def heal(self) -> None:
        self._commits.clear()
        self._blob_deaths.clear()
        self.blobs_away = False
        self.commit_s = USUAL_COMMIT_S


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
