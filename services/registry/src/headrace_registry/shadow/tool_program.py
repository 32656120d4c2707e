"""`shadow.tools_command`: a program of the operator that calls read-only tools and receives no other calls."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process

from pydantic import BaseModel, ValidationError

from headrace_registry.rollouts.settings import ShadowSettings
from headrace_registry.shadow.rerun import RerunFailed
from headrace_runtime.process.logs import get_logger
from headrace_runtime.process.parent_death import bound_to_parent
from headrace_runtime.process.programs import program_digest, program_environment
from headrace_schemas import FunctionCall

TOOL_TIMEOUT_S = 30.0
"""Seconds that one call of this program may take."""
TOOL_RESULT_BYTES_MAX = 262_144
"""Bytes of the longest line that this program may print."""

log = get_logger(__name__)


class ToolRequest(BaseModel):
    """A line of input for the program."""

    id: int
    name: str
    arguments: str


class ToolResult(BaseModel):
    """A line of output of the program."""

    id: int
    result: str


class ToolProgram:
    """The running program, which starts at the first call, and again after it ended.

    The process has a group of its own and ends with the registry.
    """

    def __init__(self, settings: ShadowSettings) -> None:
        self._settings = settings
        self._numbers = itertools.count(1)
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[str]] = {}
        self._starting = asyncio.Lock()

    async def call(self, function: FunctionCall) -> str:
        """Return the result of a tool that is marked read-only. Raises `RerunFailed`."""
        if function.name not in self._settings.read_only_tools:
            raise AssertionError(f"{function.name} is not marked read-only")
        async with self._starting:
            process = await self._running()
        request = ToolRequest(id=next(self._numbers), name=function.name, arguments=function.arguments)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = answer
        try:
            assert process.stdin is not None
            process.stdin.write(request.model_dump_json().encode() + b"\n")
            async with asyncio.timeout(TOOL_TIMEOUT_S):
                await process.stdin.drain()
                return await answer
        except TimeoutError:
            raise RerunFailed(f"tool {function.name}: no result within {TOOL_TIMEOUT_S:g} s") from None
        except ConnectionError:
            raise RerunFailed(f"tool {function.name}: shadow.tools_command has ended") from None
        finally:
            self._waiting.pop(request.id, None)

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _running(self) -> Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self.stop()
        digest = await asyncio.to_thread(program_digest, self._settings.tools_command)
        log.info("shadow_tools_begin", sha256=digest)
        command = [argument.replace("{python}", sys.executable) for argument in self._settings.tools_command]
        self._process = await asyncio.create_subprocess_exec(
            *bound_to_parent(command),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            start_new_session=True,
            limit=TOOL_RESULT_BYTES_MAX,
            env=program_environment(self._settings.tools_environment),
        )
        self._reading = asyncio.create_task(self._read(self._process))
        return self._process

    async def _read(self, process: Process) -> None:
        assert process.stdout is not None
        problem = "shadow.tools_command has ended"
        try:
            while line := await process.stdout.readline():
                result = ToolResult.model_validate_json(line)
                answer = self._waiting.get(result.id)
                if answer is not None and not answer.done():
                    answer.set_result(result.result)
        except ValidationError:
            problem = 'shadow.tools_command printed a line that is not {"id": ..., "result": "..."}'
        except ValueError:
            problem = f"shadow.tools_command printed a line longer than {TOOL_RESULT_BYTES_MAX} bytes"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(RerunFailed(problem))
                    answer.exception()  # a cancelled caller never retrieves it
            if self._process is process:
                self._process = None  # the next call starts another process
            await process.wait()
