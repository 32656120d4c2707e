"""Pool of processes that run reward functions: starts them, calls them, replaces one that dies or takes too long,
and checks them before a start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence

from headrace_runtime.errors import HeadraceError, SettingError, Unavailable
from headrace_runtime.process.logs import get_logger
from headrace_runtime.process.parent_death import parent_bound_command
from headrace_runtime.process.programs import program_environment
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.isolation import reason_of
from headrace_scorer import metrics
from headrace_scorer.functions.loading import RewardFunction
from headrace_scorer.functions.outcomes import LENGTH, CallRequest, LoadRequest, LoadResponse, Outcome
from headrace_scorer.settings import ScorerSettings

_LOAD_TIMEOUT_S = 60.0
log = get_logger(__name__)
_RESTART_S = 1.0


class FunctionsRefused(HeadraceError):
    """Error of loading a reward function. The message names the function's spec and the reason."""


class FunctionProcess:
    """A process that runs reward functions, one call at a time. After a time-out or a crash it is not used again."""

    def __init__(self, process: asyncio.subprocess.Process, loaded: LoadResponse) -> None:
        self._process = process
        self.loaded = loaded
        self.dead = False
        self.calls = 0
        """Number of calls that the process was given."""

    @classmethod
    async def start(cls, request: LoadRequest, passed_on: Sequence[str] = ()) -> FunctionProcess:
        """Start a process, and load the functions in it.

        Args:
            request: functions to load.
            passed_on: names of environment variables that the process gets besides those of the system.

        Raises:
            FunctionsRefused: the functions cannot be loaded.
            Unavailable: the process ended before it answered.
        """
        command = parent_bound_command([sys.executable, "-m", "headrace_scorer.functions.worker"])
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=pipe,
            stdout=pipe,
            start_new_session=True,
            close_fds=True,
            env=program_environment(passed_on),
        )
        started = cls(process, LoadResponse())
        try:
            async with asyncio.timeout(_LOAD_TIMEOUT_S):
                started.loaded = LoadResponse.model_validate_json(
                    await started._exchange(request.model_dump_json().encode())
                )
        except TimeoutError:
            await started.stop()
            raise FunctionsRefused(f"importing {', '.join(request.specs)} took over {_LOAD_TIMEOUT_S:g} s") from None
        except (EOFError, OSError) as error:
            await started.stop()
            raise Unavailable(f"the process of reward functions ended as it started ({started.status})") from error
        except BaseException:
            await started.stop()
            raise
        if started.loaded.error is not None:
            await started.stop()
            raise FunctionsRefused(started.loaded.error)
        return started

    async def call(self, call: CallRequest, trajectory: bytes, timeout_s: float) -> Outcome:
        """Call a reward function in the process and return its outcome.

        A function that exceeds `timeout_s` or ends the process gets the outcome `timed_out` or `failed`.
        """
        self.calls += 1
        try:
            async with asyncio.timeout(timeout_s):
                return Outcome.model_validate_json(await self._exchange(call.model_dump_json().encode(), trajectory))
        except TimeoutError:
            await self.stop()
            return Outcome(outcome="timed_out", reason=f"not done after {timeout_s:g} s")
        except (EOFError, OSError):
            await self.stop()
            return Outcome.failed(f"its process ended ({self.status})")
        except asyncio.CancelledError:
            await self.stop()
            raise
        except Exception as error:  # noqa: BLE001 (a request that cannot be sent, or an answer that cannot be read)
            await self.stop()
            return Outcome.failed(reason_of(error))

    def digest(self, function: str) -> str | None:
        """Return the digest of a function's source in this process, or None if the process has not loaded the
        function.
        """
        return next((f"sha256:{loaded.digest}" for loaded in self.loaded.functions if loaded.name == function), None)

    @property
    def status(self) -> str:
        """Exit status of the process, or the signal that ended it."""
        code = self._process.returncode
        return f"signal {-code}" if code is not None and code < 0 else f"status {code}"

    async def stop(self) -> None:
        """Kill the process and all processes that it started, without saving any state."""
        self.dead = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.shield(self._process.wait())

    async def _exchange(self, *messages: bytes) -> bytes:
        """Send messages, and return the answer of the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"".join(LENGTH.pack(len(message)) + message for message in messages))
        await self._process.stdin.drain()
        (size,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
        return await self._process.stdout.readexactly(size)


class FunctionPool:
    """Pool of `scorer.function_workers` processes that call reward functions.

    `functions` are the functions that are loaded now.
    """

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
        """Read the source files of the functions again, and replace all processes.

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
        """Wait for a free process, and call one function in it.

        If a process ends that has run other calls before, the call is repeated once, because one of them may have left
        a thread or a damaged module that ended it.
        """
        outcome, process = await self._call_once(call, trajectory)
        if process.dead and process.calls > 1 and outcome.outcome == "failed":
            outcome, _ = await self._call_once(call, trajectory)
        return outcome

    async def _call_once(self, call: CallRequest, trajectory: bytes) -> tuple[Outcome, FunctionProcess]:
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
        return outcome, process

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
        """Start all processes. The first one reads the files; the others get the texts that it read."""
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


async def check(_common: Common, settings: ScorerSettings) -> list[str]:
    """Check before a start that all reward functions can be loaded, in a separate process.

    Raises:
        SettingError: a function cannot be loaded.
        Unavailable: the process ended before it answered.
    """
    pool = FunctionPool(settings.model_copy(update={"function_workers": 1}))
    try:
        await pool.reload()
    except FunctionsRefused as error:
        raise SettingError("scorer.functions", settings.functions, str(error)) from None
    finally:
        await pool.close()
    return []
