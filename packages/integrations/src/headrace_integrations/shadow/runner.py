"""`TrainingRunner`, which selects requests of users and lets training copies of the agent answer them in the
background.
"""

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

from headrace.blocking import LoopThread
from headrace.errors import HeadraceError, UsageError
from headrace_integrations.practice.runs import Run, call_agent, run_in_thread
from headrace_integrations.practice.sinks import TrajectorySink
from headrace_integrations.shadow.selection import (
    SamplingRateStrategy,
    SelectionStrategy,
    ServedRequest,
    TrainingCopy,
    WriteRefused,
    open_marks,
)

RewardValue = float | Mapping[str, float] | None
MakeAgent = Callable[[TrainingCopy], Any]
Rate = Callable[[TrainingCopy], RewardValue | Awaitable[RewardValue]]
Inputs = TypeVar("Inputs")
Answer = TypeVar("Answer")
log = logging.getLogger("headrace.shadow")


@dataclass(slots=True)
class CopyCounts:
    """Numbers of requests and runs since a `TrainingRunner` started.

    `offered` is the sum of `missed`, `selected`, and the requests that were not selected or are not yet decided.
    """

    offered: int = 0
    missed: int = 0
    """Requests that were not accepted: too many were waiting, the runner was not running, or the inputs could not be
    copied."""
    selected: int = 0
    rewarded: int = 0
    """Runs whose reward was sent."""
    unrewarded: int = 0
    """Runs for which `reward` returned None. They are not trained."""
    failed: int = 0
    """Runs that raised, timed out, or whose reward could not be sent. They are not trained and never count as
    reward 0."""
    refused: int = 0
    """Failed runs that tried to write."""
    abandoned: int = 0
    """Requests that were unfinished when the timeout of `stop` ended."""


class TrainingRunner:
    """Runner that replays selected requests with training copies of an agent and sends their rewards.

    All work runs in a thread of the runner, and blocking functions in `at_once` further threads. Exceptions there never
    affect a user's request.

    Args:
        sink: destination of the runs.
        make_agent: function that builds the agent of one run from a `TrainingCopy`, with `copy.openai()`, `copy.model`
            and `copy.tools(...)`. `headrace.practice.agents.call_agent` describes the agents that can be called. It may
            be async.
        reward: function that returns the reward of a finished copy: a number, parts whose sum is the reward, or None.
            It may be async. A run that raises has no reward.
        selection: strategy that selects requests; by default 10 % of them at random.
        repeat: number of runs of each selected request.
        at_once: number of concurrent runs.
        waiting_max: number of pending requests beyond which further requests are counted as missed and dropped.
        run_timeout_s: time limit of one run in seconds.
        commit_interval_s: seconds between commits of the sink; 0 disables them.
    """

    def __init__(
        self,
        sink: TrajectorySink,
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
                raise UsageError(f"{name} = {value}: must be at least 1")
        if not (run_timeout_s > 0 and commit_interval_s >= 0):
            raise UsageError("run_timeout_s: must be above 0; commit_interval_s: must be 0 (no commits) or above")
        self.selection = selection or SamplingRateStrategy()
        self.last_error: str | None = None
        """Error of the last failed run or commit. It may contain users' text, so logs only contain its type."""
        self._sink, self._make_agent, self._reward = sink, make_agent, reward
        self._repeat, self._at_once, self._waiting_max = repeat, at_once, waiting_max
        self._run_timeout_s, self._commit_interval_s = run_timeout_s, commit_interval_s
        self._counts, self._lock = CopyCounts(), threading.Lock()
        self._accepting = False
        self._waiting = 0
        self._thread: LoopThread | None = None
        self._stopped = False

    @property
    def counts(self) -> CopyCounts:
        """A copy of the counts at present."""
        with self._lock:
            return replace(self._counts)

    def start(self) -> Self:
        """Start the runner's thread. A runner can be started only once."""
        if self._thread is not None:
            raise UsageError("this runner was already started; create another runner")
        self._client = self._sink.stack.async_client()
        self._run_slots = asyncio.Semaphore(self._at_once)
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = LoopThread("headrace-training-copies", self._at_once)
        self._timer = asyncio.run_coroutine_threadsafe(self._commit_periodically(), self._thread.loop)
        self._accepting = True
        return self

    def watched(self, answer_request: Callable[[Inputs], Answer]) -> Callable[[Inputs], Answer]:
        """Wrap the function that answers requests, so that each request is offered to the runner after its answer.

        Requests for which the function raises are not offered. The wrapper deep-copies the inputs before the call,
        which is the only delay for the user.
        """
        if inspect.iscoroutinefunction(answer_request):

            @functools.wraps(answer_request)
            async def awaiting(inputs: Any) -> Any:
                return await self._offer_after(self._copy_request(inputs), answer_request(inputs))

            return awaiting  # type: ignore[return-value]

        @functools.wraps(answer_request)
        def calling(inputs: Any) -> Any:
            request = self._copy_request(inputs)
            answer = answer_request(inputs)
            if inspect.isawaitable(answer):
                return self._offer_after(request, answer)
            self._accept(request, answer)
            return answer

        return calling

    def offer(self, inputs: Any, answer: Any = None) -> None:
        """Offer an answered request, for programs that do not use `watched`. It returns immediately and never
        raises."""
        self._accept(self._copy_request(inputs), answer)

    def commit(self) -> None:
        """Wait until the destination (`sink`) has stored all results so far. Raises `HeadraceError` if that fails."""
        if self._thread is None or not self._accepting:
            raise UsageError("this runner is not running; call start first")
        self._thread.result(self._sink.commit(self._client))

    def stop(self, timeout_s: float = 60.0) -> None:
        """Stop accepting requests, wait up to `timeout_s` for the accepted ones, commit, and end the thread.

        Raises:
            HeadraceError: the commit failed. The runner has ended nevertheless.
        """
        if self._thread is None or self._stopped:
            return
        self._stopped = True
        with self._lock:  # a concurrent request sees either an open loop or a stopped runner
            self._accepting = False
        try:
            self._thread.result(self._drain(timeout_s))
            self._thread.result(self._sink.commit(self._client))
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

    def _copy_request(self, inputs: Any) -> ServedRequest | None:
        marks = open_marks()
        try:
            return ServedRequest(copy.deepcopy(inputs), None, marks.labels, marks.task_id)
        except Exception as error:  # noqa: BLE001 (a user's type may raise anything, and the request goes on)
            self._note(error, "a request's inputs could not be copied")
            return None

    async def _offer_after(self, request: ServedRequest | None, work: Awaitable[Any]) -> Any:
        answer = await work
        self._accept(request, answer)
        return answer

    def _accept(self, request: ServedRequest | None, answer: Any) -> None:
        with self._lock:
            self._counts.offered += 1
            if request is None or self._thread is None or not self._accepting or self._waiting >= self._waiting_max:
                self._counts.missed += 1
                return
            self._waiting += 1
            self._thread.loop.call_soon_threadsafe(self._begin, replace(request, answer=answer))

    def _begin(self, request: ServedRequest) -> None:
        task = asyncio.get_running_loop().create_task(self._replay(request))
        self._tasks.add(task)
        task.add_done_callback(self._on_request_done)

    def _on_request_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        with self._lock:
            self._waiting -= 1
        if not task.cancelled() and (error := task.exception()) is not None:
            self._note(error, "a request could not be played again")

    async def _replay(self, request: ServedRequest) -> None:
        if not self.selection.should_select(request):
            return
        self._count("selected")
        task_id = request.task_id or f"task-{uuid.uuid4()}"
        async with asyncio.TaskGroup() as group:
            for number in range(self._repeat):
                group.create_task(self._run(request, task_id, number))

    async def _run(self, request: ServedRequest, task_id: str, number: int) -> None:
        async with self._run_slots:
            run = self._sink.run(self._client, task_id, number)
            training_copy = TrainingCopy(run, request)

            async def play(_task: Any, _run: Run) -> None:
                async with asyncio.timeout(self._run_timeout_s):
                    await self._play_copy(training_copy, run)

            await run.execute(play)
        if run.error is not None:
            self._count("failed")
            if training_copy.refused:
                self._count("refused")
            self.last_error = run.error
            log.warning("a training copy failed: %s", run.error.partition(":")[0])
        else:
            self._count("rewarded" if run.rewards else "unrewarded")

    async def _play_copy(self, training_copy: TrainingCopy, run: Run) -> None:
        try:
            training_copy.agent = await run_in_thread(lambda: self._make_agent(training_copy))
            training_copy.answer = await call_agent(training_copy.agent, training_copy.inputs)
        except WriteRefused:
            raise
        except Exception:
            training_copy.check()  # an agent may wrap the refusal in its own exception
            raise
        training_copy.check()
        reward = await run_in_thread(lambda: self._reward(training_copy))
        if isinstance(reward, Mapping):
            run.reward(parts=reward)
        elif reward is not None:
            run.reward(reward)

    async def _commit_periodically(self) -> None:
        while self._commit_interval_s:
            await asyncio.sleep(self._commit_interval_s)
            try:
                await self._sink.commit(self._client)
            except HeadraceError as error:  # the next commit includes these runs
                self._note(error, "a commit failed")

    async def _drain(self, timeout_s: float) -> None:
        self._timer.cancel()
        if self._tasks:
            _, unfinished = await asyncio.wait(self._tasks, timeout=timeout_s)
            self._count("abandoned", len(unfinished))
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)

    def _count(self, name: str, more: int = 1) -> None:
        with self._lock:
            setattr(self._counts, name, getattr(self._counts, name) + more)

    def _note(self, error: BaseException, problem: str) -> None:
        """Store an error, and log only its type, because its message may contain a user's text."""
        self.last_error = f"{type(error).__name__}: {error}"
        log.warning("%s: %s", problem, type(error).__name__)
