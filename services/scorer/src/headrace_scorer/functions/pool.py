"""The processes of reward functions: as many as the settings say, all with the same code, replaced when they die."""

from __future__ import annotations

import asyncio
import time

from headrace_runtime.errors import HeadraceError
from headrace_runtime.logs import get_logger
from headrace_scorer import metrics
from headrace_scorer.functions.loading import RewardFunction
from headrace_scorer.functions.outcomes import Outcome
from headrace_scorer.functions.process import FunctionProcess
from headrace_scorer.functions.protocol import CallRequest, LoadRequest
from headrace_scorer.settings import ScorerSettings

log = get_logger(__name__)
_RESTART_S = 1.0


class FunctionPool:
    """`functions` are those that are loaded; `call` waits for a free process."""

    def __init__(self, settings: ScorerSettings) -> None:
        self._settings = settings
        self._idle: asyncio.Queue[FunctionProcess] = asyncio.Queue()
        self._members: set[FunctionProcess] = set()
        """Processes with the code that is current; others end with their call."""
        self._sources: dict[str, str] = {}
        self.functions: tuple[RewardFunction, ...] = ()

    async def close(self) -> None:
        for process in self._members:
            await process.stop()

    async def reload(self) -> None:
        """Read the files, at the start or anew. Raises `FunctionsRefused` and leaves everything as it was."""
        if not self._settings.functions:
            return
        made = await self._fresh()
        before = self._members
        self._members = set(made)
        self._sources, self.functions = made[0].loaded.sources, made[0].loaded.functions
        while not self._idle.empty():
            await self._idle.get_nowait().stop()
        for process in made:
            self._idle.put_nowait(process)
        if made[0].loaded.uncovered:
            log.warning("functions_read_other_files", not_covered_by_digests=list(made[0].loaded.uncovered)[:20])
        log.info("functions_loaded", functions=[function.name for function in self.functions], again=bool(before))

    async def call(self, call: CallRequest, trajectory: bytes) -> Outcome:
        """Run one function, in the code that is current when a process is free for it."""
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
        """Start a process in place of one that ended, however long that takes: a pool never gets smaller."""
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
        else:  # the code was reloaded while this process started, so another one has its place
            await process.stop()

    async def _fresh(self) -> list[FunctionProcess]:
        """Processes with the files as they are now; all use the text that the first one read."""
        made = [await self._start({})]
        try:
            while len(made) < self._settings.function_workers:
                made.append(await self._start(made[0].loaded.sources))
        except BaseException:
            for process in made:
                await process.stop()
            raise
        return made

    async def _start(self, sources: dict[str, str]) -> FunctionProcess:
        return await FunctionProcess.start(
            LoadRequest(specs=self._settings.functions, sources=sources, memory_mb=self._settings.function_memory_mb),
            self._settings.function_environment,
        )
