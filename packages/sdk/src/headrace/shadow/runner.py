"""`TrainingRunner`: takes what users asked, selects, and has training copies play it again, beside the program."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import logging
import threading
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from headrace.errors import HeadraceError, UsageError
from headrace.practice.agents import asked, in_thread
from headrace.practice.copies import ServedRequest, TrainingCopy
from headrace.practice.doors import Door
from headrace.practice.loop_thread import LoopThread
from headrace.practice.read_only_tools import WriteRefused
from headrace.practice.runs import Run
from headrace.shadow.selection import SamplingRateStrategy, SelectionStrategy, open_marks

Said = float | Mapping[str, float] | None
MakeAgent = Callable[[TrainingCopy], Any]
Rate = Callable[[TrainingCopy], Said | Awaitable[Said]]
Asked = TypeVar("Asked")
Found = TypeVar("Found")
log = logging.getLogger("headrace.shadow")


@dataclass(slots=True)
class CopyCounts:
    """Since the start. `offered` = `missed` + `selected` + what was not selected or waits to be decided."""

    offered: int = 0
    missed: int = 0
    """Requests that were not taken: too many were waiting, nothing was running, or their inputs could not be copied."""
    selected: int = 0
    rewarded: int = 0
    """Runs whose reward was sent."""
    unrewarded: int = 0
    """Runs of which `reward` said None. They are not trained."""
    failed: int = 0
    """Runs that raised, took too long, or whose reward could not be sent. They are not trained, and are no 0."""
    refused: int = 0
    """Of those that failed, the ones that tried to write."""
    abandoned: int = 0
    """Requests that were under way when `stop` would wait no longer."""


class TrainingRunner:
    """Plays a share of the requests again, `repeat` times each, by copies of the agent, and has their runs trained.

    `make_agent(copy)` builds the agent of one run with `copy.openai()`, `copy.model` and `copy.tools(...)`; it is asked
    as `headrace.practice.agents.asked` asks. `reward(copy)` says how well it did: a number, parts whose sum it is, or
    None for no reward. Both may await. What raises has no reward, and the user notices nothing of it.

    At most `waiting_max` requests are held, further ones are missed; `at_once` runs play at a time. All of it is on a
    thread of its own, and what blocks on `at_once` others. Every `commit_interval_s` (0: never) the door commits.
    """

    def __init__(
        self,
        door: Door,
        make_agent: MakeAgent,
        reward: Rate,
        *,
        selection: SelectionStrategy | None = None,
        repeat: int = 1,
        at_once: int = 4,
        waiting_max: int = 1000,
        run_timeout_s: float = 300.0,
        commit_interval_s: float = 300.0,
    ) -> None:
        for name, value in (("repeat", repeat), ("at_once", at_once), ("waiting_max", waiting_max)):
            if value < 1:
                raise UsageError(f"{name} = {value}: at least 1 is wanted")
        if not (run_timeout_s > 0 and commit_interval_s >= 0):
            raise UsageError("run_timeout_s is above 0, and commit_interval_s 0 (never) or above")
        self.selection = selection or SamplingRateStrategy()
        self.last_error: str | None = None
        """Of the run or commit that failed last. It may hold what users said; logs only get its kind."""
        self._door, self._make_agent, self._reward = door, make_agent, reward
        self._repeat, self._at_once, self._waiting_max = repeat, at_once, waiting_max
        self._run_timeout_s, self._commit_interval_s = run_timeout_s, commit_interval_s
        self._counts, self._lock = CopyCounts(), threading.Lock()
        self._taking = False
        self._waiting = 0
        self._thread: LoopThread | None = None
        self._stopped = False

    @property
    def counts(self) -> CopyCounts:
        """As they are now."""
        with self._lock:
            return replace(self._counts)

    def start(self) -> Self:
        """Begin. A runner starts once."""
        if self._thread is not None:
            raise UsageError("this runner was started before; make another one")
        self._client = self._door.stack.async_client()
        self._room = asyncio.Semaphore(self._at_once)
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = LoopThread("headrace-training-copies", self._at_once)
        self._timer = asyncio.run_coroutine_threadsafe(self._commits(), self._thread.loop)
        self._taking = True
        return self

    def watched(self, ask: Callable[[Asked], Found]) -> Callable[[Asked], Found]:
        """`ask` as before, a function of one argument, and what it was asked is offered once it has answered. Requests
        that it raises for are not. Inputs that are no plain text are deep-copied first, which is all that users wait
        for."""
        if inspect.iscoroutinefunction(ask):

            @functools.wraps(ask)
            async def awaiting(inputs: Any) -> Any:
                return await self._answered(self._kept(inputs), ask(inputs))

            return awaiting  # type: ignore[return-value]

        @functools.wraps(ask)
        def calling(inputs: Any) -> Any:
            kept = self._kept(inputs)
            answer = ask(inputs)
            if inspect.isawaitable(answer):
                return self._answered(kept, answer)
            self._take(kept, answer)
            return answer

        return calling

    def offer(self, inputs: Any, answer: Any = None) -> None:
        """What `watched` does after the answer, for programs that call it themselves. It returns at once and raises
        nothing."""
        self._take(self._kept(inputs), answer)

    def commit(self) -> None:
        """Have the door commit. Waits for it. Raises `HeadraceError`."""
        if self._thread is None or not self._taking:
            raise UsageError("this runner does not run, and has nothing to commit")
        self._thread.result(self._door.commit(self._client))

    def stop(self, timeout_s: float = 60.0) -> None:
        """Take no more requests, let those that are held be played for so long, commit, and end. Raises
        `HeadraceError` where the commit fails; everything has ended all the same."""
        if self._thread is None or self._stopped:
            return
        self._stopped = True
        with self._lock:  # who takes a request finds the loop open, or no runner
            self._taking = False
        try:
            self._thread.result(self._drained(timeout_s))
            self._thread.result(self._door.commit(self._client))
        finally:
            self._thread.result(self._client.close())
            self._thread.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            self.stop()
        except HeadraceError as problem:
            if error is None:
                raise
            error.add_note(f"and the last commit failed: {problem}")

    def _kept(self, inputs: Any) -> ServedRequest | None:
        marks = open_marks()
        try:
            return ServedRequest(copy.deepcopy(inputs), None, marks.labels, marks.task_id)
        except Exception as error:  # noqa: BLE001 (a user's type may raise anything, and the request goes on)
            self._note(error, "a request's inputs could not be copied")
            return None

    async def _answered(self, kept: ServedRequest | None, work: Awaitable[Any]) -> Any:
        answer = await work
        self._take(kept, answer)
        return answer

    def _take(self, request: ServedRequest | None, answer: Any) -> None:
        with self._lock:
            self._counts.offered += 1
            if request is None or self._thread is None or not self._taking or self._waiting >= self._waiting_max:
                self._counts.missed += 1
                return
            self._waiting += 1
            self._thread.loop.call_soon_threadsafe(self._begin, replace(request, answer=answer))

    def _begin(self, request: ServedRequest) -> None:
        task = asyncio.get_running_loop().create_task(self._played(request))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        with self._lock:
            self._waiting -= 1
        if not task.cancelled() and (error := task.exception()) is not None:
            self._note(error, "a request could not be played again")

    async def _played(self, request: ServedRequest) -> None:
        if not self.selection.should_select(request):
            return
        self._count("selected")
        task_id = request.task_id or f"task-{uuid.uuid4()}"
        async with asyncio.TaskGroup() as group:
            for number in range(self._repeat):
                group.create_task(self._run(request, task_id, number))

    async def _run(self, request: ServedRequest, task_id: str, number: int) -> None:
        async with self._room:
            run = self._door.run(self._client, task_id, number)
            made = TrainingCopy(run, request)

            async def play(_task: Any, _run: Run) -> None:
                async with asyncio.timeout(self._run_timeout_s):
                    await self._once(made, run)

            await run.played(play)
        if run.error is not None:
            self._count("failed")
            if made.refused:
                self._count("refused")
            self.last_error = run.error
            log.warning("a training copy failed: %s", run.error.partition(":")[0])
        else:
            self._count("rewarded" if run.rewards else "unrewarded")

    async def _once(self, made: TrainingCopy, run: Run) -> None:
        try:
            made.agent = await in_thread(lambda: self._make_agent(made))
            made.answer = await asked(made.agent, made.inputs)
        except WriteRefused:
            raise
        except Exception:
            made.check()  # an agent may wrap the refusal in an error of its own
            raise
        made.check()
        said = await in_thread(lambda: self._reward(made))
        if isinstance(said, Mapping):
            run.reward(parts=said)
        elif said is not None:
            run.reward(said)

    async def _commits(self) -> None:
        while self._commit_interval_s:
            await asyncio.sleep(self._commit_interval_s)
            try:
                await self._door.commit(self._client)
            except HeadraceError as error:  # the next one commits this as well
                self._note(error, "a commit failed")

    async def _drained(self, timeout_s: float) -> None:
        self._timer.cancel()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
            self._count("abandoned", len(late))
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _count(self, name: str, more: int = 1) -> None:
        with self._lock:
            setattr(self._counts, name, getattr(self._counts, name) + more)

    def _note(self, error: BaseException, what: str) -> None:
        """Logs get the kind of an error alone: its words may be a user's."""
        self.last_error = f"{type(error).__name__}: {error}"
        log.warning("%s: %s", what, type(error).__name__)
