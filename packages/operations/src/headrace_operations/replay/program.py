"""Running of a service's own program over pipes. Every failure has a reason."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import IO

from headrace.errors import HeadraceError, UsageError
from headrace_operations.supervisor.plan import installed
from headrace_runtime.process.parent_death import bound_to_parent
from headrace_runtime.process.programs import line_of, parse_line

_LINE_BYTES_MAX = 256 * 1024 * 1024
_BUFFER_BYTES = 1 << 20
_USAGE = 2
"""Exit status of a service with invalid settings."""


class Program:
    """Child process that runs a service's own program on lines of standard input. `start_program` starts it.

    Use `feed` and `lines` from two tasks: the program stops reading while its output is not read.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        self._name = name
        self._process = process
        self._log = log

    async def feed(self, command: str, value: bytes) -> None:
        """Send one line: the word `command` and JSON. Waits while the program is busy, and raises its failure."""
        assert self._process.stdin is not None
        self._process.stdin.write(line_of(command, value))
        try:
            await self._process.stdin.drain()
        except ConnectionError:
            await self.wait_ended()
            raise

    def close(self) -> None:
        """Close the input; no command may follow."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def lines(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield word and JSON of each line of output until the program ends. Raises the program's failure."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            yield parse_line(line)
        await self.wait_ended()

    async def wait_ended(self) -> None:
        """Wait for the end of the program.

        Raises:
            UsageError: the settings of the program are invalid.
            HeadraceError: the program failed otherwise.
        """
        status = await self._process.wait()
        if status:
            self._log.seek(0)
            reason = failure_reason(self._log.read().decode("utf-8", "replace").splitlines(), self._name)
            raise (UsageError if status == _USAGE else HeadraceError)(reason or f"{self._name}: exit status {status}")


def failure_reason(lines: Sequence[str], name: str) -> str:
    """Return the last message of a service before it ended, without the formatting of its log."""
    last = next((line for line in reversed(lines) if line.strip()), "")
    try:
        fields = json.loads(last)
    except (ValueError, RecursionError):
        return last.removeprefix("headrace ")
    return f"{name}: {fields.get('error') or fields.get('event')}" if isinstance(fields, dict) else last


def service_module(service: str) -> str:
    """Return the name of a service's package, such as `headrace_scorer`.

    Raises:
        UsageError: the service is not installed.
    """
    info = installed().get(service)
    if info is None:
        raise UsageError(f"the {service} service is not installed; install it with pip install headrace-{service}")
    return info.module


@asynccontextmanager
async def start_program(service: str, environ: Mapping[str, str], filter_: str = "replay") -> AsyncIterator[Program]:
    """Start `python -m headrace_<service>.<filter_>`; it is killed if the block is left before it has ended."""
    with tempfile.TemporaryFile() as log:
        command = bound_to_parent([sys.executable, "-m", f"{service_module(service)}.{filter_}"])
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=log, env=dict(environ), limit=_LINE_BYTES_MAX
        )
        assert process.stdin is not None
        process.stdin.transport.set_write_buffer_limits(high=_BUFFER_BYTES)
        try:
            yield Program(service, process, log)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
