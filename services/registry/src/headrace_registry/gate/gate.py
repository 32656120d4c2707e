"""Runs the gate's program: a program of the user that plays held-out tasks on request (`headrace_schemas.programs`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from importlib.util import find_spec
from typing import TypeVar

from pydantic import ValidationError

from headrace_registry.settings import GateSettings
from headrace_runtime.errors import HeadraceError, SettingError
from headrace_runtime.process.logs import get_logger
from headrace_runtime.process.parent_death import parent_bound_command
from headrace_runtime.process.programs import program_digest, program_environment
from headrace_schemas.programs import Play, PlayResult, Tasks

OUTPUT_BYTES_MAX = 67_108_864
"""Maximum bytes of output of one run. A run with more output has failed."""

log = get_logger(__name__)
T = TypeVar("T")
_CHUNK = 65_536
_LINE_BYTES_MAX = 16_777_216
"""Maximum bytes of one line of output. The limit is high because the first line contains the names of all tasks."""
_ERROR_TAIL = 500
_SPARE_S = 300.0
"""Seconds for which a program that was started in advance waits for a trial."""
_SHAPES = {
    Tasks: '{"gate": [names of tasks], "audit": [other names]}',
    PlayResult: '{"version": ..., "task": ..., "seed": ..., "score": 0..1}',
}


class GateFailed(HeadraceError):
    """Raised if the gate's program did not return a score: it ended, printed nothing for too long, or printed an
    invalid line.

    Such a failure never counts as a score.
    """

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class Gate:
    """Starts the gate's program. This is `gate.command`, or with `gate.ray.workers` a program of the registry that runs
    copies of `gate.command` on a Ray cluster."""

    def __init__(self, settings: GateSettings) -> None:
        """Create the gate. Raises `SettingError` if workers are configured but Ray is not installed."""
        if settings.ray.workers and find_spec("ray") is None:
            raise SettingError("registry.gate.ray.workers", settings.ray.workers, "install headrace-registry[ray]")
        self._settings = settings
        self._spare: SpareProgram | None = None
        self.configured = bool(settings.command)
        self.sha256 = program_digest(settings.command)
        """Digest of the gate's command and code, computed when a session starts the program.

        Scores of different gates are never compared.
        """

    def prepare(self) -> None:
        """Start the program in advance, for the next session that may use a spare.

        On a busy machine, an interpreter takes seconds to start, and a published version would wait for it. Copies on a
        Ray cluster are not started in advance, because each occupies CPUs of the cluster.
        """
        possible = self.configured and not self._settings.ray.workers
        if possible and (self._spare is None or self._spare.ended):
            self._spare = SpareProgram(self._start)

    @contextlib.asynccontextmanager
    async def session(self, *, use_spare: bool = False) -> AsyncIterator[GateSession]:
        """Start the program, and yield a session once the program has sent the names of its tasks.

        When the context ends, the program and its child processes are killed.

        Args:
            use_spare: whether the program that `prepare` started is used. If its files have changed since, or it has
                ended, the program is started again.

        Raises:
            GateFailed: the program did not name its tasks.
        """
        async with contextlib.AsyncExitStack() as stack:
            session = await self._take_spare(stack) if use_spare else None
            if session is None:
                session = await stack.enter_async_context(self._start())
            self.sha256 = session.sha256
            yield session

    async def _take_spare(self, stack: contextlib.AsyncExitStack) -> GateSession | None:
        """Return a session with the program that was started in advance, or None if there is none or its files have
        changed. The program is killed when `stack` is closed."""
        spare, self._spare = self._spare, None
        if spare is None:
            return None
        stack.push_async_callback(spare.release)
        session = await spare.claim()
        present = await asyncio.to_thread(program_digest, self._settings.command)
        if session is not None and session.problem is None and session.sha256 == present:
            return session
        await spare.release()
        return None

    @contextlib.asynccontextmanager
    async def _start(self) -> AsyncIterator[GateSession]:
        command = self._command()
        sha256 = await asyncio.to_thread(program_digest, self._settings.command)
        process = await asyncio.create_subprocess_exec(
            *parent_bound_command(command),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            start_new_session=True,
            limit=_LINE_BYTES_MAX,
            env=self._environment(),
        )
        session = GateSession(process, command[0], self._settings, sha256)
        reading = asyncio.create_task(session.read())
        try:
            await session.wait_for_tasks()
            yield session
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await process.wait()

    def _environment(self) -> Mapping[str, str]:
        if self._settings.ray.workers:  # our own program needs the whole environment to join the cluster
            return os.environ
        return program_environment(self._settings.environment)

    def _command(self) -> list[str]:
        if self._settings.ray.workers:
            return [sys.executable, "-m", "headrace_registry.gate_workers", self._settings.model_dump_json()]
        values = {"{base_url}": self._settings.base_url, "{python}": sys.executable}
        return [_fill_placeholders(argument, values) for argument in self._settings.command]


class GateSession:
    """Session with a running gate program. `play` may be called concurrently; the caller limits the number of plays."""

    def __init__(self, process: Process, name: str, settings: GateSettings, sha256: str) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._name = name
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        self._settings = settings
        self._tasks: asyncio.Future[Tasks] = asyncio.get_running_loop().create_future()
        self._waiting: dict[Play, asyncio.Future[float]] = {}
        self._last_output_s = asyncio.get_running_loop().time()
        self.sha256 = sha256
        """Digest of the command and code with which the program was started."""
        self.problem: GateFailed | None = None
        """Why the program plays no more; None while it runs."""

    @property
    def tasks(self) -> Tasks:
        return self._tasks.result()

    async def wait_for_tasks(self) -> None:
        """Wait until the program has sent the names of its tasks. Raises `GateFailed`."""
        await self._wait_for(self._tasks, "its tasks")

    async def play(self, version: str, task: str, seed: int) -> float:
        """Let a version play a task, and return its score from 0 to 1.

        Raises `GateFailed` if the program fails. All other plays in progress then also raise it.
        """
        if self.problem is not None:
            raise self.problem
        play = Play(version=version, task=task, seed=seed)
        if play in self._waiting:
            return await self._wait_for(self._waiting[play], f"{len(self._waiting)} plays")
        answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            self._last_output_s = asyncio.get_running_loop().time()
        self._waiting[play] = answer
        with contextlib.suppress(ConnectionError):  # `read` reports why the program stopped reading
            self._stdin.write(play.model_dump_json().encode() + b"\n")
            await self._stdin.drain()
        return await self._wait_for(answer, f"{len(self._waiting)} plays")

    async def _wait_for(self, future: asyncio.Future[T], request: str) -> T:
        """Wait for the result of a request, at most `gate.silence_s` without output. Each line of output restarts this
        time."""
        loop, silence_s = asyncio.get_running_loop(), self._settings.silence_s
        while not future.done():
            remaining_s = self._last_output_s + silence_s - loop.time()
            if remaining_s <= 0:
                raise GateFailed(
                    f"no output for gate.silence_s = {silence_s:g} s while {request} were requested", timed_out=True
                )
            await asyncio.wait([future], timeout=remaining_s)
        return future.result()

    async def read(self) -> None:
        """Read the output of the program until it ends, and pass the scores to the waiting plays.

        An error is passed to all waiting plays, and is not raised here.
        """
        errors = asyncio.create_task(_read_tail(self._stderr))
        problem = GateFailed("the run was cancelled")
        try:
            await self._read_lines()
            await self._process.wait()
            stderr_tail = await errors
            if self._process.returncode:
                status = f"{self._name} ended with status {self._process.returncode}"
                problem = GateFailed(f"{status}: {stderr_tail or 'no message on stderr'}")
            else:
                missing = "its standard input" if self._tasks.done() else "naming its tasks"
                problem = GateFailed(f"the program ended before {missing}")
        except GateFailed as error:
            problem = error
        finally:
            errors.cancel()
            await asyncio.gather(errors, return_exceptions=True)
            self.problem = problem
            for answer in self._waiting.values():
                _fail(answer, problem)
            _fail(self._tasks, problem)

    async def _read_lines(self) -> None:
        size = number = 0
        while line := await self._read_line():
            self._last_output_s = asyncio.get_running_loop().time()
            number += 1
            size += len(line)
            if size > OUTPUT_BYTES_MAX:
                raise GateFailed(f"the program printed more than {OUTPUT_BYTES_MAX} bytes")
            if line.strip():
                self._handle_line(line, number)

    async def _read_line(self) -> bytes:
        try:
            return await self._stdout.readline()
        except ValueError:
            raise GateFailed(f"a line is longer than {_LINE_BYTES_MAX} bytes") from None

    def _handle_line(self, line: bytes, number: int) -> None:
        message_type: type[Tasks] | type[PlayResult] = PlayResult if self._tasks.done() else Tasks
        try:
            message = message_type.model_validate_json(line)
        except ValidationError as error:
            raise GateFailed(
                f"line {number} of its output is not {_SHAPES[message_type]}: {_first_error(error)}"
            ) from None
        if isinstance(message, Tasks):
            self._tasks.set_result(message)
            return
        play = Play(version=message.version, task=message.task, seed=message.seed)
        answer = self._waiting.pop(play, None)
        if answer is None:
            raise GateFailed(
                f"line {number} of its output has the score of a play that was not requested: {message.task!r}"
            )
        if not answer.done():
            answer.set_result(message.score)


class SpareProgram:
    """Gate program that was started before a trial needs it, to save the time of its start."""

    def __init__(self, start: Callable[[], AbstractAsyncContextManager[GateSession]]) -> None:
        self._ready: asyncio.Future[GateSession | None] = asyncio.get_running_loop().create_future()
        self._claim = asyncio.Event()
        self.ended = False
        """Whether the program can no longer be claimed, because it failed, or because no trial claimed it within
        `_SPARE_S`."""
        self._task = asyncio.create_task(self._hold(start))

    async def claim(self) -> GateSession | None:
        """Reserve the program for a trial. Return its session once it has sent the names of its tasks, or None if it
        has ended."""
        self._claim.set()
        return None if self.ended else await asyncio.shield(self._ready)

    async def release(self) -> None:
        """Kill the program, even if it is still starting."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _hold(self, start: Callable[[], AbstractAsyncContextManager[GateSession]]) -> None:
        try:
            async with start() as session:
                self._ready.set_result(session)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_SPARE_S):
                        await self._claim.wait()
                if self._claim.is_set():
                    await asyncio.Event().wait()  # until `release` cancels this task
                self.ended = True
        except (GateFailed, OSError) as error:  # the trial starts the program itself, and reports why it fails
            log.warning("spare_program_failed", error=str(error))
        finally:
            self.ended = True
            if not self._ready.done():
                self._ready.set_result(None)


def _fail(waiting: asyncio.Future[T], problem: GateFailed) -> None:
    if not waiting.done():
        waiting.set_exception(problem)
        waiting.exception()  # a cancelled caller never retrieves it


def _fill_placeholders(argument: str, values: Mapping[str, str]) -> str:
    for placeholder, value in values.items():
        argument = argument.replace(placeholder, value)
    return argument


def _first_error(error: ValidationError) -> str:
    first = error.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'line'}: {first['msg']}"


async def _read_tail(stream: asyncio.StreamReader) -> str:
    last = b""
    while chunk := await stream.read(_CHUNK):
        last = (last + chunk)[-_ERROR_TAIL:]
    return last.decode("utf-8", "replace").strip()
