"""Pool of processes that run reward functions. All run the same code, and a process that dies is replaced."""

from __future__ import annotations

import asyncio
import time

from headrace_runtime.errors import HeadraceError
from headrace_runtime.process.logs import get_logger
from headrace_scorer import metrics
from headrace_scorer.functions.loading import RewardFunction
from headrace_scorer.functions.outcomes import Outcome
from headrace_scorer.functions.process import FunctionProcess
from headrace_scorer.functions.protocol import CallRequest, LoadRequest
from headrace_scorer.settings import ScorerSettings

log = get_logger(__name__)
_RESTART_S = 1.0


class FunctionPool:
    """Pool of `scorer.function_workers` processes. `functions` are the reward functions that are loaded now."""

    def __init__(self, settings: ScorerSettings) -> None:
        self._settings = settings
        self._idle: asyncio.Queue[FunctionProcess] = asyncio.Queue()
        self._members: set[FunctionProcess] = set()
        """Processes that run the current code. Other processes are stopped after their call."""
        self._sources: dict[str, str] = {}
        self.functions: tuple[RewardFunction, ...] = ()

    async def close(self) -> None:
        for process in self._members:
            await process.stop()

    async def reload(self) -> None:
        """Read the files of the functions, and replace all processes.

        Raises:
            FunctionsRefused: a function cannot be loaded. The processes from before stay in use.
        """
        if not self._settings.functions:
            return
        started = await self._start_all()
        loaded, before = started[0].loaded, self._members
        self._members = set(started)
        self._sources, self.functions = loaded.sources, loaded.functions
        while not self._idle.empty():
            await self._idle.get_nowait().stop()
        for process in started:
            self._idle.put_nowait(process)
        if loaded.uncovered:
            log.warning("functions_read_other_files", not_covered_by_digests=list(loaded.uncovered)[:20])
        log.info("functions_loaded", functions=[function.name for function in self.functions], again=bool(before))

    async def call(self, call: CallRequest, trajectory: bytes) -> Outcome:
        """Wait for a free process, and call one function in it."""
        process = await self._idle.get()
        began = time.monotonic()
        outcome = await process.call(call, trajectory, self._settings.function_timeout_s)
        outcome.judged_by = process.digest(call.function)
        metrics.FUNCTION_SECONDS.labels(call.function).observe(time.monotonic() - began)
        if process not in self._members:
            await process.stop()
        elif process.dead:
            metrics.WORKER_RESTARTS.labels(outcome.outcome).inc()
            log.warning("function_process_ended", function=call.function, reason=outcome.reason)
            self._members.remove(process)
            await self._replace()
        else:
            self._idle.put_nowait(process)
        return outcome

    async def _replace(self) -> None:
        """Start a process in place of one that ended. Retry until it starts, so that the pool never gets smaller."""
        while True:
            try:
                return await self._add(await self._start(self._sources))
            except (HeadraceError, OSError) as error:
                log.warning("function_process_missing", error=str(error))
                await asyncio.sleep(_RESTART_S)

    async def _add(self, process: FunctionProcess) -> None:
        if process.loaded.sources == self._sources:
            self._members.add(process)
            self._idle.put_nowait(process)
        else:  # the code was reloaded while this process started, so a newer process has replaced it
            await process.stop()

    async def _start_all(self) -> list[FunctionProcess]:
        """Start all processes. The first reads the files; the others use the text that it read."""
        started = [await self._start({})]
        try:
            while len(started) < self._settings.function_workers:
                started.append(await self._start(started[0].loaded.sources))
        except BaseException:
            for process in started:
                await process.stop()
            raise
        return started

    async def _start(self, sources: dict[str, str]) -> FunctionProcess:
        return await FunctionProcess.start(
            LoadRequest(specs=self._settings.functions, sources=sources, memory_mb=self._settings.function_memory_mb),
            self._settings.function_environment,
        )
